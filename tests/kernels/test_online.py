"""The online rule of a linear memory in blocks: the recurrence, whatever the length and the gates."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from tests.kernels.cases import Case, graded
from titans_kernels import Rule, forms_used
from titans_kernels.memory import op
from titans_kernels.memory.forms import online
from titans_kernels.memory.forms.triton import delta, pieces
from titans_kernels.memory.rules import GatedDelta

ONLINE = {"chunk_size": 1, "surprise_bound": None}
RULES = [Rule(), GatedDelta()]


def made(T: int, **given: Any) -> Case:
    """A linear memory with larger gates than a model's."""
    case = Case(T, 1, **{"widths": [5, 4], "batch": 2} | given)
    with torch.no_grad():
        for gate, factor in zip(case.tokens[3:6], (6, 1, 5), strict=True):
            gate.mul_(factor).clamp_(max=1)
    return case


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("T", [1, 7, 31, 32, 33, 96, 101, 18 * 32, 41 * 32 + 5])
@pytest.mark.parametrize("form", ["compiled", "blocks", "parts_of_a_block"])
def test_it_is_the_recurrence_forward_and_every_gradient(monkeypatch, T, rule, form):
    if form != "compiled":
        monkeypatch.setattr(online, "COMPILED", 0)
    if form == "parts_of_a_block":
        monkeypatch.setattr(online, "PART_BYTES", 1)
    made(T).check("online", rule=rule, **ONLINE)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_gates_at_their_ends(rule):
    case = made(40)
    with torch.no_grad():
        # all is forgotten, nothing is, nothing is written; there is no momentum
        case.tokens[3][:, 5], case.tokens[3][:, 17], case.tokens[5][:, 9] = 1, 0, 0
        case.tokens[4].zero_()
    case.check("online", rule=rule, **ONLINE)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_packed_documents_start_afresh(rule):
    borders = torch.tensor([0, 13, 13, 46, 50], dtype=torch.int32)
    made(50, batch=1, documents=4, base=True).check("online", rule=rule, cu_seqlens=borders, **ONLINE)


def test_auto_takes_it_where_it_serves_also_on_a_gpu():
    case = made(8)
    for rule, options, served in (
        ("paper", ONLINE, True), ("gated_delta", ONLINE, True), ("paper", ONLINE | {"chunk_size": 2}, False),
        ("paper", ONLINE | {"surprise_bound": 1.0}, False),
    ):  # fmt: skip
        forms_used(forget=True)
        case.whole(rule=rule, **options)
        assert ("neural_memory: online" in forms_used()) == served, (rule, options)
    case = made(8)
    # says that it is there, which is all that the choice of a form asks
    on_gpu = type("OnAGPU", (Tensor,), {"is_cuda": True})
    inputs = op.Inputs.of(*(x.as_subclass(on_gpu) for x in case.tokens))
    for chunk_size, taken in ((1, True), (16, False)):
        form = op.choose("auto", inputs, case.state.weights, op.Options(chunk_size, "silu", None, None))
        assert (form.name == "online") == taken


def test_float32_at_length_is_near_float64_and_the_state_keeps_no_more_than_itself():
    case, options = made(2048, widths=[32, 32]), ONLINE | {"backend": "online"}
    with torch.no_grad():
        exact, *_ = case.whole(**options)
        case.cast(torch.float32)
        rounded, *_ = case.whole(**options)
    assert (rounded - exact).norm() < 1e-5 * exact.norm()
    for T in (31, 320):
        for x in made(T).whole(backend="online", **ONLINE)[1:]:
            assert x.untyped_storage().nbytes() == x.nbytes


@pytest.mark.skipif(not pieces.INTERPRETED, reason="a GPU is here: tests/kernels/test_gpu.py")
@pytest.mark.parametrize(("rule", "widths", "T"), [
    ("paper", [32, 64], 3 * 32 + 5), ("gated_delta", [64, 32], 2 * 32),
    ("gated_delta", [16, 16], 5 * 32 + 31), ("paper", [16, 128], 640), ("gated_delta", [128, 16], 96),
])  # fmt: skip
def test_triton_kernels_compute_the_states(monkeypatch, rule, widths, T):
    """In the interpreter, in float32, against the recurrence in float64: results and every gradient."""
    case, options = made(T, widths=widths), ONLINE | {"rule": rule}
    results = case.whole(backend="reference", **options)
    expected = [*results, *graded(results, case.leaves)]
    monkeypatch.setattr(online, "COMPILED", 0)
    monkeypatch.setattr(online, "_by_kernel", lambda k, v: k.shape[1] > 1 and delta.refusal(k, v) is None)
    case.cast(torch.float32)
    forms_used(forget=True)
    results = case.whole(backend="online", **options)
    assert "delta_states: triton" in forms_used()
    for x, reference in zip([*results, *graded(results, case.leaves)], expected, strict=True):
        assert (x - reference).norm() <= 2e-6 * reference.norm() + 1e-12


@pytest.mark.skipif(not pieces.INTERPRETED, reason="a GPU is here: tests/kernels/test_gpu.py")
@pytest.mark.parametrize("sizes", [[(1, T) for T in (64, 96, 128, 160)], [(B, 96) for B in (1, 2, 3, 5)]])
def test_lengths_and_rows_take_two_graphs_where_kernels_compute_the_states(monkeypatch, sizes):
    monkeypatch.setattr(online, "COMPILED", 0)
    monkeypatch.setattr(online, "_by_kernel", lambda k, v: True)
    memory = torch.compile(online._memory, fullgraph=True, backend=(counter := CompileCounter()))
    for B, T in sizes:
        gates, state = 0.1 * torch.rand(3, B, T, 1), torch.zeros(B, 1, 16, 16)
        with torch.no_grad():
            y, *_ = memory(online.Inputs.of(*torch.full((3, B, T, 1, 16), 0.2), *gates), state, state, False)
        assert y.shape[:2] == (B, T)
    assert counter.frame_count == 2


@pytest.mark.skipif(not pieces.INTERPRETED, reason="a GPU is here: tests/kernels/test_gpu.py")
def test_kernels_are_operators_of_torch():
    """torch.compile and torch.export rely on it: shapes without data, no changed inputs, gradients."""
    R, n, b, D, F = 1, 2, 16, 16, 32
    sizes = [(R, n, b, F), *[(R, n, b, D)] * 3, (2, R, n, b), (3, R, n), (R, 2 * D, F)]
    inputs = [(0.1 * torch.randn(size)).requires_grad_() for size in sizes]
    torch.library.opcheck(delta.delta_states, inputs)
    grads = [torch.randn(R, n + 1, 2 * D, F), torch.randn(R, n, b, F)]
    torch.library.opcheck(delta.delta_states_backward, [x.detach() for x in inputs[1:6]] + grads)
