"""Decay towards base weights instead of zero; test_residual.py has every form, packed and cut."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from tests.kernels import cases
from tests.kernels.cases import NATIVE, assert_same, needs_compiler
from titans_kernels import DecodeState, Extension, MemoryState, extend_memory, neural_memory, read_memory
from titans_kernels.memory.forms.triton import pieces

Case = partial(cases.Case, base=True)


@pytest.mark.parametrize("rule", ["paper", "gated_delta"])
def test_online_form_of_a_linear_memory(rule):
    Case(37, 1).check("online", chunk_size=1, rule=rule)


@pytest.mark.skipif(not pieces.INTERPRETED, reason="a GPU is here: the kernels run on it")
@pytest.mark.parametrize("kind", ["none", "input"])
def test_kernels_of_a_linear_memory_in_the_interpreter(kind):
    case = Case(20, 1, kind=kind)
    wide = lambda x, *sizes: F.pad(x.detach().float(), sizes).requires_grad_()  # noqa: E731
    case.tokens = [wide(x, 0, 12) for x in case.tokens[:3]] + [wide(x) for x in case.tokens[3:]]
    case.state = MemoryState(*(tuple(wide(x, 0, 12, 0, 12) for x in part) for part in case.state))
    case.base = tuple(wide(B, 0, 12, 0, 12) for B in case.base)
    expected, actual = (case.whole(backend=name, chunk_size=16) for name in ("reference", "triton"))
    assert_same(expected, actual, case.leaves, results=(1e-3, 1e-4), gradients=(1e-3, 1e-3))


@pytest.mark.parametrize("backend", ["reference", "generic", "chunked", NATIVE, "auto"])
@pytest.mark.parametrize("depth", [1, 3])
def test_forgetting_all_leads_back_to_the_base(depth, backend):
    case = Case(9, depth)
    with torch.no_grad():
        case.tokens[3][:, -1], case.tokens[4][:, -1], case.tokens[5][:, -1] = 1, 0, 0
        y, *after = case.whole(backend=backend, chunk_size=4)
        expected = read_memory(case.tokens[0][:, -1:], case.base)
    torch.testing.assert_close(y[:, -1:], expected, rtol=1e-12, atol=1e-14)
    assert all((x == 0).all() for x in after)


def test_where_nothing_is_forgotten_the_base_is_one_with_the_weights():
    case, options = Case(23), {"chunk_size": 7, "surprise_bound": 0.5}
    with torch.no_grad():
        case.tokens[3].zero_()
        y, *after = case.whole(**options)
        weights = tuple(W + B for W, B in zip(case.state.weights, case.base, strict=True))
        expected, whole = neural_memory(*case.tokens, weights, case.state.momentum, **options)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    for actual, W, B in zip(after, whole.weights, case.base, strict=False):
        torch.testing.assert_close(actual, W - B, rtol=1e-12, atol=1e-12)


@needs_compiler
@pytest.mark.parametrize("used", ["base", "tokens"])
def test_gradient_of_some_inputs_alone(used):
    case, grads = Case(20), []
    leaves = case.base if used == "base" else case.tokens
    fixed = [x for x in case.leaves if all(x is not leaf for leaf in leaves)]
    for x in fixed:
        x.requires_grad_(False)
    for backend in ("reference", "native", "chunked"):
        y = case.whole(backend=backend, chunk_size=7)[0]
        grads.append(torch.autograd.grad(y.sin().sum(), leaves))
    for result in grads[1:]:
        torch.testing.assert_close(result, grads[0], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("change", "message"), [
    (lambda base: base[:1], "base: 1 layers, but weights has 2"),
    (lambda base: (base[0], base[1].mT), r"base\[1\]: shape \(2, 4, 8\) is not .* = \(2, 8, 4\)"),
    (lambda base: (base[0][None], base[1]), r"base\[0\]: shape \(1, 2, 4, 8\) is not"),
])  # fmt: skip
def test_what_does_not_fit_is_named(change, message):
    case = Case(8)
    state, base = DecodeState.of(case.state), change(case.base)
    for form, *given in (
        (neural_memory, *case.tokens, *case.state), (extend_memory, *case.tokens, state),
        (read_memory, case.tokens[0], case.state.weights),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{message}"):
            form(*given, extension=Extension(base=base))
