"""Operator and blocks against `titans_core.textbook`.

`python -m tests.core.test_textbook` prints the largest difference of each, in float64.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.core.small import model
from titans_core import NeuralMemory, textbook
from titans_core.attention import Attention
from titans_core.blocks import Block, Positions
from titans_core.textbook import Parameters
from titans_kernels import neural_memory

PAPER = {
    "surprise_bound": None, "value_norm": False, "max_theta": 1.0, "theta_bias": -3.0, "alpha_bias": -2.0,
}  # fmt: skip
"""Settings of the memory under which it is the paper's, with a gate theta between 0 and 1."""
OPERATOR = [(depth, b, T) for depth in (1, 2, 3) for b, T in ((1, 9), (4, 13), (8, 8), (16, 37), (64, 5))]
BLOCKS = ["lmm", "mac", "mag", "mal"]


def calls(depth: int, tokens: int, by_channel: bool = False) -> list[Tensor]:
    """Inputs of one head: q, k, v [T, 6], gates [T] or [T, 6], then weights and momentum of each layer."""
    g = torch.Generator().manual_seed(depth)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    q, k, v = draw(3, tokens, 6)
    alpha, eta, theta = torch.sigmoid(draw(3, tokens, *([6] if by_channel else [])) - 1)
    hidden = [6 if by_channel else 7] * (depth - 1)
    layers = [0.4 * draw(a, b) for a, b in zip([6, *hidden], [*hidden, 6], strict=True)]
    momenta = [0.1 * draw(*W.shape) for W in layers]
    inputs = [q, torch.nn.functional.normalize(k, dim=-1), v, alpha, eta, 0.3 * theta]
    return [x.detach().requires_grad_() for x in (*inputs, *layers, *momenta)]


def by_textbook(inputs: list[Tensor], b: int) -> list[Tensor]:
    """y and the weights and momentum after it."""
    L = (len(inputs) - 6) // 2
    y, M, S = textbook.memory(*inputs[:6], inputs[6 : 6 + L], inputs[6 + L :], b)
    return [y, *M, *S]


def by_operator(inputs: list[Tensor], b: int) -> list[Tensor]:
    L = (len(inputs) - 6) // 2
    one = [x[None, :, None] for x in inputs[:6]]
    weights, momentum = (tuple(x[None] for x in part) for part in (inputs[6 : 6 + L], inputs[6 + L :]))
    y, state = neural_memory(*one, weights, momentum, chunk_size=b)
    return [y[0, :, 0], *(x[0, 0] for x in (*state.weights, *state.momentum))]


def operator_difference(depth: int, b: int, tokens: int, by_channel: bool = False) -> float:
    """Largest difference of y, state and gradients of their sum weighted at random."""
    inputs, both = calls(depth, tokens, by_channel), []
    for form in (by_textbook, by_operator):
        results = form(inputs, b)
        g = torch.Generator().manual_seed(0)
        total = sum((x * torch.randn(x.shape, generator=g, dtype=x.dtype)).sum() for x in results)
        both.append([*results, *torch.autograd.grad(total, inputs)])
    return max((x - y).abs().max().item() for x, y in zip(*both, strict=True))


def parameters(part: NeuralMemory | Attention) -> Parameters:
    """The tensors of a memory or an attention under the textbook's names."""
    p = Parameters(heads=part.heads, W_o=part.w_o.weight.T)
    for name in "qkv":
        setattr(p, f"W_{name}", getattr(part, f"w_{name}").weight.T)
        setattr(p, f"conv_{name}", getattr(part, f"conv_{name}").weight_KC)
    if isinstance(part, Attention):
        p.scale = part.scale_H
        return p
    gates = part.alpha, part.eta, part.theta
    p.W_gates, p.c_gates = torch.cat([g.weight for g in gates]).T, torch.cat([g.bias for g in gates])
    p.M_0, p.norm, p.W_y = list(part.initial_weights), part.output_norm.weight, part.output_gate.weight.T
    return p


def block_parameters(b: Block) -> Parameters:
    p = Parameters(P=b.persistent_PD, norm=b.norm.weight)
    for name, part in b.named_children():
        if isinstance(part, NeuralMemory | Attention):
            setattr(p, name, parameters(part))
    inner = getattr(b, "memory_norm", None) or getattr(b, "attention_norm", None)
    p.inner_norm = inner.weight if inner else None
    p.gate_norm = b.gate.norm.weight if hasattr(b, "gate") else None
    return p


def perturbed_block(variant: str, **settings) -> Block:
    """The first block of a model, its norms and scales unequal to one, so that a missing one shows."""
    m = model(variant, **PAPER | settings)
    with torch.no_grad():
        for name, x in m.named_parameters():
            if "norm" in name or "scale" in name:
                x += 0.3 * torch.randn_like(x)
    return m.blocks[0]


FORMS: dict[str, Callable[[Parameters, Tensor, Block], Tensor]] = {
    "lmm": lambda p, x, b: textbook.lmm(p, x, b.memory.config.chunk_size),
    "mac": lambda p, x, b: textbook.mac(p, x, b.memory.config.chunk_size, b.segment_size),
    "mag": lambda p, x, b: textbook.mag(p, x, b.memory.config.chunk_size, b.attention.window),
    "mal": lambda p, x, b: textbook.mal(p, x, b.memory.config.chunk_size, b.attention.window),
}


def block_difference(variant: str, **settings) -> float:
    """Largest difference of a block's output [37, 16] and of the gradients of its parameters."""
    b = perturbed_block(variant, **settings)
    x = torch.randn(37, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(37, 16, dtype=torch.float64)
    inputs = [x, *(p for name, p in b.named_parameters() if "mlp" not in name)]
    ours, _ = b.mix(x[None], None, Positions(torch.arange(37)[None]))
    both = []
    for y in (FORMS[variant](block_parameters(b), x, b), ours[0]):
        both.append([y, *torch.autograd.grad((y * weight).sum(), inputs)])
    return max((x - y).abs().max().item() for x, y in zip(*both, strict=True))


by_channel = pytest.mark.parametrize("by_channel", [False, True])


@by_channel
@pytest.mark.parametrize(("depth", "b", "tokens"), OPERATOR)
def test_operator_equals_textbook(depth, b, tokens, by_channel):
    assert operator_difference(depth, b, tokens, by_channel) < 1e-12


@by_channel
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_chunk_equals_loop(depth, by_channel):
    inputs = calls(depth, 11, by_channel)
    loop, L = by_textbook(inputs, 11), depth
    y, M, S = textbook.chunk(*inputs[:6], inputs[6 : 6 + L], inputs[6 + L :])
    torch.testing.assert_close([y, *M, *S], loop, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("settings", [*({"depth": n} for n in (1, 2, 3)), {"channel_gates": "all"}], ids=str)
@pytest.mark.parametrize("variant", BLOCKS)
def test_block_equals_textbook(variant, settings):
    assert block_difference(variant, **settings) < 1e-10


@pytest.mark.parametrize("variant", ["lmm", "mac"])
def test_block_that_forgets_to_its_initial_weights_equals_textbook_while_nothing_is_forgotten(variant):
    assert block_difference(variant, forget_to="initial", alpha_bias=-80.0) < 1e-10


if __name__ == "__main__":
    cases = [(*case, channel) for case in OPERATOR for channel in (False, True)]
    print(f"operator  {max(operator_difference(*case) for case in cases):.1e}")
    for name in BLOCKS:
        print(f"{name:10}{max(block_difference(name, depth=depth) for depth in (1, 2, 3)):.1e}")
