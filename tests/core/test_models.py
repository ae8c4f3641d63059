"""The models: causal, independent across the batch, trained through and through, exact however cut."""

from __future__ import annotations

import cmath
import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from titans_core import (
    BLOCKS,
    AttentionConfig,
    Documents,
    LanguageModel,
    MemoryConfig,
    ModelConfig,
    NeuralMemory,
    count_parameters,
    presets,
    record,
)
from titans_core.attention import Attention
from titans_core.blocks import Block, Positions
from titans_core.layers import RotaryEmbedding, rotate
from titans_kernels import DecodeState, read_memory

VARIANTS = sorted(BLOCKS)
MEMORY_VARIANTS = [v for v in VARIANTS if v != "transformer"]
SWITCHES: dict[str, dict] = {
    "default": {},
    "linear": {"depth": 1},
    "deep": {"depth": 4},
    "online": {"chunk_size": 1},
    "no_conv": {"conv": False},
    "no_momentum": {"momentum": False},
    "no_decay": {"decay": False},
    "unbounded": {"surprise_bound": None, "max_theta": 0.05},
    "gates_per_chunk": {"gates_per": "chunk"},
    "plain_output": {"output_norm": False, "output_gate": False},
    "wide_gelu": {"expansion": 2, "activation": "gelu", "head_dim": 6},
    "gated_delta": {"rule": "gated_delta"},
    "huber": {"rule": "huber", "rule_options": {"delta": 0.3}},
    "smallest": {"window": 1, "persistent": 0, "heads": 1, "conv_kernel": 1, "chunk_size": 16},
}


def config(variant: str = "lmm", persistent: int = 3, window: int | None = 12, **memory) -> ModelConfig:
    return ModelConfig(
        variant=variant,
        vocab_size=40,
        d_model=16,
        n_layers=2,
        persistent_tokens=persistent,
        mlp_expansion=1.0,
        memory=MemoryConfig(**{"heads": 2, "chunk_size": 8, **memory}),
        # MAC attends to whole segments
        attention=AttentionConfig(heads=2, window=None if variant == "mac" else window, segment_size=16),
    )


def model(*args, **kwargs) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(config(*args, **kwargs)).double()


def tokens(rows: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 40, (rows, length), generator=torch.Generator().manual_seed(seed))


def pieces(m: LanguageModel, x: Tensor, sizes: list[int]) -> Tensor:
    state, logits = None, []
    for part in x.split(sizes, 1):
        out = m(part, state)
        state = out.state
        logits.append(out.logits)
    return torch.cat(logits, 1)


def rms(x: Tensor, norm: torch.nn.Module) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight


def projected(m: NeuralMemory, name: str, x: Tensor) -> Tensor:
    """q, k or v of a sequence [T, D] by Section 4.4: SiLU, convolution, L2 norm; [T, H, E]."""
    y, w = F.silu(x @ getattr(m, f"w_{name}").weight.T), getattr(m, f"conv_{name}").weight_KC
    y = sum(w[j] * F.pad(y, (0, 0, j, 0))[: len(y)] for j in range(len(w)))
    y = y.view(-1, m.config.heads, m.head_dim)
    return y / y.norm(dim=-1, keepdim=True)


def read(weights: Sequence[Tensor], x_HE: Tensor, bound: float | None = None) -> Tensor:
    """M(x) of each head, [H, E]; ``bound`` limits the gradient that reaches the output of each layer."""
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
    momentum, chunk_start = [torch.zeros_like(W) for W in weights], weights
    for t in range(len(full)):
        if (t if t < P else t - P) % c.chunk_size == 0:  # the prefix is written as chunks of its own
            chunk_start = [W.detach().requires_grad_() for W in weights]
        loss = (read(chunk_start, k[t], c.surprise_bound) - v[t]).square().sum()  # (12)
        slopes = torch.autograd.grad(loss, chunk_start)
        momentum = [eta[t] * S - c.max_theta * theta[t] * g for S, g in zip(momentum, slopes, strict=True)]
        weights = [(1 - alpha[t]) * W + S for W, S in zip(weights, momentum, strict=True)]  # (13, 14)
        y.append(read(weights, q[t]))  # (15)
    return memory_output(m, torch.stack(y[P:]), x), weights


def memory_output(m: NeuralMemory, y: Tensor, x: Tensor) -> Tensor:
    return (rms(y, m.output_norm).flatten(1) * F.silu(x @ m.output_gate.weight.T)) @ m.w_o.weight.T


def attention_equations(a: Attention, x: Tensor, at: Tensor, prefix: Tensor, keys: list[Tensor]) -> Tensor:
    """Queries x [T, D] over the prefix and, causally and within the window, over each of ``keys`` [T, D]."""
    heads = lambda y, w: (y @ w.weight.T).unflatten(-1, (a.config.heads, -1)).transpose(0, 1)  # noqa: E731

    def turned(y: Tensor) -> Tensor:
        half = y.shape[-1] // 2
        angle = at[:, None] * a.config.rope_base ** -(torch.arange(half).double() / half)
        z = torch.complex(y[..., :half], y[..., half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([z.real, z.imag], -1)

    k = torch.cat([heads(prefix, a.w_k), *(turned(heads(y, a.w_k)) for y in keys)], 1)
    v = torch.cat([heads(y, a.w_v) for y in (prefix, *keys)], 1)
    back = at[:, None] - at[None]
    seen = (back >= 0) & (back < (a.config.window or len(x)))
    seen = torch.cat([seen.new_ones(len(x), len(prefix)), *[seen] * len(keys)], 1)
    scores = turned(heads(x, a.w_q)) @ k.mT / k.shape[-1] ** 0.5
    y = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    return y.transpose(0, 1).flatten(1) @ a.w_o.weight.T


def mac_equations(b: Block, x: Tensor, at: Tensor, p: Tensor) -> Tensor:
    m, y, outputs, weights = b.memory, x[:0], [], list(b.memory.initial_weights)
    q = projected(m, "q", x)
    for part in torch.arange(len(x)).split(b.segment_size):
        r = memory_output(m, torch.stack([read(weights, q[t]) for t in part]), x[part])  # (21)
        y = torch.cat([y, attention_equations(b.attention, x[part], at[part], p, [r, x[part]])])  # (22, 23)
        o, weights = memory_equations(m, y, x[:0])  # (24)
        outputs.append(rms(y[part], b.gate.attention_norm) * F.silu(rms(o[part], b.gate.memory_norm)))  # (25)
    return torch.cat(outputs)


@pytest.mark.parametrize("variant", MEMORY_VARIANTS)
def test_a_block_is_the_equations_of_the_paper(variant):
    b = model(variant).blocks[0]
    x, at, p = torch.randn(37, 16, dtype=torch.float64), torch.arange(37).double(), b.persistent_PD
    if variant == "mac":
        expected = mac_equations(b, x, at, p)
    else:
        expected, _ = memory_equations(b.memory, x, p)
    if variant == "mag":  # (26-28)
        y = attention_equations(b.attention, x, at, p, [x])
        expected = rms(y, b.gate.attention_norm) * F.silu(rms(expected, b.gate.memory_norm))
    elif variant == "mal":  # (29-31)
        expected = attention_equations(b.attention, expected, at, x[:0], [expected])
    found, _ = b.mix(x[None], None, Positions(at.long()[None]))
    torch.testing.assert_close(found[0], expected, rtol=1e-9, atol=1e-10)


CASES = [(v, "default") for v in VARIANTS] + [
    (v, s) for v in ("lmm", "mac") for s in SWITCHES if s != "default"
]
SWITCHES["full_window"] = {"window": None}
CASES += [(v, s) for v in ("mag", "mal", "transformer") for s in ("smallest", "full_window")]


@pytest.mark.parametrize(("variant", "switch"), CASES)
def test_no_future_token_and_no_other_row_reaches_an_output(variant, switch):
    m = model(variant, **SWITCHES[switch])
    x = torch.randn(3, 41, 16, dtype=torch.float64, requires_grad=True)
    y, _ = m.blocks[0](x, None, Positions(torch.arange(41)[None]))
    weights = torch.randn(16, dtype=torch.float64)
    for t in (0, 7, 8, 15, 16, 17, 31, 39):
        (grad,) = torch.autograd.grad((y[1, t] * weights).sum(), x, retain_graph=True)
        assert torch.count_nonzero(grad[1, t + 1 :]) == 0, f"token {t} sees the future"
        assert torch.count_nonzero(grad[[0, 2]]) == 0, f"token {t} sees another row"
        assert grad[1, t].norm() > 0
        # a memory carries the first token to all that follow; attention alone forgets it after its window
        remembers = variant != "transformer" or t < (m.config.attention.window or 41)
        assert (grad[1, 0].norm() > 0) == remembers, f"token {t}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_token_of_another_document_reaches_an_output(variant):
    m = model(variant)
    documents = torch.zeros(2, 41, dtype=torch.bool)
    documents[0, [11, 12, 30]] = True
    embedded = []
    m.embedding.register_forward_hook(lambda _m, _i, out: embedded.append(out.requires_grad_()) or out)
    logits = m(tokens(2, 41), document_starts=documents).logits
    (grad,) = torch.autograd.grad(logits[0, 29].square().sum(), embedded[0])
    assert torch.count_nonzero(grad[0, :12]) == 0
    assert torch.count_nonzero(grad[0, 30:]) == 0
    assert torch.count_nonzero(grad[1]) == 0
    assert grad[0, 12].norm() > 0 or variant == "transformer"


@pytest.mark.parametrize("variant", MEMORY_VARIANTS)
def test_every_parameter_of_the_memory_has_the_gradient_finite_differences_give(variant):
    m = model(variant)
    x, y = tokens(2, 17), tokens(2, 17, seed=2)

    def loss() -> Tensor:
        return F.cross_entropy(m(x).logits.flatten(0, 1), y.flatten())

    parameters = {n: p for n, p in m.named_parameters() if ".memory." in n or "persistent" in n}
    kinds = ["w_o", "alpha", "eta", "theta", "initial_weights"]
    kinds += [f"{part}_{n}" for part in ("w", "conv") for n in "qkv"]
    assert all(any(k in n for n in parameters) for k in kinds)
    grads = torch.autograd.grad(loss(), list(parameters.values()))
    generator = torch.Generator().manual_seed(3)
    for (name, p), grad in zip(parameters.items(), grads, strict=True):
        assert grad.norm() > 1e-8, f"{name} is not trained"
        # along the gradient itself and one random direction
        for direction in (grad / grad.norm(), torch.randn(p.shape, generator=generator, dtype=p.dtype)):
            direction = direction / direction.norm()
            slope = (grad * direction).sum()
            step = 1e-5
            with torch.no_grad():
                p += step * direction
                up = loss()
                p -= 2 * step * direction
                down = loss()
                p += step * direction
            error = abs((up - down) / (2 * step) - slope)
            assert error <= 1e-5 * grad.norm(), f"{name}: {error / grad.norm():.1e}"


@pytest.mark.parametrize(("variant", "switch"), CASES)
def test_a_sequence_cut_anywhere_goes_on_exactly(variant, switch):
    m = model(variant, **SWITCHES[switch])
    x = tokens(2, 77)
    torch.testing.assert_close(pieces(m, x, [5, 20, 1, 1, 30, 20]), m(x).logits, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("variant", "switch"), CASES)
def test_packed_documents_equal_documents_alone(variant, switch):
    m = model(variant, **SWITCHES[switch])
    x, starts = tokens(2, 53), torch.zeros(2, 53, dtype=torch.bool)
    starts[0, 30], starts[1, 20], starts[1, 21] = True, True, True
    alone = [
        torch.cat([m(part).logits for part in x[:1].split([30, 23], 1)], 1),
        torch.cat([m(part).logits for part in x[1:].split([20, 1, 32], 1)], 1),
    ]
    packed = m(x, document_starts=starts).logits
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-10, atol=1e-10)
    weights = torch.randn(packed.shape, generator=torch.Generator().manual_seed(4), dtype=packed.dtype)
    grads = lambda x: torch.autograd.grad((x * weights).sum(), list(m.parameters()))  # noqa: E731
    found, expected = grads(packed), grads(torch.cat(alone))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("window", [12, None])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_one_document_are_plain_rows(variant, window):
    m, x = model(variant, window=window), tokens(3, 41)
    packed = m(x, document_starts=torch.zeros(3, 41, dtype=torch.bool)).logits
    torch.testing.assert_close(packed, m(x).logits, rtol=1e-10, atol=1e-10)


def test_rotary_angles_are_exact_two_million_tokens_in():
    at = torch.tensor([[0, 1, 999_983, 2_097_151]])
    x = torch.randn(1, 1, 4, 64, generator=torch.Generator().manual_seed(0))
    found = rotate(x, RotaryEmbedding.at(at, 64, 10_000.0, x.dtype))
    pairs = torch.complex(x[..., :32].double(), x[..., 32:].double())
    for t, position in enumerate(at[0].tolist()):
        for i in range(32):
            turned = complex(pairs[0, 0, t, i]) * cmath.exp(1j * (position * 10_000.0 ** (-i / 32)))
            assert abs(turned - complex(found[0, 0, t, i], found[0, 0, t, 32 + i])) < 1e-6


def test_a_window_that_mac_would_not_heed_is_named():
    with pytest.raises(ValueError, match=r"attention\.window: variant mac attends to whole segments"):
        LanguageModel(ModelConfig(variant="mac", attention=AttentionConfig(window=32, segment_size=64)))


def test_a_full_window_equals_full_attention_and_a_smaller_one_does_not():
    full, windowed = model("transformer", window=None), model("transformer", window=12)
    wide = model("transformer", window=60)
    x = tokens(2, 60)
    torch.testing.assert_close(wide(x).logits, full(x).logits)
    torch.testing.assert_close(windowed(x[:, :12]).logits, full(x[:, :12]).logits)
    assert not torch.allclose(windowed(x).logits[:, 20:], full(x).logits[:, 20:])


@pytest.mark.parametrize("variant", ["mac", "mag"])
def test_persistent_tokens_reach_every_query(variant):
    m = model(variant)
    logits = m(tokens(1, 41)).logits
    block = m.blocks[-1]
    for t in (0, 13, 40):
        (grad,) = torch.autograd.grad(logits[0, t].square().sum(), block.persistent_PD, retain_graph=True)
        assert (grad.norm(dim=-1) > 0).all()


def test_attention_memory_is_linear_at_a_fixed_window(monkeypatch):
    sizes = []
    inner = torch.nn.functional.scaled_dot_product_attention

    def spy(q, k, v, attn_mask=None, **kwargs):
        sizes.append(attn_mask.numel() if attn_mask is not None else 0)
        return inner(q, k, v, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    m = model("mag")
    for length in (120, 240):
        m(tokens(1, length))
    assert sizes[2] == 2 * sizes[0] > 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_batch_is_learned_by_heart(variant):
    torch.manual_seed(0)
    m = LanguageModel(config(variant).model_copy(update={"d_model": 32}))
    optimizer = torch.optim.AdamW(m.parameter_groups(0.1), lr=1e-2)
    x = tokens(4, 33)
    for _ in range(300):
        logits = m(x[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
        if loss < 0.05:
            break
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        optimizer.step()
    assert loss < 0.05


def test_a_deep_memory_trains_on_long_rows_at_default_settings():
    torch.manual_seed(0)
    m = LanguageModel(ModelConfig(vocab_size=64, d_model=8, n_layers=1, memory=MemoryConfig(depth=4, heads=1),
                                  attention=AttentionConfig(heads=1)))  # fmt: skip
    optimizer = torch.optim.AdamW(m.parameter_groups(0.1), lr=4e-4)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(200):
        x = torch.randint(0, 64, (1, 4097), generator=generator)
        x[:, 1::2] = x[:, :-1:2]  # every second token repeats the one before it
        loss = F.cross_entropy(m(x[:, :-1]).logits.flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        assert torch.isfinite(norm)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("conv", [True, False])
@pytest.mark.parametrize("variant", MEMORY_VARIANTS)
def test_bf16_autocast_keeps_the_memory_in_float32(variant, conv):
    torch.manual_seed(0)
    m = LanguageModel(config(variant, conv=conv))
    exact = m(tokens(2, 40)).logits
    with torch.autocast("cpu", torch.bfloat16):
        out = m(tokens(2, 40))
    assert (out.logits.float() - exact).norm() < 0.04 * exact.norm()
    out.logits.float().square().sum().backward()
    leaves = torch.utils._pytree.tree_leaves(out.state, is_leaf=lambda x: isinstance(x, DecodeState))
    states = [x for x in leaves if isinstance(x, DecodeState)]
    memories = torch.utils._pytree.tree_leaves([*states, *(x.memory() for x in states)])
    assert memories
    assert {s.dtype for s in memories} == {torch.float32}
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in m.parameters())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", ["170M", "340M", "400M", "760M"])
def test_presets_have_the_parameters_of_their_name(size, variant):
    with torch.device("meta"):
        count = LanguageModel(presets.preset(size, variant)).num_parameters()
    assert count == pytest.approx(float(size[:-1]) * 1e6, rel=0.03)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_are_counted_without_the_model(variant, tied):
    c = config(variant).model_copy(update={"n_layers": 3, "tie_embeddings": tied})
    assert count_parameters(c) == LanguageModel(c).num_parameters()


@pytest.mark.parametrize(
    ("fields", "at_least"),
    [
        ({"n_layers": 10**6}, 10**11),
        ({"d_model": 2**20}, 10**13),
        ({"vocab_size": 10**15}, 10**17),
        ({"memory": MemoryConfig(depth=1000, heads=4096, head_dim=2**16, expansion=64)}, 10**18),
    ],
)
def test_a_model_no_machine_can_hold_is_counted_at_once(fields, at_least):
    started = time.process_time()
    assert count_parameters(ModelConfig(**fields)) > at_least
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("part", "fields"),
    [
        (MemoryConfig, {"depth": 10_000}),
        (MemoryConfig, {"theta_bias": float("nan")}),
        (ModelConfig, {"d_model": 10**10}),
        (ModelConfig, {"n_layers": 10**9}),
        (ModelConfig, {"mlp_expansion": float("inf")}),
    ],
)
def test_sizes_beyond_any_model_are_refused_by_their_field(part, fields):
    with pytest.raises(ValueError, match=f"{next(iter(fields))}\n  Input should be"):
        part(**fields)


def storages(state) -> int:
    """Bytes alive because of a state: a view counts with all of what it is a view of."""
    tensors = [t for t in torch.utils._pytree.tree_leaves(state) if isinstance(t, Tensor)]
    kept = [t.untyped_storage() for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in kept}.values())


@pytest.mark.parametrize("switch", ["default", "no_conv", "gates_per_chunk", "huber", "smallest"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_state_bytes_are_those_of_the_state(variant, switch):
    for dtype in (torch.float32, torch.float64):
        m = LanguageModel(config(variant, **SWITCHES[switch])).to(dtype)
        x, state = tokens(1, 64), None
        for part in x.split([3, 5, 8, 1, 1, 9, 5, 12, 20], 1):
            with torch.no_grad():
                state = m(part, state).state
            assert m.state_bytes(state.position) == storages(state), f"after {state.position} tokens"


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_detached_state_goes_on_without_the_graph(variant):
    m, x = model(variant), tokens(1, 30)
    state = m(x[:, :21]).state
    found, expected = m(x[:, 21:], state.detach()).logits, m(x[:, 21:], state).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    leaves = torch.utils._pytree.tree_leaves(state.detach())
    assert not any(t.requires_grad for t in leaves if isinstance(t, Tensor))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_state_keeps_nothing_alive_that_grows_with_the_sequence(variant):
    m, kept = LanguageModel(config(variant)), []
    for length in (67, 643):  # both three tokens into a chunk and a segment
        with torch.no_grad():
            state = m(tokens(2, length)).state
        kept.append(storages(state))
    assert kept[0] == kept[1]


def test_weight_decay_leaves_memory_norms_and_embeddings_alone():
    m = LanguageModel(config("mag"))
    decayed, rest = m.parameter_groups(0.1)
    names = {id(p): n for n, p in m.named_parameters()}
    matrices = ("w_", "mlp", "output_gate", "alpha.weight", "eta.weight", "theta.weight")
    assert all(any(part in names[id(p)] for part in matrices) for p in decayed["params"])
    assert {"initial_weights", "persistent_PD", "embedding"} <= {
        part for p in rest["params"] for part in names[id(p)].split(".")
    }
    assert len(decayed["params"]) + len(rest["params"]) == len(names)


def test_telemetry_reports_the_surprise_before_the_write():
    memory = model(conv=False, chunk_size=1).blocks[0].memory
    x = torch.randn(2, 20, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with record(memory) as seen, torch.no_grad():
        memory(x)
    cache, errors = memory.start(2), []
    for t in range(20):  # a token at a time: the cache then holds the weights before each token
        k, v, *_ = memory._tokens(x[:, t : t + 1], {})[1]
        errors.append((read_memory(k, cache.start.weights) - v).square().sum(-1).mean())
        _, cache = memory(x[:, t : t + 1], cache)
    assert seen.summary()["surprise"] == pytest.approx(torch.stack(errors[1:]).mean().item())
    norms = [sum(w[i].square().sum() for w in cache.start.weights).sqrt() for i in range(2)]
    assert seen.summary()["weight_norm"] == pytest.approx(torch.stack(norms).mean().item())


def test_unknown_variants_and_mixed_calls_are_named():
    with pytest.raises(ValueError, match="variant: 'mlp' is not one of lmm"):
        LanguageModel(ModelConfig(variant="mlp"))
    m = model()
    state = m(tokens(1, 5)).state
    with pytest.raises(ValueError, match="document_starts"):
        m(tokens(1, 5), state, document_starts=torch.zeros(1, 5, dtype=torch.bool))


def test_the_memory_is_a_layer_of_its_own():
    torch.manual_seed(0)
    layer = NeuralMemory(24, MemoryConfig(heads=3, chunk_size=8))
    assert all(torch.isfinite(p).all() and p.abs().max() < 20 for p in layer.parameters())
    x = torch.randn(2, 30, 24)
    whole, _ = layer(x)
    first, cache = layer(x[:, :13])
    second, _ = layer(x[:, 13:], cache)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-4, atol=1e-5)


def test_packed_documents_start_from_one_state_on_a_chunk_border():
    layer, documents = model().blocks[0].memory, Documents.from_starts(torch.eye(1, 20).bool())
    x = torch.randn(2, 36, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _, cache = layer(x[:1, :16])
    expected, _ = layer(x[:1, 16:], cache)
    torch.testing.assert_close(layer(x[:1, 16:], cache, documents)[0], expected, rtol=1e-10, atol=1e-10)
    for given, message in (
        (layer(x[:1, :13])[1], "cache: 5 tokens into a chunk"),
        (layer(x[:, :16])[1], "cache: it holds 2 sequences"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(x[:1, 16:], given, documents)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("variant", ["transformer", "mal"])
def test_documents_in_one_kernel_are_documents_alone(variant):
    m = LanguageModel(config(variant, window=None)).cuda()
    x, starts = tokens(2, 53).cuda(), torch.zeros(2, 53, dtype=torch.bool, device="cuda")
    starts[0, 30], starts[1, 20], starts[1, 21] = True, True, True
    expected = m(x, document_starts=starts).logits
    with torch.autocast("cuda", torch.bfloat16):
        found = m(x, document_starts=starts).logits.float()
    assert (found - expected).norm() < 0.04 * expected.norm()
    for logits in (expected, found):
        grads = torch.autograd.grad(logits.square().sum(), list(m.parameters()))
        assert all(torch.isfinite(grad).all() for grad in grads)
