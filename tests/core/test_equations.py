"""Attention, its rotary positions, gates and options of a memory layer against their equations."""

import cmath
from typing import get_args

import pytest
import torch
from torch.nn import functional as F

from tests.core.test_textbook import parameters, perturbed_block
from titans_core import MemoryConfig, NeuralMemory, textbook
from titans_core.blocks import Positions
from titans_core.layers import Gate, Gating, RotaryEmbedding, rotate
from titans_kernels import Extension, neural_memory, write_budget


@pytest.mark.parametrize("projections", ["plain", "titans"])
def test_transformer_block_is_attention_with_a_residual_connection(projections):
    b = perturbed_block("transformer", window=None, options={"projections": projections})
    x, a, reach = torch.randn(37, 16, dtype=torch.float64), b.attention, torch.arange(37)
    z = textbook.rms(x, b.norm.weight)
    if projections == "titans":
        expected = textbook.attend(parameters(a), z[:0], z, reach, reach)
    else:
        q, k, v = ((z @ getattr(a, f"w_{n}").weight.T).view(37, a.heads, -1) for n in "qkv")
        q, k, v = (y.transpose(0, 1) for y in (textbook.rotate(q, reach), textbook.rotate(k, reach), v))
        read = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
        expected = read @ a.w_o.weight.T
    y, _ = b.mix(x[None], None, Positions(reach[None]))
    torch.testing.assert_close(y[0], x + expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("gating", get_args(Gating))
def test_gate_adds_what_its_table_lists(gating):
    gate = Gate(6, gating).double()
    y, m = torch.randn(2, 5, 6, dtype=torch.float64)
    weights = [w.data.uniform_(0.5, 1.5) for w in gate.parameters()]
    z = textbook.rms(y, weights[0]) if weights else y
    expected = {
        "sum": lambda: m, "sigmoid": lambda: 2 / (1 + (-z).exp()) * m, "silu": lambda: F.silu(z) * m,
        "product": lambda: z * F.silu(textbook.rms(m, weights[1])),
    }[gating]()  # fmt: skip
    torch.testing.assert_close(gate(y, m), expected)


OPTIONS = [{"surprise_bound": 0.5}, {"write_budget": 0.7}, {"forget_to": "initial", "alpha_bias": -2.0}]


@pytest.mark.parametrize("options", [*OPTIONS, OPTIONS[0] | OPTIONS[1] | OPTIONS[2]])
def test_layer_passes_its_options_on_to_the_operator(options):
    c = MemoryConfig(heads=2, chunk_size=8, **{"surprise_bound": None, "max_theta": 1.0} | options)
    layer, x = NeuralMemory(16, c).double(), torch.randn(1, 37, 16, dtype=torch.float64)
    (q, k, v), _ = layer.project(x, "qkv", layer.zero_conv_state())
    base = tuple(layer.initial_weights) if c.forget_to == "initial" else None
    start = tuple(torch.zeros_like(W) if base else W for W in layer.initial_weights)
    alpha, eta, theta, _ = layer.gates(x)
    if c.write_budget:
        theta = write_budget(k, eta, theta, 8, budget=c.write_budget)
    y, _ = neural_memory(
        q, k, v, alpha, eta, theta, start, chunk_size=8, surprise_bound=c.surprise_bound,
        extension=Extension(base=base), backend="reference",
    )  # fmt: skip
    torch.testing.assert_close(layer(x)[0], layer.output(y, x), rtol=1e-9, atol=1e-10)


def test_rotary_angles_are_exact_two_million_tokens_in():
    at = torch.tensor([[0, 1, 999_983, 2_097_151]])
    x = torch.randn(1, 1, 4, 64, generator=torch.Generator().manual_seed(0))
    result = rotate(x, RotaryEmbedding.at(at, 64, 10_000.0, x.dtype))
    pairs = torch.complex(x[..., :32].double(), x[..., 32:].double())
    for t, position in enumerate(at[0].tolist()):
        for i in range(32):
            turned = complex(pairs[0, 0, t, i]) * cmath.exp(1j * (position * 10_000.0 ** (-i / 32)))
            assert abs(turned - complex(result[0, 0, t, i], result[0, 0, t, 32 + i])) < 1e-6
