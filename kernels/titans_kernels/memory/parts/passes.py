"""The computation inside a chunk as matmuls: gradients of the keys, update of the state, reads.

Shapes: R rows (chunks x heads), b tokens per chunk, D/F input/output width of a layer. A layer's weights and
momentum are stacked along the input: WS [R, 2 D, F]. With a base B, towards which the weights decay, reads
have it as a third part, WS [R, 3 D, F]:

    W_t = beta_t W + m_t S + (1 - beta_t) B - sum_i C[t, i] g_i.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from titans_kernels.memory.activations import Activation
from titans_kernels.memory.parts.gates import Gates
from titans_kernels.memory.residual import Curve, Norm


class State(NamedTuple):
    """Weights, momenta and bases of the layers, as stacks and as views of the stacks."""

    WS: list[Tensor]  # [R, 2 D, F], for reads with a base [R, 3 D, F]
    W: list[Tensor]  # [R, D, F]
    S: list[Tensor]  # [R, D, F]
    B: list[Tensor]  # [R, D, F], or none

    @staticmethod
    def of(stacks: list[Tensor], base: Sequence[Tensor] = ()) -> State:
        """Views of ``stacks`` of two parts, with a separate base or none."""
        pairs = [x.chunk(2, 1) for x in stacks]
        return State(stacks, [p[0] for p in pairs], [p[1] for p in pairs], list(base))

    @staticmethod
    def for_reads(stacks: list[Tensor], parts: int) -> State:
        """Views of ``stacks`` of two parts, or of three with a base."""
        views = [x.chunk(parts, 1) for x in stacks]
        W, S, B = ([v[i] for v in views] if i < parts else [] for i in range(3))
        return State(stacks, W, S, B)

    def first(self, rows: int) -> State:
        """Views of the first rows of a state with a separate base."""
        if rows == self.WS[0].shape[0]:
            return self
        return State.of([x[:rows] for x in self.WS], [x[:rows] for x in self.B])


class Keys(NamedTuple):
    """Activations and errors of the keys at the chunk's starting weights, per layer l."""

    X: list[Tensor]  # input of layer l [R, b, D]
    z: list[Tensor]  # its output before the non-linearity, l < L - 1 [R, b, F]
    d: list[Tensor]  # gradient of the loss with respect to z, bounded [R, b, F]
    E: list[Tensor]  # d_{l+1} W_{l+1}^T, l < L - 1 [R, b, F]
    scale: list[Tensor]  # divisor of d by the bound [R, b, 1]; empty without a bound
    top: list[Tensor]  # output of the last layer with LN [R, b, F]; else empty

    @staticmethod
    def empty(k: Tensor, W: Sequence[Tensor], bound: float | None, norm: Norm | Curve | None = None) -> Keys:
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


def keys_pass(
    keys: Keys, v: Tensor, W: Sequence[Tensor], f: Activation, bound: float | None, top_known: bool = False,
    norm: Norm | Curve | None = None,
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
            d[l].div_(scale[l].div_(bound).clamp_(min=1))


def advance(state: State, keys: Keys, last: Last) -> None:
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
    gates: Gates,
    f: Activation,
    known: list[Tensor] | None = None,
    norm: Norm | Curve | None = None,
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


def read_factors(gates: Gates, parts: int) -> tuple[Tensor, ...]:
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
