"""A residual, LN, an alpha by column, a base to decay to: every form against the recurrence."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from tests.kernels.cases import NATIVE, PARALLEL, Case, assert_same, needs_compiler
from titans_kernels import DecodeState, Residual, extend_memory, neural_memory, read_memory
from titans_kernels.memory.activations import ACTIVATIONS
from titans_kernels.memory.forms import channels, chunked, reference
from titans_kernels.memory.forms.triton import pieces
from titans_kernels.memory.options import Options

KINDS = ["none", "input", "norm"]
# T, chunk_size, surprise_bound: one token, the online rule, a short last chunk, a whole one, a single chunk
CALLS = [(2, 16, None), (11, 1, 0.5), (37, 16, None), (19, 7, 0.5), (9, 64, 0.5)]


def parallel(groups: int | tuple | None) -> list[str]:
    """Parallel forms that support a case."""
    return PARALLEL if groups is None else ["chunked"]


GATES = [(4, 4, 4), (None, 4, None), (None, None, 4), (2, None, 2)]
SWITCHED = [("input", None), ("norm", None), ("none", 4), ("norm", 2), *(("none", gates) for gates in GATES)]
PLAIN = ("none", None)
AROUND = [(*case, base) for base in (False, True) for case in (PLAIN, *SWITCHED)]


# a case has the even depths or the odd ones; the paper's own memory has all
@pytest.mark.parametrize(("depth", "kind", "groups", "base"), [
    (depth, *case) for i, case in enumerate(AROUND) for depth in (1, 2, 3, 4)
    if case[:2] == PLAIN or depth % 2 == i % 2
])  # fmt: skip
def test_every_form_is_the_recurrence(depth, kind, groups, base):
    for T, chunk_size, bound in CALLS:
        forms = (*parallel(groups), "auto", *(["generic"] if T < 20 else []))
        case = Case(T, depth, kind=kind, groups=groups, base=base)
        case.check(*forms, chunk_size=chunk_size, surprise_bound=bound)


@pytest.mark.parametrize("bound", [None, 0.3])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("normed", [True, False])
def test_the_inner_gradient_is_that_of_the_loss_of_the_whole_memory(activation, bound, normed):
    """By automatic differentiation through torch's own LN; the bound holds back what goes below a layer."""
    case = Case(1, 1 if bound else 3, kind="norm")
    f, (weight, bias) = ACTIVATIONS[activation], (x[0].detach() for x in case.residual.norm)
    k, v = (x[0, 0, 0].detach() for x in case.tokens[1:3])

    def loss(weights):
        x = k
        for W in weights[:-1]:
            x = f.value(x @ W)
        y = x @ weights[-1]
        return ((k + F.layer_norm(y, (4,), weight, bias, 1e-6) if normed else y) - v).square().sum()

    one_head = tuple(W[0, 0].detach() for W in case.state.weights)
    expected = list(torch.func.grad(loss)(one_head))
    if bound:  # one layer: its gradient is k^T d, and |k| = 1
        expected = [g * min(1, bound / g.norm()) for g in expected]
    residual = Residual(weight[None], bias[None]) if normed else None
    batched = tuple(W[None, None] for W in one_head)
    options = Options(1, activation, bound, None, residual=residual)
    actual = reference.inner_gradient(batched, k[None, None], v[None, None], options, k[None, None, :0])
    torch.testing.assert_close([g[0, 0] for g in actual], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("depth", "chunk_size", "bound"), [
    (3, 1, 0.3), (1, 5, None), (1, 5, 0.3), (3, 5, 0.3),
])  # fmt: skip
@pytest.mark.parametrize(("kind", "groups", "base"), AROUND)
def test_token_by_token_and_any_cut_is_the_recurrence(kind, groups, base, depth, chunk_size, bound):
    case = Case(13, depth, kind=kind, groups=groups, base=base)
    case.check(cuts=([3, 2, 3, 5], [1, 11, 1]), decoded=True, chunk_size=chunk_size, surprise_bound=bound)


@pytest.mark.parametrize(("kind", "groups", "base"), [
    *(("none", None, False), ("input", None, False), ("norm", None, False), ("norm", 4, False)),
    ("none", None, True),
])  # fmt: skip
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_float32_is_near_the_float64_recurrence(depth, kind, groups, base):
    case, single = (Case(130, depth, kind=kind, groups=groups, base=base) for _ in range(2))
    single.cast(torch.float32)
    options = {"chunk_size": 16, "surprise_bound": 0.5}
    expected = case.whole(backend="reference", **options)
    for backend in parallel(groups):
        for x, y in zip(expected, single.whole(backend=backend, **options), strict=True):
            assert y.dtype == torch.float32
            assert (x - y).norm() <= 1e-4 * x.norm()


@pytest.mark.parametrize(("kind", "groups", "rule"), [
    (*PLAIN, "paper"), ("norm", None, "paper"), ("norm", 2, "paper"), (*PLAIN, "gated_delta"),
])  # fmt: skip
def test_bfloat16_tokens_leave_the_state_in_float32(kind, groups, rule):
    case, options = Case(20, kind=kind, groups=groups), {"chunk_size": 8}
    options["extension"] = case.extension(rule=rule)
    start = DecodeState.of(case.state._make(tuple(x.float() for x in part) for part in case.state))
    low = [x.detach().bfloat16() for x in case.tokens]
    exact = [x.float() for x in low]
    with torch.autocast("cpu", torch.bfloat16):
        y, state = neural_memory(*low, *case.state, **options)
        z, cut = extend_memory(*low, start, **options)
        read = read_memory(low[0], start.weights, extension=options["extension"])
    assert y.dtype == z.dtype == read.dtype == torch.bfloat16
    assert {x.dtype for x in tree_leaves((state, cut.memory()))} == {torch.float32}
    torch.testing.assert_close(state, neural_memory(*exact, *case.state, **options)[1], rtol=0, atol=0)
    plain = extend_memory(*exact, start, **options)[1]
    torch.testing.assert_close(cut.memory(), plain.memory(), rtol=0, atol=0)


# (KEEP_BYTES, KEEP_WORK_BYTES, BLOCK_BYTES, CACHE_BYTES)
STORAGE = {
    "states and work, one block": (2**30, 2**30, 2**30, 2**30),
    "states, blocks of two": (2**30, 0, 4000, 2**30), "every few states": (3000, 0, 1, 2**30),
    "states and work, blocks of one step and head": (2**30, 2**30, 1, 1),
    "every few states, head by head": (3000, 0, 1, 1),
}  # fmt: skip


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("borders", [None, [0, 30, 32, 40]])
@pytest.mark.parametrize(("kind", "base"), [("norm", False), ("none", False), ("none", True)])
def test_what_is_kept_for_the_backward_changes_nothing(monkeypatch, storage, borders, kind, base):
    rows = {"batch": 1 if borders else 2, "documents": borders and 3}
    case, options = Case(40, kind=kind, base=base, **rows), {"chunk_size": 7}
    options["surprise_bound"] = None if kind == "norm" else 0.5
    options["cu_seqlens"] = borders and torch.tensor(borders)
    expected = case.whole(backend="reference", **options)
    names = ("KEEP_BYTES", "KEEP_WORK_BYTES", "BLOCK_BYTES", "CACHE_BYTES")
    for name, value in zip(names, STORAGE[storage], strict=True):
        monkeypatch.setattr(chunked, name, value)
    actual = case.whole(backend="chunked", **options)
    for _ in range(2):  # the backward leaves what was kept as it was
        assert_same(expected, actual, case.leaves)


@pytest.mark.parametrize("borders", [None, [0, 30, 32, 32, 40]])
def test_a_large_call_by_column_does_its_work_again_in_the_backward(monkeypatch, borders):
    rows = {"batch": 1 if borders else 2, "documents": borders and 4}
    case, calls, step = Case(40, kind="norm", groups=4, **rows), [], channels._step
    options = {"chunk_size": 7, "surprise_bound": 0.5, "activation": "gelu"}
    options["cu_seqlens"] = borders and torch.tensor(borders)
    expected = case.whole(backend="reference", **options)
    monkeypatch.setattr(channels, "KEEP_BYTES", 0)
    monkeypatch.setattr(channels, "_step", lambda *args: calls.append(1) or step(*args))
    actual, steps = case.whole(backend="chunked", **options), len(calls)
    assert_same(expected, actual, case.leaves)
    assert len(calls) == 2 * steps > 0


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("gates", [(3,), (4,), (5,), (3, 4, 5)])
def test_groups_are_neighbouring_columns_of_every_layer(gates, groups):
    """Four groups of which neighbours are equal; tests/core/test_textbook.py has a gate for each column."""
    case = Case(30, groups=tuple(groups if i in gates else None for i in (3, 4, 5)))
    expected = case.whole(chunk_size=8)
    for i in gates:
        case.tokens[i] = case.tokens[i].repeat_interleave(4 // groups, -1)
    torch.testing.assert_close(case.whole(chunk_size=8), expected, rtol=1e-10, atol=1e-11)
    if groups == 1:
        for i in gates:
            case.tokens[i] = case.tokens[i][..., 0]
        torch.testing.assert_close(case.whole(chunk_size=8), expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("base", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_read_without_a_write(kind, base):
    case = Case(20, kind=kind, base=base)
    tokens = [*case.tokens[:3], *(torch.zeros_like(x) for x in case.tokens[3:])]
    weights, extension = tuple(W[0] for W in case.state.weights), case.extension()
    y, _ = neural_memory(*tokens, weights, chunk_size=16, extension=extension)
    result = read_memory(case.tokens[0], weights, extension=extension)
    torch.testing.assert_close(result, y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("borders", [None, [0, 5, 5, 20]])
@pytest.mark.parametrize(("depth", "kind", "groups", "base"), [
    *((2, *case, False) for case in (("norm", None), ("none", 2), ("norm", 4))),
    *((2, *case, True) for case in (("none", None), ("norm", None), ("norm", 4), ("none", (4, 4, 4)))),
    (1, "none", None, True), (3, "none", None, False),
])  # fmt: skip
@pytest.mark.slow
def test_compiled_is_eager_and_so_is_every_gradient(depth, kind, groups, base, borders):
    rows = {"batch": 1 if borders else 2, "documents": borders and 3}
    case = Case(20, depth, kind=kind, groups=groups, base=base, **rows)
    options = {"chunk_size": 7, "surprise_bound": 0.5, "cu_seqlens": borders and torch.tensor(borders)}
    torch._dynamo.reset()
    compiled = torch.compile(lambda: case.whole(**options), fullgraph=True, backend="aot_eager")
    expected, actual = case.whole(**options), compiled()
    assert_same(expected, actual, case.leaves)
    # of some results only: the others' gradients are then undefined
    grads = partial(torch.autograd.grad, inputs=case.leaves, retain_graph=True, materialize_grads=True)
    for part in (slice(0, 1), slice(1, 3)):
        sums = (sum(x.square().sum() for x in outputs[part]) for outputs in (expected, actual))
        torch.testing.assert_close(*map(grads, sums), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(("backend", "case", "reason"), [
    ("online", {"kind": "norm"}, "it does not support LN inside the memory"),
    ("triton", {"kind": "norm"}, "residual: no kernel computes norm"),
    *((backend, {"groups": groups}, reason)
      for backend, reason in (("native", "it does not support gates per column"),
                              ("online", "it does not support gates per column"),
                              ("triton", "channel_gates: no kernel computes gates per column"))
      for groups in (4, (None, 4, None), (None, None, 4))),
    ("online", {"base": True, "depth": 2}, "it supports 1 layer, not 2"),
    ("online", {"chunk_size": 4}, "it supports chunk_size 1, not 4"),
])  # fmt: skip
def test_form_that_does_not_compute_an_option_is_refused(backend, case, reason):
    given = {"depth": 1, "chunk_size": 1} | case
    chunk_size = given.pop("chunk_size")
    with pytest.raises(ValueError, match=f"^backend: {backend} does not support this call: {reason}[^\n]*$"):
        Case(8, **given).whole(backend=backend, chunk_size=chunk_size)


@pytest.mark.skipif(not pieces.INTERPRETED, reason="a GPU is here: the kernels run on it")
def test_kernels_of_a_linear_memory_with_a_residual_and_a_base():
    case = Case(20, 1, kind="input", base=True, widths=[16, 16])
    case.cast(torch.float32)
    expected, actual = (case.whole(backend=name, chunk_size=16) for name in ("reference", "triton"))
    assert_same(expected, actual, case.leaves, results=(1e-3, 1e-4), gradients=(1e-3, 1e-3))


@pytest.mark.parametrize("backend", ["reference", "generic", "chunked", NATIVE, "auto"])
@pytest.mark.parametrize("depth", [1, 3])
def test_forgetting_all_leads_back_to_the_base(depth, backend):
    case = Case(9, depth, base=True)
    with torch.no_grad():
        case.tokens[3][:, -1], case.tokens[4][:, -1], case.tokens[5][:, -1] = 1, 0, 0
        y, *after = case.whole(backend=backend, chunk_size=4)
        expected = read_memory(case.tokens[0][:, -1:], case.base)
    torch.testing.assert_close(y[:, -1:], expected, rtol=1e-12, atol=1e-14)
    assert all((x == 0).all() for x in after)


@needs_compiler
@pytest.mark.parametrize("used", ["base", "tokens"])
def test_gradient_of_some_inputs_alone_and_of_none(used):
    case, grads = Case(20, base=True), []
    leaves = case.base if used == "base" else case.tokens
    for x in case.leaves:
        x.requires_grad_(any(x is leaf for leaf in leaves))
    for backend in ("reference", "native", "chunked", "generic"):
        grads.append(torch.autograd.grad(case.whole(backend=backend, chunk_size=7)[0].sin().sum(), leaves))
    for result in grads[1:]:
        torch.testing.assert_close(result, grads[0], rtol=1e-9, atol=1e-10)
    for x in leaves:
        x.requires_grad_(False)
    for backend in ("reference", "native", "chunked", "generic"):
        assert not any(x.requires_grad for x in case.whole(backend=backend, chunk_size=7)), backend


@pytest.mark.parametrize("compiled", [False, True])
def test_state_can_be_continued_twice(compiled):
    case = Case(12, batch=2)
    if compiled:  # without a gradient
        case.tokens = [x.detach() for x in case.tokens]
        case.state = case.state.detach()
    rule = {"chunk_size": 8, "surprise_bound": 0.3}
    before, after = ([x[:, part] for x in case.tokens] for part in (slice(0, 5), slice(5, 12)))
    _, state = extend_memory(*before, DecodeState.of(case.state), **rule)
    kept = [x.clone() for x in tree_leaves(state)]
    first, _ = extend_memory(*after, state, **rule)
    extend_memory(*(x[:, :3] for x in after), state, **rule)
    torch.testing.assert_close(extend_memory(*after, state, **rule)[0], first, rtol=0, atol=0)
    torch.testing.assert_close(tree_leaves(state), kept, rtol=0, atol=0)
