"""Products in C++: equal to PyTorch's operators, with every gradient."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.kernels.cases import needs_compiler
from titans_kernels import products
from titans_kernels.layers import rms_norm
from titans_kernels.products import feed_forward, linear, token_losses

pytestmark = needs_compiler
SHAPES = [(16, 16, (64,)), (64, 260, (3, 67)), (24, 6, (1, 200)), (5, 33, (2, 2, 9))]
"""Inputs, outputs, tokens."""


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def with_gradients(y: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return [y.detach(), *torch.autograd.grad(y.sin().sum(), leaves)]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=[1, 3])
def threads(request, torch_threads):
    torch_threads(request.param)


@pytest.fixture
def compiled(monkeypatch):
    """Calls that the library made."""
    made, served = [], products._serves
    monkeypatch.setattr(products, "_serves", lambda *args: served(*args) and (made.append(1) or True))
    return made


@pytest.mark.parametrize(("inputs", "outputs", "tokens"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_linear_is_pytorchs(threads, compiled, inputs, outputs, tokens, biased):
    leaves = [normal(*tokens, inputs), normal(outputs, inputs), *([normal(outputs)] if biased else [])]
    result = with_gradients(linear(*leaves), leaves)
    torch.testing.assert_close(result, with_gradients(F.linear(*leaves), leaves), rtol=1e-8, atol=1e-10)
    assert len(compiled) == 1


def test_inputs_biases_and_norms_that_are_not_contiguous(compiled):
    x, weight = normal(64, 50).detach().T, normal(64, 32).T
    y = linear(x, weight)
    (actual,) = torch.autograd.grad(y.sin().sum(), weight)
    (expected,) = torch.autograd.grad(F.linear(x, weight).sin().sum(), weight)
    torch.testing.assert_close([y, actual], [F.linear(x, weight), expected])
    assert compiled
    x, weight, wide = normal(64, 16), normal(16, 16), normal(32)
    for vector in (wide[::2], wide[0].expand(16)):
        torch.testing.assert_close(linear(x, weight, vector), F.linear(x, weight, vector))
        torch.testing.assert_close(rms_norm(x, vector, 1e-6), F.rms_norm(x, (16,), vector, 1e-6))
    assert compiled


@pytest.mark.parametrize(("width", "hidden", "tokens"), SHAPES)
def test_feed_forward_layer_equals_its_formula(threads, compiled, width, hidden, tokens):
    shapes = (*tokens, width), (width,), (hidden, width), (hidden, width), (width, hidden)
    x, norm, gate, up, down = leaves = [normal(*shape) for shape in shapes]
    z = F.rms_norm(x, (width,), norm, 1e-6)
    expected = x + F.linear(F.silu(F.linear(z, gate)) * F.linear(z, up), down)
    actual = with_gradients(feed_forward(x, norm, gate, up, down, 1e-6), leaves)
    torch.testing.assert_close(actual, with_gradients(expected, leaves), rtol=1e-8, atol=1e-8)
    assert len(compiled) == 1


@pytest.mark.parametrize(("width", "vocabulary", "tokens"), SHAPES)
@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_losses_are_cross_entropies(threads, compiled, width, vocabulary, tokens, scale):
    count = torch.Size(tokens).numel()
    x, weight = leaves = [normal(count, width), normal(vocabulary, width)]
    targets = torch.randint(vocabulary, (count,))
    actual = token_losses(scale * x, weight, targets)
    expected = F.cross_entropy(F.linear(scale * x, weight), targets, reduction="none")
    # the gradients of a sum are one number, expanded
    sums = (torch.autograd.grad(losses.sum(), leaves, retain_graph=True) for losses in (actual, expected))
    torch.testing.assert_close(*sums, rtol=1e-8, atol=1e-8)
    results = (with_gradients(losses, leaves) for losses in (actual, expected))
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-8)
    assert len(compiled) == 1


def test_targets_beyond_the_vocabulary_are_left_to_pytorch():
    x, weight, targets = normal(40, 8), normal(9, 8), torch.arange(40) % 9
    targets[3] = -100
    assert token_losses(x, weight, targets)[3] == 0
    with pytest.raises(IndexError):
        token_losses(x, weight, targets.clamp(min=0) + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_and_half_precision_are_pytorchs(compiled, dtype):
    x, weight = normal(64, 16, dtype=dtype), normal(16, 16, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16
    assert not compiled


def test_shapes_and_dtypes_that_do_not_fit_are_refused_as_by_pytorch(compiled):
    """C++ would read beyond them."""
    x, weight, targets = normal(40, 8), normal(9, 8), torch.arange(40) % 9
    hidden = [normal(16, 8), normal(16, 8)]
    refused = [
        lambda: linear(normal(40, 6), weight), lambda: linear(x, weight, normal(4)),
        lambda: feed_forward(x, normal(8), *hidden, normal(8, 12), 1e-6),
        lambda: feed_forward(x, normal(6), *hidden, normal(8, 16), 1e-6),
        lambda: rms_norm(x, normal(6), 1e-6), lambda: token_losses(normal(40, 6), weight, targets),
        lambda: token_losses(x, weight, targets[:36]), lambda: token_losses(x, weight, targets.int()),
    ]  # fmt: skip
    for call in refused:
        with pytest.raises((RuntimeError, ValueError)):
            call()
    assert linear(x[:, :0], weight[:, :0]).shape == (40, 9)


def test_large_weights_are_left_to_pytorch(compiled):
    linear(normal(40, 512), normal(512, 512))
    assert not compiled
