"""The memory as an operator of torch's library, and what a call keeps and reads from the device."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import Case
from titans_kernels import forms_used
from titans_kernels.memory.forms import chunked
from titans_kernels.memory.op import memory_chunked, memory_chunked_backward
from titans_kernels.memory.parts import gates, layout

BORDERS = [0, 5, 6, 20]


OPTIONS = {"chunk_size": 7, "surprise_bound": 0.5}


def operands(case: Case, borders: list[int] | None) -> tuple:
    """The arguments of the operator that `OPTIONS` ask for."""
    state = map(list, (*case.state, case.base or (), case.residual.norm if case.residual else ()))
    return *case.tokens, *state, 7, "silu", 0.5, borders and torch.tensor(borders)


@pytest.mark.slow
@pytest.mark.parametrize(("given", "borders"), [
    ({"batch": 2}, None), ({"documents": 3}, BORDERS),
    ({"documents": 3, "kind": "norm", "base": True}, BORDERS),
])  # fmt: skip
def test_operators_keep_the_rules_of_the_library(given, borders):
    case = Case(20, 3, **given)
    torch.library.opcheck(memory_chunked, operands(case, borders))
    for x in case.leaves:
        x.requires_grad_(False)
    doutputs = [torch.rand_like(x) for x in (case.tokens[2], *case.state.weights, *case.state.momentum)]
    torch.library.opcheck(memory_chunked_backward, (doutputs, *operands(case, borders)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_kept(monkeypatch, mode):
    saved, inner = [], chunked.Plan.save
    monkeypatch.setattr(chunked.Plan, "save", lambda *args: saved.append(args) or inner(*args))
    case = Case(20)
    with mode():
        case.whole(backend="chunked")
    assert not saved
    case.whole(backend="chunked")
    assert saved


def packed(*borders: int) -> tuple[Case, dict[str, Any]]:
    """A call on three packed documents, and its options."""
    return Case(20, 3, documents=3), OPTIONS | {"cu_seqlens": torch.tensor(borders)}


def test_borders_are_read_once_for_each_tensor(monkeypatch):
    case, options = packed(*BORDERS)
    expected = case.whole(**options)
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "tolist", lambda x: pytest.fail("borders are read from the device"))
        patch.setattr(layout.Packed, "of", lambda *args: pytest.fail("a layout is made"))
        torch.testing.assert_close(case.whole(**options), expected, rtol=0, atol=0)
        case.whole(backend="reference", **options)
    options["cu_seqlens"][1] = 7
    with pytest.raises(ValueError, match="cu_seqlens: must rise from 0 to T = 20"):
        case.whole(**options)


def test_change_of_the_borders_through_numpy_is_seen():
    """It shares the tensor's memory, and torch counts no change of it."""
    for mode, backend in product((torch.enable_grad, torch.inference_mode), ("auto", "reference")):
        with mode():
            case, options = packed(*BORDERS)
            before, *_ = case.whole(backend=backend, **options)
            options["cu_seqlens"].numpy()[1] = 4
            other, changed = packed(0, 4, 6, 20)
            actual, expected = case.whole(backend=backend, **options), other.whole(backend=backend, **changed)
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)
            assert not torch.equal(actual[0], before)


def test_what_inference_reads_and_keeps_serves_a_training_step():
    case, options = packed(*BORDERS)
    with torch.inference_mode():
        expected, *_ = case.whole(**options)
    y, *_ = case.whole(**options)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    y.sum().backward()
    # masks are made once; one made in inference mode could not be saved for a backward
    gates._kept_not_later.cache_clear()
    r = torch.rand(2, 7)
    with torch.inference_mode():
        gates.decay_products(r)
    gates.decay_products(r.requires_grad_()).sum().backward()
    assert r.grad.isfinite().all()


def test_a_graph_break_is_among_the_forms_of_its_run_alone():
    """A function under `torch.compiler.disable` is not one."""
    forms_used(forget=True)
    torch._dynamo.reset()
    eager = torch.compiler.disable(lambda x: x + 1)

    @partial(torch.compile, backend="eager")
    def broken(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return eager(x)

    broken(torch.ones(2))
    assert [form.partition(":")[0] for form in forms_used(forget=True)] == ["graph break"]
    assert forms_used() == []
