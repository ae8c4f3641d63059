"""The computation inside a chunk as matmuls: gradients of the keys, update, reads; their backward.

Shapes: R rows (chunks x heads), b tokens per chunk, D/F input/output width of a layer. A layer's weights and
momentum are stacked along the input: WS [R, 2 D, F]. With a base B, towards which the weights decay, reads
have it as a third part, WS [R, 3 D, F]:

    W_t = beta_t W + m_t S + (1 - beta_t) B - sum_i C[t, i] g_i.

The backward is derived by hand, with second-order terms, and equals autograd's. There, the prefix d denotes
the gradient of the outer loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from titans_kernels.memory.activations import Activation
from titans_kernels.memory.parts.gates import ChunkGates
from titans_kernels.memory.residual import Norm


class StackedState(NamedTuple):
    """Weights, momenta and bases of the layers, as stacks and as views of the stacks."""

    WS: list[Tensor]  # [R, 2 D, F], for reads with a base [R, 3 D, F]
    W: list[Tensor]  # [R, D, F]
    S: list[Tensor]  # [R, D, F]
    B: list[Tensor]  # [R, D, F], or none

    @staticmethod
    def of(stacks: list[Tensor], base: Sequence[Tensor] = ()) -> StackedState:
        """Split ``stacks`` of two parts into views, with a separate base or none."""
        pairs = [x.chunk(2, 1) for x in stacks]
        return StackedState(stacks, [p[0] for p in pairs], [p[1] for p in pairs], list(base))

    @staticmethod
    def for_reads(stacks: list[Tensor], parts: int) -> StackedState:
        """Split ``stacks`` of two parts, or of three with a base, into views."""
        views = [x.chunk(parts, 1) for x in stacks]
        W, S, B = ([v[i] for v in views] if i < parts else [] for i in range(3))
        return StackedState(stacks, W, S, B)

    def first(self, rows: int) -> StackedState:
        """Return views of the first rows of a state with a separate base."""
        if rows == self.WS[0].shape[0]:
            return self
        return StackedState.of([x[:rows] for x in self.WS], [x[:rows] for x in self.B])


class Keys(NamedTuple):
    """Activations and errors of the keys at the chunk's starting weights, per layer l."""

    X: list[Tensor]  # input of layer l [R, b, D]
    z: list[Tensor]  # its output before the non-linearity, l < L - 1 [R, b, F]
    d: list[Tensor]  # gradient of the loss with respect to z, bounded [R, b, F]
    E: list[Tensor]  # d_{l+1} W_{l+1}^T, l < L - 1 [R, b, F]
    scale: list[Tensor]  # divisor of d by the bound [R, b, 1]; empty without a bound
    top: list[Tensor]  # output of the last layer with LN [R, b, F]; else empty

    @staticmethod
    def empty(k: Tensor, W: Sequence[Tensor], bound: float | None, norm: Norm | None = None) -> Keys:
        """Uninitialised tensors for keys k [R, b, D]; `keys_pass` fills them."""
        widths = [x.shape[-1] for x in W]
        empty = lambda sizes: [k.new_empty(*k.shape[:2], n) for n in sizes]  # noqa: E731
        hidden = widths[:-1]
        scale = [] if bound is None else empty([1] * len(widths))
        top = empty(widths[-1:]) if norm else []
        return Keys([k, *empty(hidden)], empty(hidden), empty(widths), empty(hidden), scale, top)


class Reads(NamedTuple):
    """Activations of the queries in the per-token weights, per layer l."""

    x: list[Tensor]  # input of layer l [R, b, D]
    scaled: list[Tensor]  # beta x, m x and with a base (1 - beta) x, concatenated [R, b, 2 D or 3 D]
    scores: list[Tensor]  # x X^T [R, b, b]
    u: list[Tensor]  # output before the non-linearity [R, b, F]; the last layer's only with LN


class Last(NamedTuple):
    """Coefficients at each chunk's last valid token, which give the state after the chunk."""

    c: Tensor  # [R, b, 1]
    n: Tensor  # [R, b, 1]
    a: Tensor  # [R, 1, 1]
    m: Tensor  # [R, 1, 1]
    h: Tensor  # [R, 1, 1]


def edge(x: Tensor) -> float:
    """Return the relative distance from a limit at which x counts as being at it: 32 roundings of its dtype.

    A limit has another gradient on either side. Rounding must not choose between them.
    """
    return 32 * torch.finfo(x.dtype).eps


def keys_pass(
    keys: Keys, v: Tensor, W: Sequence[Tensor], f: Activation, bound: float | None, top_known: bool = False,
    norm: Norm | None = None,
) -> None:  # fmt: skip
    """Forward and backward of the keys through the memory: fills ``keys`` with the factors of the gradients.

    With ``top_known`` the last layer's d, scale and output are already filled in.
    """
    X, z, d, E, scale, last = keys
    top = len(W) - 1
    for l in range(top):
        torch.bmm(X[l], W[l], out=z[l])
        f.value(z[l], out=X[l + 1])
    if not top_known and norm:
        torch.bmm(X[top], W[top], out=last[0])
        d[top].copy_(norm.surprise(last[0], X[0], v))
    elif not top_known:
        torch.baddbmm(v, X[top], W[top], beta=-2, alpha=2, out=d[top])
    for l in range(top - top_known, -1, -1):
        if l < top:
            torch.bmm(d[l + 1], W[l + 1].mT, out=E[l])
            f.through(E[l], z[l], out=d[l])
        if bound is not None:
            torch.linalg.vector_norm(d[l], dim=-1, keepdim=True, out=scale[l])
            scale[l].div_(bound)
            d[l].div_(scale[l].masked_fill_(scale[l] <= 1 + edge(d[l]), 1))


def advance(state: StackedState, keys: Keys, last: Last) -> None:
    """W' = a W + m S + (1 - a) B - (c X)^T d and S' = h S - (n X)^T d, in place."""
    for l, (WS, W, S, X, d) in enumerate(zip(*state[:3], keys.X, keys.d, strict=True)):
        W.mul_(last.a).addcmul_(S, last.m)
        if state.B:
            W.addcmul_(state.B[l], 1 - last.a)
        S.mul_(last.h)
        WS.baddbmm_(concat_scaled(X, last.c, last.n).mT, d, alpha=-1)


def read_pass(
    q: Tensor,
    keys: Keys,
    WS: Sequence[Tensor],
    gates: ChunkGates,
    f: Activation,
    known: list[Tensor] | None = None,
    norm: Norm | None = None,
) -> tuple[Tensor, Reads]:
    """Forward of the queries through the per-token weights: y [R, b, F] and the activations.

    ``known``: the layers' outputs u if they were saved; y is then empty.
    """
    reads, y = Reads([q], [], [], known or []), q.new_empty(0)
    factors = read_factors(gates, WS[0].shape[1] // q.shape[-1])
    for l, state in enumerate(WS):
        x = reads.x[l]
        reads.scaled.append(concat_scaled(x, *factors))
        reads.scores.append(torch.bmm(x, keys.X[l].mT))
        if known is None:
            y = torch.bmm(reads.scaled[l], state)
            y.baddbmm_(gates.C * reads.scores[l], keys.d[l], alpha=-1)
            reads.u.append(y)
        if l < len(WS) - 1:
            reads.x.append(f.value(reads.u[l]))
    if norm is None:
        return y, reads._replace(u=reads.u[: len(WS) - 1])
    return (norm.output(q, y) if known is None else y), reads


def read_factors(gates: ChunkGates, parts: int) -> tuple[Tensor, ...]:
    """Factors of the parts of a stack in a read, [R, b, 1]: beta, m and with a base 1 - beta."""
    beta, m = gates.beta[..., None], gates.m[..., None]
    return (beta, m, 1 - beta) if parts == 3 else (beta, m)


def concat_scaled(x: Tensor, *factors: Tensor) -> Tensor:
    """x times each factor, concatenated: [R, b, factors * D]."""
    D = x.shape[-1]
    both = x.new_empty(*x.shape[:-1], len(factors) * D)
    for i, factor in enumerate(factors):
        torch.mul(x, factor, out=both[..., i * D : (i + 1) * D])
    return both


def cut(parts: Iterable[Sequence[Tensor]], sizes: list[int]) -> list[list[list[Tensor]]]:
    """Split lists of tensors [R, ...] along the rows: for each size a list of lists of views."""
    if len(sizes) == 1:
        return [[list(part) for part in parts]]
    pieces = [[torch.split_with_sizes(x, sizes) for x in part] for part in parts]
    return [[[x[i] for x in part] for part in pieces] for i in range(len(sizes))]


class ReadGrads(NamedTuple):
    """Gradients from the reads, for all chunks of a block at once."""

    q: Tensor
    d: list[Tensor]
    X: list[Tensor]
    z: list[Tensor]  # of each layer's output before the non-linearity
    C: Tensor
    starts: Tensor  # [R, b, 2] of beta and m, with a base [R, b, 3] of 1 - beta too


class ChunkBackward(NamedTuple):
    """Everything the backward of one chunk needs; lists are per layer, and the last three are outputs."""

    WS: list[Tensor]  # the starting state
    W: list[Tensor]
    X: list[Tensor]
    d: list[Tensor]
    scale: list[Tensor]
    held: list[Tensor]  # see `held`
    slope: list[Tensor]  # f'(z)
    second: list[Tensor]  # second derivative times E: f''(z) E
    leaving: list[Tensor]  # c X and n X, concatenated
    scaled: list[Tensor]  # as `Reads` has them
    read_dz: list[Tensor]
    top: list[Tensor]  # the last layer's output and v with LN, else empty
    last: list[Tensor]
    dX: list[Tensor]
    dd: list[Tensor]
    dlast: list[Tensor]  # [R, b, 2] of c and n; [R, 2, 2 or 3] inner products, see `update_backward`


def read_backward(
    dy: Tensor, WS: Sequence[Tensor], keys: Keys, reads: Reads, gates: ChunkGates, f: Activation,
    norm: Norm | None = None,
) -> ReadGrads:  # fmt: skip
    """Backward of `read_pass`, from the last layer to the first; dy [R, b, F] is the gradient of y."""
    depth = len(WS)
    du = norm.output_backward(dy, reads.u[-1]) if norm else dy
    dd, dX, dz = [du] * depth, [du] * depth, [du] * depth
    factors = read_factors(gates, WS[0].shape[1] // reads.x[0].shape[-1])
    dC, dstarts = torch.zeros_like(gates.C), dy.new_zeros(*dy.shape[:2], len(factors))
    minus_C = -gates.C
    dx = du
    for l in range(depth - 1, -1, -1):
        dd[l] = torch.bmm((minus_C * reads.scores[l]).mT, dz[l])
        minus_dP = torch.bmm(dz[l], keys.d[l].mT)
        dC.addcmul_(minus_dP, reads.scores[l], value=-1)
        dscores = minus_dP.mul_(minus_C)
        dX[l] = torch.bmm(dscores.mT, reads.x[l])
        through = torch.bmm(dz[l], WS[l].mT)  # dz W^T, dz S^T and dz B^T, concatenated
        dstarts += _sums(through, reads.x[l])
        dx = torch.bmm(dscores, keys.X[l])
        for part, factor in zip(through.chunk(len(factors), -1), factors, strict=True):
            dx.addcmul_(part, factor)
        if l:
            dz[l - 1] = f.through(dx, reads.u[l - 1])
    if norm:
        dx.add_(dy)
    return ReadGrads(dx, dd, dX, dz, dC, dstarts)


def step_backward(step: ChunkBackward, carry: StackedState, norm: Norm | None = None) -> None:
    """Backward of one chunk: updates ``carry``, the gradient of the state, from its end to its start."""
    update_backward(step, carry)
    keys_backward(step, carry, norm)


def update_backward(step: ChunkBackward, carry: StackedState) -> None:
    """Backward of `advance`, and of the reads with respect to the state."""
    last = Last(*step.last)
    dcn, inner = step.dlast
    for l, (dafter, dW, dS) in enumerate(zip(*carry[:3], strict=True)):
        back = torch.bmm(step.d[l], dafter.mT)  # d dW'^T and d dS'^T, concatenated
        dcn -= _sums(back, step.X[l])
        left, right = back.chunk(2, -1)
        step.dX[l].addcmul_(left, last.c, value=-1).addcmul_(right, last.n, value=-1)
        step.dd[l].baddbmm_(step.leaving[l], dafter, alpha=-1)
        rows, both = dafter.shape[:2]
        # <dW', W>, <dW', S>, <dW', B>; <dS', W>, <dS', S>, <dS', B>
        inner.baddbmm_(dafter.view(rows, 2, -1), step.WS[l].view(rows, inner.shape[-1], -1).mT)
        dS.mul_(last.h).addcmul_(dW, last.m)
        scaled = step.scaled[l]
        if carry.B:
            carry.B[l].addcmul_(dW, 1 - last.a).baddbmm_(scaled[..., both:].mT, step.read_dz[l])
        dW.mul_(last.a)
        dafter.baddbmm_(scaled[..., :both].mT, step.read_dz[l])


def keys_backward(step: ChunkBackward, carry: StackedState, norm: Norm | None) -> None:
    """Backward of `keys_pass`: first through its backward pass (the errors), then through its forward pass.

    Leaves dd of the last layer as -1/2 times the gradient of v.
    """
    depth = len(carry.W)
    dW, dz = [], []
    for l in range(depth - 1):
        _bound_backward(step, l)
        dE = step.dd[l] * step.slope[l]
        dz.append(step.dd[l] * step.second[l])
        step.dd[l + 1].baddbmm_(dE, step.W[l + 1])
        dW.append(torch.bmm(dE.mT, step.d[l + 1]))
    _bound_backward(step, depth - 1)
    dz.append(_error_backward(step, norm) if norm else step.dd[-1] * 2)
    for l in range(depth - 1, -1, -1):
        X = step.X[l].mT
        carry.W[l].add_(dW[l - 1].baddbmm_(X, dz[l]) if l else torch.bmm(X, dz[l]))
        step.dX[l].baddbmm_(dz[l], step.W[l].mT)
        if l:
            dz[l - 1].addcmul_(step.dX[l], step.slope[l - 1])


def _error_backward(step: ChunkBackward, norm: Norm) -> Tensor:
    """Gradient of the last layer's output; the keys' gradient comes through the prediction."""
    z, v = step.top
    dz, dp = norm.surprise_backward(step.dd[-1], z, step.X[0], v)
    step.dX[0].add_(dp)
    torch.mul(dp, 0.5, out=step.dd[-1])
    return dz


def curves(keys: Keys, f: Activation) -> tuple[list[Tensor], list[Tensor]]:
    """f'(z) and f''(z) E of each hidden layer."""
    pairs = [f.slopes(z, value) for z, value in zip(keys.z, keys.X[1:], strict=True)]
    return [p[0] for p in pairs], [p[1].mul_(E) for p, E in zip(pairs, keys.E, strict=True)]


def leaving(keys: Keys, last: Last) -> list[Tensor]:
    """c X and n X of each layer: the contributions of the keys to the state after the chunk."""
    return [concat_scaled(X, last.c, last.n) for X in keys.X]


def held(keys: Keys, bound: float | None) -> list[Tensor]:
    """1 / c^2 where the bound c is active, else 0 [R, b, 1]; times d (d . dd), it is the removed part."""
    return [(scale > 1).to(scale.dtype) / bound**2 for scale in keys.scale] if bound is not None else []


def _bound_backward(step: ChunkBackward, l: int) -> None:
    """Go back through an active bound, d = c u, |u| = 1: only the component orthogonal to u passes."""
    if not step.scale:
        return
    d, dd = step.d[l], step.dd[l]
    along = (d * dd).sum(-1, keepdim=True).mul_(step.held[l])
    dd.addcmul_(d, along, value=-1).div_(step.scale[l])


def _sums(parts: Tensor, x: Tensor) -> Tensor:
    """Row-wise dot products of each of n ``parts`` [R, b, n D] with x [R, b, D]: [R, b, n]."""
    return (parts.view(*x.shape[:-1], -1, x.shape[-1]) * x.unsqueeze(-2)).sum(-1)
