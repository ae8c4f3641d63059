"""`DeltaTTT`, a delta rule in each layer: the published equations, and every form against the recurrence."""

import re
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from tests.kernels.cases import Call, assert_same
from titans_kernels import MemoryState, forms_used
from titans_kernels.memory.rules.delta_ttt import DeltaTTT

each_order = pytest.mark.parametrize("post", [False, True], ids=["pre", "post"])


class Case(Call):
    """Random float64 inputs of two heads; some gates are 0 or 1."""

    def __init__(self, T: int, depth: int = 2, *, batch: int = 2, documents: int = 0, base: bool = False):
        generator = torch.Generator().manual_seed(10 * T + depth)
        rand = lambda *s: torch.rand(*s, generator=generator, dtype=torch.float64)  # noqa: E731
        q, k, v = (F.normalize(rand(batch, T, 2, n) - 0.5, dim=-1) for n in (5, 5, 4))
        alpha, eta, theta = 0.1 * rand(batch, T, 2), rand(batch, T, 2), rand(batch, T, 2) / 2
        extra = rand(batch, T, 2, 1)
        alpha[0, T // 2, 0], eta[0, T // 3, 1], eta[0, T // 2], theta[0, T // 4] = 1, 1, 0, 0
        shapes = [(documents or batch, 2, *pair) for pair in pairwise([5, *[4] * depth])]
        self.tokens = [x.requires_grad_() for x in (q, k, v, alpha, eta, theta, extra)]
        self.state = MemoryState(
            tuple((rand(*s) - 0.5).requires_grad_() for s in shapes),
            tuple((0.1 * (rand(*s) - 0.5)).requires_grad_() for s in shapes),
        )
        if base:
            self.base = tuple((rand(*s[1:]) - 0.5).requires_grad_() for s in shapes)


@each_order
def test_it_is_the_published_recurrence(post):
    case = Case(40, batch=1)
    with torch.no_grad():
        for x in (case.tokens[3], case.tokens[4], *case.state.momentum):
            x.zero_()
    q, k, v, _, _, theta, extra = (x[0, :, 1].detach() for x in case.tokens)
    A, B = (W[0, 1].detach() for W in case.state.weights)
    reads = []
    for t in range(40):
        e, h = v[t] - k[t] @ A, F.silu(k[t] @ A)
        A = A + 2 * theta[t] * torch.outer(k[t], e)
        h = F.silu(k[t] @ A) if post else h
        B = B + extra[t, 0] * torch.outer(h, v[t] - h @ B)
        reads.append(F.silu(q[t] @ A) @ B)
    for backend in ("reference", "online"):
        y, *_ = case.whole(backend=backend, rule=DeltaTTT(post), chunk_size=1)
        torch.testing.assert_close(y[0, :, 1], torch.stack(reads), rtol=1e-11, atol=1e-12)


@each_order
@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("T", [1, 7, 33, 65])
def test_scans_are_the_recurrence_with_decay_momentum_and_every_gradient(T, depth, post):
    case, options = Case(T, depth), {"rule": DeltaTTT(post), "chunk_size": 1}
    forms_used(forget=True)
    case.check("auto", **options)
    assert "neural_memory: layerwise" in forms_used()
    case.check(decoded=True, **options)


@each_order
@pytest.mark.parametrize("activation", ["gelu", "identity"])
def test_a_base_and_any_cut(post, activation):
    options = {"rule": DeltaTTT(post), "chunk_size": 1, "activation": activation}
    Case(41, base=True).check("online", cuts=([20, 21], [1, 33, 7]), **options)


@each_order
@pytest.mark.parametrize("backend", ["reference", "online"])
def test_packed_documents_are_separate_calls(backend, post):
    borders = [0, 13, 13, 46, 50]
    case = Case(50, batch=1, documents=4)
    options = {"rule": DeltaTTT(post), "chunk_size": 1, "backend": backend}
    packed = case.whole(cu_seqlens=torch.tensor(borders), **options)
    assert_same(case.apart(borders, **options), packed, case.leaves)


def test_a_bound_is_computed_token_by_token():
    case, options = Case(9), {"rule": DeltaTTT(), "chunk_size": 1, "surprise_bound": 0.5}
    forms_used(forget=True)
    bounded = case.whole(**options)[0]
    assert "neural_memory: reference" in forms_used()
    assert (bounded - case.whole(**options | {"surprise_bound": None})[0]).abs().max() > 1e-3


@pytest.mark.parametrize(("options", "message"), [
    ({"chunk_size": 8}, "chunk_size: the rule DeltaTTT(post=False) needs 1, not 8"),
    ({"chunk_size": 1, "backend": "autograd"}, "backend: autograd does not support this call: it does not"),
    ({"chunk_size": 1, "backend": "chunked"}, "backend: chunked does not support this call: it does not"),
])  # fmt: skip
def test_what_it_does_not_support_is_named(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Case(4).whole(rule="delta_ttt", **options)
