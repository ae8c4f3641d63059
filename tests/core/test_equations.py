"""Each block against its equations, written independently of the implementation for one sequence."""

import cmath
from collections.abc import Sequence
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.core.small import model, tokens
from titans_core import LanguageModel, NeuralMemory
from titans_core.attention import Attention
from titans_core.blocks import Block, Positions
from titans_core.layers import Gating, RotaryEmbedding, rotate


def perturbed(m: LanguageModel) -> LanguageModel:
    """Norms and scales differ from one, so that a missing one is detected."""
    with torch.no_grad():
        for name, p in m.named_parameters():
            if "norm" in name or "scale" in name:
                p += 0.3 * torch.randn_like(p)
    return m


def rms(x: Tensor, norm: torch.nn.Module) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight


def projected(m: NeuralMemory, name: str, x: Tensor) -> Tensor:
    """q, k or v of a sequence [T, D] by Section 4.4: SiLU, convolution, L2 norm; [T, H, E]."""
    y, w = F.silu(x @ getattr(m, f"w_{name}").weight.T), getattr(m, f"conv_{name}").weight_KC
    y = sum(w[j] * F.pad(y, (0, 0, j, 0))[: len(y)] for j in range(len(w)))
    y = y.view(-1, m.config.heads, m.head_dim)
    return y / y.norm(dim=-1, keepdim=True)


def read(weights: Sequence[Tensor], x_HE: Tensor, bound: float | None = None) -> Tensor:
    """M(x) of each head, [H, E]; ``bound`` clips the gradient at the output of each layer."""
    for i, W in enumerate(weights):
        x_HE = torch.einsum("he,hef->hf", F.silu(x_HE) if i else x_HE, W)
        if bound is not None:
            x_HE.register_hook(lambda d: d * (bound / d.norm(dim=-1, keepdim=True)).clamp(max=1))
    return x_HE


def memory_equations(m: NeuralMemory, x: Tensor, prefix: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Eqs. 11-16 and 4.4 for one sequence [T, D], gradients by autograd; and the weights after it."""
    full, P, c = torch.cat([prefix, x]).detach(), len(prefix), m.config
    q, k, v = (projected(m, n, full) for n in "qkv")
    alpha, eta, theta = (
        torch.sigmoid(full @ gate.weight.T + gate.bias)[..., None, None] for gate in (m.alpha, m.eta, m.theta)
    )
    weights, y = [W.detach() for W in m.initial_weights], []
    base = weights if c.forget_to == "initial" else [0.0] * c.depth
    momentum, chunk_start = [torch.zeros_like(W) for W in weights], weights
    for t in range(len(full)):
        if (t if t < P else t - P) % c.chunk_size == 0:  # the prefix is written in separate chunks
            chunk_start = [W.detach().requires_grad_() for W in weights]
        loss = (read(chunk_start, k[t], c.surprise_bound) - v[t]).square().sum()  # (12)
        slopes = torch.autograd.grad(loss, chunk_start)
        momentum = [eta[t] * S - c.max_theta * theta[t] * g for S, g in zip(momentum, slopes, strict=True)]
        layers = zip(weights, momentum, base, strict=True)
        weights = [B + (1 - alpha[t]) * (W - B) + S for W, S, B in layers]  # (13, 14)
        y.append(read(weights, q[t]))  # (15)
    return memory_output(m, torch.stack(y[P:]), x), weights


def memory_output(m: NeuralMemory, y: Tensor, x: Tensor) -> Tensor:
    return (rms(y, m.output_norm).flatten(1) * F.silu(x @ m.output_gate.weight.T)) @ m.w_o.weight.T


def attention_projected(a: Attention, name: str, x: Tensor, prefix: Tensor) -> tuple[Tensor, Tensor]:
    """q, k or v of the prefix and of a sequence [T, D] after it, by Section 4.4; [H, P, E] and [H, T, E]."""
    c, full = a.config, torch.cat([prefix, x])
    y = full @ getattr(a, f"w_{name}").weight.T
    y = F.silu(y) if c.silu else y
    if c.conv:
        w = getattr(a, f"conv_{name}").weight_KC
        y = sum(w[j] * F.pad(y, (0, 0, j, 0))[: len(y)] for j in range(len(w)))
    y = y.view(len(full), c.heads, -1).transpose(0, 1)
    if c.qk_norm and name != "v":
        y = y / y.norm(dim=-1, keepdim=True)
        y = y * y.shape[-1] * a.scale_H[:, None, None] if name == "q" else y
    return y[:, : len(prefix)], y[:, len(prefix) :]


def attention_equations(a: Attention, x: Tensor, prefix: Tensor, *reads: Tensor, segment: int = 0) -> Tensor:
    """Queries x [T, D] over the prefix and, causally and within the window, over ``reads`` [T, D] and x.

    With a ``segment``, queries attend only within their segment and positions count from its start, while
    convolutions cross segments. Persistent tokens have no position; in a sliding window, neither have queries
    that attend to them.
    """
    at = torch.arange(len(x))

    def turned(y: Tensor, at: Tensor = at) -> Tensor:
        half = y.shape[-1] // 2
        angle = at.double()[:, None] * a.config.rope_base ** -(torch.arange(half).double() / half)
        z = torch.complex(y[..., :half], y[..., half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([z.real, z.imag], -1)

    plain, streams = attention_projected(a, "q", x, prefix)[1], (*reads, x)
    q, q_of_prefix = turned(plain), turned(plain, at % segment) if segment else plain
    keys = [attention_projected(a, "k", y, prefix) for y in streams]
    values = [attention_projected(a, "v", y, prefix) for y in streams]
    k = torch.cat([turned(after) for _, after in keys], 1)
    v = torch.cat([values[0][0], *(after for _, after in values)], 1)
    back = at[:, None] - at[None]
    seen = (back >= 0) & (back < (a.config.window or len(x)))
    if segment:
        seen &= at[:, None] // segment == at[None] // segment
    seen = torch.cat([seen.new_ones(len(x), len(prefix)), *[seen] * len(streams)], 1)
    scores = torch.cat([q_of_prefix @ keys[0][0].mT, q @ k.mT], -1) / k.shape[-1] ** 0.5
    y = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    return y.transpose(0, 1).flatten(1) @ a.w_o.weight.T


def gate_equations(b: Block, y: Tensor, m: Tensor) -> Tensor:
    """The update to the residual stream y, which gates the memory's output m."""
    gate = b.gate
    if b.options.gating == "sum":
        return m
    if b.options.gating == "product":
        return rms(y, gate.norm) * F.silu(rms(m, gate.memory_norm))
    y = rms(y, gate.norm)
    return (F.silu(y) if b.options.gating == "silu" else 2 / (1 + (-y).exp())) * m


def mac_equations(b: Block, x: Tensor, p: Tensor) -> Tensor:
    m, z, written, outputs = b.memory, rms(x, b.norm), x[:0], []
    weights, reads = list(m.initial_weights), x[:0]
    q = projected(m, "q", z)
    for part in torch.arange(len(x)).split(b.segment_size):
        r = memory_output(m, torch.stack([read(weights, q[t]) for t in part]), z[part])  # (21)
        reads, end = torch.cat([reads, r]), int(part[-1]) + 1
        y = attention_equations(b.attention, z[:end], p, reads, segment=b.segment_size)  # (22, 23)
        y = x[part] + y[part]
        written = torch.cat([written, rms(y, b.memory_norm)])
        o, weights = memory_equations(m, written, x[:0])  # (24)
        outputs.append(y + gate_equations(b, y, o[part]))  # (25)
    return torch.cat(outputs)


BLOCK_CASES = [("lmm", {}), ("mal", {}), ("transformer", {})]
BLOCK_CASES += [("transformer", {"options": {"projections": "titans"}})]
BLOCK_CASES += [(v, {"options": {"gating": gating}}) for v in ("mac", "mag") for gating in get_args(Gating)]
BLOCK_CASES += [(v, {"forget_to": "initial", "alpha_bias": -2.0}) for v in ("lmm", "mac")]


@pytest.mark.parametrize(("variant", "switches"), BLOCK_CASES)
def test_a_block_is_the_equations_of_the_paper(variant, switches):
    b = perturbed(model(variant, **switches)).blocks[0]
    x, p = torch.randn(37, 16, dtype=torch.float64), b.persistent_PD
    z = rms(x, b.norm)
    if variant == "lmm":
        expected = x + memory_equations(b.memory, z, p)[0]
    elif variant == "mac":
        expected = mac_equations(b, x, p)
    elif variant == "mag":  # (26-28)
        y = x + attention_equations(b.attention, z, p)
        expected = y + gate_equations(b, y, memory_equations(b.memory, z, p)[0])
    elif variant == "mal":  # (29-31)
        y = x + memory_equations(b.memory, z, p)[0]
        expected = y + attention_equations(b.attention, rms(y, b.attention_norm), x[:0])
    else:
        expected = x + attention_equations(b.attention, z, x[:0])
    found, _ = b.mix(x[None], None, Positions(torch.arange(37)[None]))
    torch.testing.assert_close(found[0], expected, rtol=1e-9, atol=1e-10)


def test_rotary_angles_are_exact_two_million_tokens_in():
    at = torch.tensor([[0, 1, 999_983, 2_097_151]])
    x = torch.randn(1, 1, 4, 64, generator=torch.Generator().manual_seed(0))
    found = rotate(x, RotaryEmbedding.at(at, 64, 10_000.0, x.dtype))
    pairs = torch.complex(x[..., :32].double(), x[..., 32:].double())
    for t, position in enumerate(at[0].tolist()):
        for i in range(32):
            turned = complex(pairs[0, 0, t, i]) * cmath.exp(1j * (position * 10_000.0 ** (-i / 32)))
            assert abs(turned - complex(found[0, 0, t, i], found[0, 0, t, 32 + i])) < 1e-6


def test_a_full_window_equals_full_attention_and_a_smaller_one_does_not():
    full, windowed = model("transformer", window=None), model("transformer", window=12)
    wide = model("transformer", window=60)
    x = tokens(2, 60)
    torch.testing.assert_close(wide(x).logits, full(x).logits)
    torch.testing.assert_close(windowed(x[:, :12]).logits, full(x[:, :12]).logits)
    assert not torch.allclose(windowed(x).logits[:, 20:], full(x).logits[:, 20:])
