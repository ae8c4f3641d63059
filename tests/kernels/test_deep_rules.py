"""Rules of deep memories against loops over their published equations, with torch's own gradients."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from tests.kernels.cases import assert_same, with_extra
from tests.kernels.test_rules import Case
from titans_kernels import (
    DecodeState,
    MemoryState,
    Residual,
    Rule,
    decode_step,
    extend_memory,
    find_rule,
    neural_memory,
    state_numel,
)
from titans_kernels.memory.parts.norms import NEWTON_SCHULZ, newton_schulz
from titans_kernels.memory.rules import PAPER

T, B = 23, 6
"""Tokens and chunk size: three full chunks and an open one."""


class Deep(Case):
    """Two layers of two heads, inside ``x + LN(f(x))`` if asked."""

    def __init__(self, norm: bool = True, T: int = T, momentum: bool = True, decay: bool = True,
                 rule: Rule = PAPER, activation: str = "silu", thetas: int | None = None):  # fmt: skip
        super().__init__(T, widths=[4, 6, 4], rule=rule, activation=activation, thetas=thetas)
        with torch.no_grad():
            for gate, used in zip(self.tokens[3:5], (decay, momentum), strict=True):
                gate.mul_(used)
            if not momentum:
                for S in self.state.momentum:
                    S.zero_()
        if norm:
            generator = torch.Generator().manual_seed(5)
            rand = lambda: torch.rand(2, 4, generator=generator, dtype=torch.float64)  # noqa: E731
            self.residual = Residual((0.5 + rand()).requires_grad_(), (rand() - 0.5).requires_grad_())

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
        found = [
            head(h, [x[0, :, h] for x in self.tokens], *([x[0, h] for x in part] for part in self.state))
            for h in range(2)
        ]
        y = torch.stack([torch.stack(y) for y, _, _ in found], 1)[None]
        layers = [torch.stack([part[l] for part in parts])[None] for parts in
                  ([W for _, W, _ in found], [S for _, _, S in found]) for l in range(2)]  # fmt: skip
        return [y, *layers]


def f(W: list[Tensor], x: Tensor) -> Tensor:
    return F.silu(x @ W[0]) @ W[1]


def gradient(loss, W: list[Tensor]) -> tuple[Tensor, ...]:
    """The gradient of ``loss(W)`` at W, itself differentiable."""
    at = [w if w.requires_grad else w.detach().requires_grad_() for w in W]
    return torch.autograd.grad(loss(at), at, create_graph=True)


def assert_published(case: Deep, expected: list[Tensor], leaves: list[Tensor], **options) -> None:
    """Every form, every cut and every gradient of ``leaves``."""
    options["chunk_size"] = options.get("chunk_size", B)
    windowed = isinstance(options["rule"], Rule) and options["rule"].window
    for backend in ("reference", "auto") if windowed else ("reference", "autograd", "auto"):
        assert_same(expected, case.whole(backend=backend, **options), leaves)
    size = case.tokens[0].shape[1]
    for sizes in ([size], [2, 1, 1, 5, size - 9], [size - 1, 1]):
        assert_same(expected, case.pieces(sizes, **options), leaves)
    assert_same(expected, case.pieces([1] * size, decode_step, **options), leaves)
    # what has been read does not change when later tokens do
    changed = [torch.cat([x[:, :-1], 0.5 * x[:, -1:]], 1) for x in case.tokens]
    before, case.tokens = case.tokens, changed
    y = case.whole(**options)[0]
    case.tokens = before
    torch.testing.assert_close(y[:, :-1], case.whole(**options)[0][:, :-1], rtol=0, atol=0)


def clipped(G: Tensor, bound: float) -> Tensor:
    return G if G.norm() <= bound else G * bound / G.norm()


def fixed_rows(W: Tensor, start: Tensor) -> Tensor:
    return W / W.norm(dim=0, keepdim=True) * start.norm(dim=0, keepdim=True)


@pytest.mark.parametrize("clip", [0.05, 100.0])
def test_e2_ttt(clip):
    case = Deep()

    def head(h, tokens, W, S):
        y, (weight, bias) = [], (p[h] for p in case.norm)
        for first in range(0, T, B):
            start, sums = W, [(torch.zeros_like(w), torch.zeros_like(w)) for w in W]
            own, last = [(w, s) for w, s in zip(W, S, strict=True)], min(first + B, T)
            for q, k, v, alpha, eta, theta in zip(*(x[first:last] for x in tokens), strict=True):
                y.append(q + F.layer_norm(f(start, q), (4,), weight, bias, 1e-6))

                def loss(at, k=k, v=v):
                    normed = F.layer_norm(f(at, k), (4,), weight, bias, 1e-6)
                    return (normed - F.layer_norm(v - k, (4,), weight, bias, 1e-6)).square().sum()

                g = gradient(loss, start)
                own = [((1 - alpha) * w + eta * s, eta * s) for w, s in own]
                moved = [(eta * m - theta * x) for (_, m), x in zip(sums, g, strict=True)]
                sums = [((1 - alpha) * w + m, m) for (w, _), m in zip(sums, moved, strict=True)]
            if last - first < B:
                W = [w + dw for (w, _), (dw, _) in zip(own, sums, strict=True)]
                S = [s + ds for (_, s), (_, ds) in zip(own, sums, strict=True)]
                break
            W = [fixed_rows(w + clipped(dw, clip), w0) for (w, _), (dw, _), w0 in
                 zip(own, sums, start, strict=True)]  # fmt: skip
            S = [s + clipped(ds, clip) for (_, s), (_, ds) in zip(own, sums, strict=True)]
        return y, W, S

    assert_published(case, case.by_hand(head), case.leaves, rule=find_rule("e2_ttt", clip=clip))


@pytest.mark.parametrize("name", ["e2_ttt", "moneta", "memora", "memora lag", "lact", "omega", "atlas"])
def test_the_state_of_an_open_chunk_is_counted(name):
    name, *on = name.split()
    rule = find_rule(name, **dict.fromkeys(on, 1.0))
    case = Deep(rule=rule)
    for tokens in (1, 5, B, 15):
        *part, extra = with_extra(x[:, :tokens] for x in case.tokens)
        options = {"chunk_size": B, "rule": rule, "residual": case.residual, "extra": extra}
        _, state = extend_memory(*part, DecodeState.of(case.state), **options)
        held = sum(x.numel() for x in tree_leaves(state))
        before = tokens - tokens % B
        assert held == 2 * state_numel([(4, 6), (6, 4)], tokens % B, rule, before=before)


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

    assert_published(case, case.by_hand(head), case.without_momentum, rule="moneta")


def test_a_threshold_per_token_is_yaad():
    case, sides = Deep(momentum=False, rule=find_rule("yaad_gated")), []

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
    assert_published(case, expected, case.without_momentum, rule=find_rule("yaad_gated", delta=3.0))


@pytest.mark.parametrize("lag", [False, True], ids=["", "lag"])
@pytest.mark.parametrize("chunk_size", [1, 2, B])
def test_memora_is_a_softmax_of_each_token_with_gradients_at_the_chunk_s_start(chunk_size, lag):
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

    options = {"rule": find_rule("memora", lag=lag), "chunk_size": chunk_size}
    assert_published(case, case.by_hand(head), case.without_momentum, **options)


def softmaxed(state: MemoryState) -> MemoryState:
    return state._replace(weights=tuple((4 * W.detach()).softmax(-2).requires_grad_() for W in state.weights))


def by_turns(case: Case, borders: list[int], **options) -> list[Tensor]:
    """`memora` of each document in chunks of one token and of B - 1 tokens, in turns."""
    apart = []
    for i, (start, end) in enumerate(pairwise(borders)):
        state, outputs = MemoryState(*(tuple(x[i : i + 1] for x in part) for part in case.state)), []
        sizes = [*((end - start) // B * [1, B - 1]), 1, B - 1]
        parts = [sum(sizes[:n]) + start for n in range(len(sizes) + 1)]
        for (first, last), size in zip(pairwise(parts), sizes, strict=True):
            if first < end:
                tokens = [x[:, first : min(last, end)] for x in case.tokens]
                y, state = neural_memory(*tokens, *state, rule="memora", chunk_size=size, **options)
                outputs.append(y)
        apart.append([torch.cat(outputs, 1), *state.weights, *state.momentum])
    return [torch.cat(parts, 0 if n else 1) for n, parts in enumerate(zip(*apart, strict=True))]


@pytest.mark.parametrize("by_column", [False, True], ids=["", "by_column"])
def test_a_lag_token_is_a_chunk_of_its_own(by_column):
    """Also with momentum, packed documents, one alpha per column, and a write budget over a whole chunk."""
    borders, lag = [0, 8, 15, 16, T], {"rule": find_rule("memora", lag=1), "chunk_size": B}
    case, packed = Case(T, 2), Case(T, 2, documents=4)
    for x in (case, packed):
        x.state = softmaxed(x.state)
        if by_column:
            x.tokens[3] = (x.tokens[3][..., None] * torch.tensor([0.5])).detach().requires_grad_()
    for backend in ("reference", "auto"):
        options = lag | {"backend": backend}
        assert_same(by_turns(case, [0, T]), case.whole(**options), case.leaves)
        documents = packed.whole(cu_seqlens=torch.tensor(borders), **options)
        assert_same(by_turns(packed, borders), documents, packed.leaves)
    lag["write_budget"] = 0.3
    case.check("auto", cuts=([1] * T, [2, 3, 9, T - 14]), **lag)


def orthogonalised(G: Tensor) -> Tensor:  # as published, on G as [outputs, inputs]
    X = G.T / (G.norm() + 1e-7)
    transposed = X.shape[0] > X.shape[1]
    X = X.T if transposed else X
    for a, b, c in NEWTON_SCHULZ:
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return (X.T if transposed else X).T


@pytest.mark.parametrize("muon", [0.0, 1.0])
@pytest.mark.parametrize("activation", ["silu", "swiglu"])
def test_lact(muon, activation):
    """The published SwiGLU memory ``W1 (silu(W0 x) * (W2 x))``, W0 and W2 side by side in a layer, too.

    That has a rate for each of its matrices, as published.
    """
    gated = activation == "swiglu"
    case = Deep(norm=False, activation=activation, thetas=3 if gated else None)

    def f(W: list[Tensor], x: Tensor) -> Tensor:
        return (F.silu(x @ W[0]) * (x @ W[1] if gated else 1)) @ W[-1]

    def layers(W: list[Tensor]) -> list[Tensor]:
        return [torch.cat(W[:-1], -1), W[-1]]

    def head(h, tokens, W, S):
        W, S = ([*w.chunk(1 + gated, -1), out] for w, out in (W, S))
        y = []
        for first in range(0, T, B):
            start, part = W, [x[first : first + B] for x in tokens]
            sums = last = [torch.zeros_like(w) for w in W]
            for q, k, v, _, _, theta in zip(*part, strict=True):
                y.append(f(start, q))
                g = gradient(lambda at, k=k, v=v: -(f(at, k) * v).sum(), start)
                last = [-rate * d for d, rate in zip(g, theta.expand(len(g)), strict=True)]
                sums = [x + d for x, d in zip(sums, last, strict=True)]
            if len(part[0]) < B:
                return y, layers([w + dw for w, dw in zip(W, sums, strict=True)]), layers(last)
            S = [dw + part[4].mean() * s for dw, s in zip(sums, S, strict=True)]
            W = [fixed_rows(w + (orthogonalised(s) if muon else s), w) for w, s in zip(W, S, strict=True)]
        return y, W, S

    leaves = [x for x in case.leaves if x is not case.tokens[3]]  # nothing decays
    options = {"rule": find_rule("lact", muon=muon), "activation": activation}
    assert_published(case, case.by_hand(head), leaves, **options)


def test_newton_schulz_brings_singular_values_near_one():
    G = torch.randn(2, 12, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = torch.linalg.svdvals(newton_schulz(G))
    assert values.min() > 0.7
    assert values.max() < 1.3


def of_windows(case: Deep, c: int, chunk_size: int, moved) -> list[Tensor]:
    """By hand: G of the last c tokens at the chunk's start, over borders of chunks too.

    ``moved(W, S, G, alpha, eta, theta)`` is a layer's weights and momentum after the token.
    """

    def head(h, tokens, W, S):
        y, start, (_, keys, values, *_) = [], W, tokens
        for t, (q, _, _, alpha, eta, theta, *gamma) in enumerate(zip(*tokens, strict=True)):
            if t % chunk_size == 0:
                start = W
            weight = [torch.ones(()).double(), *(gamma[0] if gamma else [])]

            def loss(at, t=t, weight=weight):
                seen = range(max(t - c + 1, 0), t + 1)
                errors = {i: case.output(h, keys[i], f(at, keys[i])) - values[i] for i in seen}
                return sum(weight[t - i] * e.square().sum() for i, e in errors.items())

            layers = zip(W, S, gradient(loss, start), strict=True)
            W, S = zip(*(moved(*layer, alpha, eta, theta) for layer in layers), strict=True)
            y.append(case.output(h, q, f(W, q)))
        return y, W, S

    return case.by_hand(head)


@pytest.mark.parametrize("c", [1, 3, 9])
@pytest.mark.parametrize("chunk_size", [1, B])
def test_omega(c, chunk_size):
    """The last c tokens, with a window wider than a chunk."""
    rule = find_rule("omega", c=c)
    case = Deep(rule=rule)

    def moved(W, S, G, alpha, eta, theta):
        S = eta * S - theta * G
        return (1 - alpha) * W + S, S

    published = of_windows(case, c, chunk_size, moved)
    assert_published(case, published, case.leaves, rule=rule, chunk_size=chunk_size)
    if c == 1:
        paper = case.whole(rule="paper", chunk_size=chunk_size)
        assert_same(paper, case.whole(rule=rule, chunk_size=chunk_size), case.leaves)


@pytest.mark.parametrize("c", [1, 3, 9])
@pytest.mark.parametrize("chunk_size", [1, B])
def test_atlas(c, chunk_size):
    """Muon of the momentum of the last c tokens' gradients; theta is the size of the step alone."""
    rule = find_rule("atlas", c=c)
    case = Deep(rule=rule)
    with torch.no_grad():  # NS5 multiplies the rounding errors of a small singular value by 500
        case.tokens[4].mul_(0.5).add_(0.2)
        case.tokens[5].mul_(0.1)

    def moved(W, S, G, alpha, eta, theta):
        S = eta * S - G
        return (1 - alpha) * W + theta * orthogonalised(S.T).T, S

    options = {"rule": rule, "chunk_size": chunk_size}
    assert_published(case, of_windows(case, c, chunk_size, moved), case.leaves, **options)
    options["base"] = tuple(0.3 * W[0].detach() for W in case.state.weights)
    case.check("auto", cuts=[[3, 1, T - 4]], **options)


@pytest.mark.parametrize("name", ["omega", "atlas"])
def test_a_window_stays_in_its_document(name):
    rule, borders = find_rule(name, c=4), [0, 5, 18, 19, T]
    for backend in ("reference", "auto"):
        case = Case(T, 2, documents=4, rule=rule)
        options = {"chunk_size": 7, "backend": backend, "rule": rule}
        packed = case.whole(cu_seqlens=torch.tensor(borders), **options)
        assert_same(case.apart(borders, **options), packed, case.leaves)


def test_what_a_window_does_not_go_with_is_named():
    case = Case(9, 2, rule=find_rule("omega"))
    with pytest.raises(ValueError, match=r"^backend: autograd does not support this call: it does not write"):
        case.whole(rule="omega", backend="autograd", chunk_size=4)
    with pytest.raises(ValueError, match=r"^write_budget: does not apply to the rule Omega"):
        case.pieces([9], rule="omega", write_budget=1.0, chunk_size=4)
    with pytest.raises(ValueError, match=r"^rule_options.c: 2.5 is not a whole number"):
        find_rule("omega", c=2.5)
