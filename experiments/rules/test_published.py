"""Rules of other papers against loops over their published equations, with torch's own gradients."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.rules.delta_ttt import DeltaTTT
from experiments.rules.e2_ttt import E2TTT
from experiments.rules.lact import LaCT
from experiments.rules.matrices import NEWTON_SCHULZ, newton_schulz
from experiments.rules.mdn import MomentumDelta
from experiments.rules.miras import Huber, Memora, Moneta, Yaad, YaadGated
from tests.kernels import cases
from tests.kernels.cases import assert_same
from titans_kernels import MemoryState, Rule
from titans_kernels.memory.rules import PAPER

T, B = 23, 6
"""Tokens and chunk size: three full chunks and an open one."""


class Deep(cases.Case):
    """Two layers of two heads, inside ``x + LN(f(x))`` unless ``norm`` is False."""

    def __init__(self, norm: bool = True, momentum: bool = True, rule: Rule = PAPER):
        kind = "norm" if norm else "none"
        super().__init__(T, kind=kind, widths=[4, 6, 4], extra=rule.extra_gates)
        if not momentum:
            with torch.no_grad():
                for zero in (self.tokens[4], *self.state.momentum):
                    zero.zero_()

    def output(self, head: int, x: Tensor, z: Tensor) -> Tensor:
        """M(x) from z = f(x)."""
        return x + F.layer_norm(z, z.shape[-1:], self.norm[0][head], self.norm[1][head], 1e-6)

    @property
    def without_momentum(self) -> list[Tensor]:
        """The leaves that matter where eta = 0."""
        return [*self.tokens[:4], *self.tokens[5:], *self.state.weights, *self.norm]

    @property
    def norm(self) -> tuple[Tensor, ...]:
        """LN's weight and bias [H, D]."""
        return self.residual.norm if self.residual else ()

    def by_hand(self, head) -> list[Tensor]:
        """y and the state after the last token, from ``head(h, tokens, W, S)`` of each head."""
        heads = [
            head(h, [x[0, :, h] for x in self.tokens], *([x[0, h] for x in part] for part in self.state))
            for h in range(2)
        ]
        y = torch.stack([torch.stack(y) for y, _, _ in heads], 1)[None]
        layers = [torch.stack([part[l] for part in parts])[None] for parts in
                  ([W for _, W, _ in heads], [S for _, _, S in heads]) for l in range(2)]  # fmt: skip
        return [y, *layers]


def f(W: list[Tensor], x: Tensor) -> Tensor:
    return F.silu(x @ W[0]) @ W[1]


def gradient(loss, W: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradient of ``loss(W)`` at W, itself differentiable."""
    at = [w if w.requires_grad else w.detach().requires_grad_() for w in W]
    return torch.autograd.grad(loss(at), at, create_graph=True)


def assert_published(case: Deep, expected: list[Tensor], leaves: list[Tensor], **options) -> None:
    """Compare the generic form, every cut and every gradient of ``leaves``."""
    options["chunk_size"] = options.get("chunk_size", B)
    assert_same(expected, case.whole(**options), leaves)
    for sizes in ([T], [2, 1, 1, 5, T - 9], [T - 1, 1], [1] * T):
        assert_same(expected, case.pieces(sizes, **options), leaves)
    # what has been read does not change when later tokens do
    y, before = case.whole(**options)[0], case.tokens
    case.tokens = [torch.cat([x[:, :-1], 0.5 * x[:, -1:]], 1) for x in before]
    torch.testing.assert_close(case.whole(**options)[0][:, :-1], y[:, :-1], rtol=0, atol=0)
    case.tokens = before


def clipped(G: Tensor, bound: float) -> Tensor:
    return G if G.norm() <= bound else G * bound / G.norm()


def fixed_rows(W: Tensor, start: Tensor) -> Tensor:
    return W / W.norm(dim=0, keepdim=True) * start.norm(dim=0, keepdim=True)


@pytest.mark.parametrize("clip", [0.05, 100.0])
def test_e2_ttt_equals_published_recurrence(clip):
    case = Deep()

    def head(h, tokens, W, S):
        y, (weight, bias) = [], (p[h] for p in case.norm)
        for first in range(0, T, B):
            start, sums = W, [(torch.zeros_like(w), torch.zeros_like(w)) for w in W]
            carried, last = [(w, s) for w, s in zip(W, S, strict=True)], min(first + B, T)
            for q, k, v, alpha, eta, theta in zip(*(x[first:last] for x in tokens), strict=True):
                y.append(q + F.layer_norm(f(start, q), (4,), weight, bias, 1e-6))

                def loss(at, k=k, v=v):
                    normed = F.layer_norm(f(at, k), (4,), weight, bias, 1e-6)
                    return (normed - F.layer_norm(v - k, (4,), weight, bias, 1e-6)).square().sum()

                g = gradient(loss, start)
                carried = [((1 - alpha) * w + eta * s, eta * s) for w, s in carried]
                moved = [(eta * m - theta * x) for (_, m), x in zip(sums, g, strict=True)]
                sums = [((1 - alpha) * w + m, m) for (w, _), m in zip(sums, moved, strict=True)]
            if last - first < B:
                W = [w + dw for (w, _), (dw, _) in zip(carried, sums, strict=True)]
                S = [s + ds for (_, s), (_, ds) in zip(carried, sums, strict=True)]
                break
            W = [fixed_rows(w + clipped(dw, clip), w0) for (w, _), (dw, _), w0 in
                 zip(carried, sums, start, strict=True)]  # fmt: skip
            S = [s + clipped(ds, clip) for (_, s), (_, ds) in zip(carried, sums, strict=True)]
        return y, W, S

    assert_published(case, case.by_hand(head), case.leaves, rule=E2TTT(clip))


def test_moneta_keeps_its_accumulator():
    """The published Acc, kept beside W and started so that W is M_0."""
    case = Deep(momentum=False)

    def norm4(x: Tensor) -> Tensor:
        return x.pow(4).sum().pow(0.25)

    def head(h, tokens, W, S):
        y, start, Acc = [], W, [w / norm4(w).square() for w in W]
        for t, (q, k, v, alpha, _, theta) in enumerate(zip(*tokens, strict=True)):
            if t % B == 0:
                start = W

            def loss(at, k=k, v=v):
                return ((case.output(h, k, f(at, k)) - v).square() + 1e-6).pow(1.5).sum()

            g = gradient(loss, start)
            Acc, W = ([(1 - alpha) * x - theta * d for x, d in zip(X, g, strict=True)] for X in (Acc, W))
            if t % B == B - 1:
                W = [a / norm4(a).square() for a in Acc]
            y.append(case.output(h, q, f(W, q)))
            S = [-theta * d for d in g]
        return y, W, S

    assert_published(case, case.by_hand(head), case.without_momentum, rule=Moneta())


def test_threshold_per_token_equals_gated_yaad():
    case, sides = Deep(momentum=False, rule=YaadGated()), []

    def head(h, tokens, W, S):
        y, start = [], W
        for t, (q, k, v, alpha, _, theta, gate) in enumerate(zip(*tokens, strict=True)):
            if t % B == 0:
                start = W
            near = (case.output(h, k, f(start, k)) - v).norm() <= 3 * gate
            sides.append(bool(near))

            def loss(at, k=k, v=v, gate=gate, near=near):
                e = case.output(h, k, f(at, k)) - v
                return e.square().sum() if near else 3 * gate.sum() * (e.square() + 1e-6).sqrt().sum()

            g = gradient(loss, start)
            W = [(1 - alpha) * x - theta * d for x, d in zip(W, g, strict=True)]
            y.append(case.output(h, q, f(W, q)))
            S = [-theta * d for d in g]
        return y, W, S

    expected = case.by_hand(head)
    assert {*sides} == {True, False}
    assert_published(case, expected, case.without_momentum, rule=YaadGated(3.0))


@pytest.mark.parametrize("lag", [False, True], ids=["", "lag"])
@pytest.mark.parametrize("chunk_size", [1, 2, B])
def test_memora_equals_softmax_per_token_with_gradients_at_chunk_start(chunk_size, lag):
    """With a lag token, at the weights after the chunk's first token."""
    case = Deep(momentum=False)
    case.state = softmaxed(case.state)

    def head(h, tokens, W, S):
        y, start, true = [], W, W
        for t, (q, k, v, alpha, _, theta) in enumerate(zip(*tokens, strict=True)):
            if t % chunk_size == 0:
                start, true = W, W
            g = gradient(lambda at, k=k, v=v: (case.output(h, k, f(at, k)) - v).square().sum(), start)
            true = [((1 - alpha) * x.log() - theta * d).softmax(0) for x, d in zip(true, g, strict=True)]
            W = [(1 - alpha) * x - theta * d for x, d in zip(W, g, strict=True)]
            if t % chunk_size == chunk_size - 1:
                W = true
            if lag and t % chunk_size == 0:
                start = W = true
            y.append(case.output(h, q, f(W, q)))
            S = [-theta * d for d in g]
        return y, W, S

    options = {"rule": Memora(lag), "chunk_size": chunk_size}
    assert_published(case, case.by_hand(head), case.without_momentum, **options)


def softmaxed(state: MemoryState) -> MemoryState:
    return state._replace(weights=tuple((4 * W.detach()).softmax(-2).requires_grad_() for W in state.weights))


def orthogonalised(G: Tensor) -> Tensor:  # as published, on G as [outputs, inputs]
    X = G.T / (G.norm() + 1e-7)
    transposed = X.shape[0] > X.shape[1]
    X = X.T if transposed else X
    for a, b, c in NEWTON_SCHULZ:
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return (X.T if transposed else X).T


@pytest.mark.parametrize("muon", [0.0, 1.0])
def test_lact_equals_published_recurrence(muon):
    case = Deep(norm=False)

    def head(h, tokens, W, S):
        y = []
        for first in range(0, T, B):
            start, part = W, [x[first : first + B] for x in tokens]
            sums = last = [torch.zeros_like(w) for w in W]
            for q, k, v, _, _, theta in zip(*part, strict=True):
                y.append(f(start, q))
                g = gradient(lambda at, k=k, v=v: -(f(at, k) * v).sum(), start)
                last = [-theta * d for d in g]
                sums = [x + d for x, d in zip(sums, last, strict=True)]
            if len(part[0]) < B:
                return y, [w + dw for w, dw in zip(W, sums, strict=True)], last
            S = [dw + part[4].mean() * s for dw, s in zip(sums, S, strict=True)]
            W = [fixed_rows(w + (orthogonalised(s) if muon else s), w) for w, s in zip(W, S, strict=True)]
        return y, W, S

    leaves = [x for x in case.leaves if x is not case.tokens[3]]  # nothing decays
    assert_published(case, case.by_hand(head), leaves, rule=LaCT(muon))


def test_newton_schulz_brings_singular_values_near_one():
    G = torch.randn(2, 12, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = torch.linalg.svdvals(newton_schulz(G))
    assert values.min() > 0.7
    assert values.max() < 1.3


def by_head(case: cases.Case) -> list[Tensor]:
    """q, k, v, the gates and the rule's own [T, ...] of one head."""
    return [x[0, :, 0].detach() for x in case.tokens]


def assert_head_reads(case: cases.Case, expected: list[Tensor], rule: Rule) -> None:
    y, *_ = case.whole(chunk_size=1, rule=rule)
    torch.testing.assert_close(y[0, :, 0], torch.stack(expected), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("rule", [MomentumDelta(), MomentumDelta(tied=1)], ids=str)
def test_momentum_with_write_gate_equals_momentum_deltanet(rule):
    case = cases.Case(30, 1, extra=1)
    q, k, v, alpha, mu, theta, gate = by_head(case)
    W, S, reads = case.state.weights[0][0, 0].detach(), case.state.momentum[0][0, 0].detach(), []
    momentum = -S  # the published one adds gradients of half the squared error, and is subtracted
    beta = gate[:, 0] * (alpha if rule.tied else 1)
    for t in range(len(q)):
        kept = (1 - alpha[t]) * W
        momentum = mu[t] * momentum + 2 * theta[t] * torch.outer(k[t], k[t] @ kept - v[t])
        W = kept - beta[t] * momentum
        reads.append(q[t] @ W)
    assert_head_reads(case, reads, rule)
    case.check("generic", cuts=[[7, 23]], chunk_size=8, rule=rule)


@pytest.mark.parametrize("rule", [Huber(delta=0.3), Yaad(delta=0.8)], ids=["huber", "yaad"])
def test_huber_rule_equals_update_of_miras(rule):
    case = cases.Case(30, 1)
    with torch.no_grad():
        case.tokens[4].zero_()
        case.state.momentum[0].zero_()
    q, k, v, alpha, _, theta = by_head(case)
    W, reads, sides = case.state.weights[0][0, 0].detach(), [], []
    for t in range(len(q)):
        e = k[t] @ W - v[t]
        near = (e.norm() if isinstance(rule, Yaad) else e.abs()) <= rule.delta
        force = torch.where(near, e, rule.delta * e.sign())
        W = (1 - alpha[t]) * W - theta[t] * 2 * torch.outer(k[t], force)
        reads.append(q[t] @ W)
        sides.append(near.flatten())
    assert torch.cat(sides).any(), "no error is within the threshold"
    assert not torch.cat(sides).all(), "no error is beyond the threshold"
    assert_head_reads(case, reads, rule)
    case.check("generic", cuts=[[7, 23]], chunk_size=8, rule=rule)
    quadratic = case.whole(rule=type(rule)(delta=100.0), chunk_size=8)
    assert_same(case.whole(chunk_size=8), quadratic, case.leaves)


@pytest.mark.parametrize("post", [0.0, 1.0], ids=["pre", "post"])
def test_delta_ttt_equals_published_recurrence(post):
    case = cases.Case(30, widths=[5, 4, 4], extra=1)
    with torch.no_grad():
        for x in (case.tokens[3], case.tokens[4], *case.state.momentum):
            x.zero_()
    q, k, v, _, _, theta, extra = by_head(case)
    A, C = (W[0, 0].detach() for W in case.state.weights)
    reads = []
    for t in range(len(q)):
        e, h = v[t] - k[t] @ A, F.silu(k[t] @ A)
        A = A + 2 * theta[t] * torch.outer(k[t], e)
        h = F.silu(k[t] @ A) if post else h
        C = C + extra[t, 0] * torch.outer(h, v[t] - h @ C)
        reads.append(F.silu(q[t] @ A) @ C)
    assert_head_reads(case, reads, DeltaTTT(post))
    expected = case.whole(chunk_size=1, rule=DeltaTTT(post))
    assert_same(expected, case.pieces([7, 23], chunk_size=1, rule=DeltaTTT(post)), case.leaves)
