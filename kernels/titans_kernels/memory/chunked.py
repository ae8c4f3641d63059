"""The parallel form: a chunk is a handful of matmuls, chunks follow one another. Any depth, any device.

Forward and backward go block by block. A block is a run of consecutive chunks: their states are found in
sequence, everything else about them is computed at once. Saved for the backward pass are chunk-start
states: all of them while they are few, else the first of each block, the others being found again.

Shapes: N documents, H heads, R = chunks * heads rows of a block, b tokens of a chunk, D/F widths of a
layer's input and output. A layer's weights and momentum are stacked over the input: WS [.., 2 D, F].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titans_kernels.memory.activations import ACTIVATIONS, Activation
from titans_kernels.memory.gates import Gates, coefficients, coefficients_backward
from titans_kernels.memory.layout import Layout

KEEP_ALL_BYTES = 128 * 2**20
"""Chunk-start states up to this size are all kept for the backward pass."""
BLOCK_BYTES = 2 * 2**20
"""States of a block that stay in cache between the phases, when all are kept."""
SPARSE_BLOCK_BYTES = 32 * 2**20
"""States of a block, when only its first is kept."""


def forget_and_learn(
    layout: Layout,
    inputs: list[Tensor],
    weights: tuple[Tensor, ...],
    momentum: tuple[Tensor, ...],
    activation: str,
    surprise_bound: float | None,
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """q, k, v, alpha, eta, theta and states [N, H, D, F] to y [B, T, H, D] and the states after.

    The same function as `reference.forget_and_learn`, for a batch of rows or packed documents.
    """
    if layout.order is not None:
        weights, momentum = (tuple(x[layout.order] for x in part) for part in (weights, momentum))
    chunks = [layout.split(x) for x in inputs]
    y, *states = _Memory.apply(layout, ACTIVATIONS[activation], surprise_bound, *chunks, *weights, *momentum)
    if layout.order is not None:
        back = layout.order.argsort()
        states = [x[back] for x in states]
    depth = len(weights)
    return layout.join(y), tuple(states[:depth]), tuple(states[depth:])


class Block(NamedTuple):
    """A run of ``steps`` chunks of ``rows`` documents each; ``first`` indexes its first chunk of M."""

    first: int
    steps: int
    rows: int


class Keys(NamedTuple):
    """What the keys do at the chunk's starting weights, per layer l."""

    X: list[Tensor]  # input of layer l [R, b, D]
    z: list[Tensor]  # its output before the non-linearity [R, b, F]
    d: list[Tensor]  # gradient of the loss with respect to z, bounded [R, b, F]
    E: list[Tensor]  # d_{l+1} W_{l+1}^T, for l < L - 1 [R, b, F]
    scale: list[Tensor | None]  # what the bound multiplied the gradient by [R, b, 1]


class Last(NamedTuple):
    """Row of the coefficients at each chunk's last valid token: how the state leaves the chunk."""

    c: Tensor  # [R, b, 1]
    n: Tensor  # [R, b, 1]
    a: Tensor  # [R, 1, 1]
    m: Tensor  # [R, 1, 1]
    h: Tensor  # [R, 1, 1]


def keys_pass(k: Tensor, v: Tensor, WS: list[Tensor], f: Activation, bound: float | None) -> Keys:
    """The keys forward through the memory and the error back: every gradient of the chunk, as factors."""
    X, z, depth = [k], [], len(WS)
    for l, weights in enumerate(WS):
        z.append(torch.bmm(X[l], _top(weights)))
        if l < depth - 1:
            X.append(f.value(z[l]))
    d, E, scale = [torch.empty(0)] * depth, [torch.empty(0)] * depth, [None] * depth
    d[-1], scale[-1] = _bound((z[-1] - v).mul_(2), bound)
    for l in range(depth - 2, -1, -1):
        E[l] = torch.bmm(d[l + 1], _top(WS[l + 1]).mT)
        d[l], scale[l] = _bound(f.slope(z[l]).mul_(E[l]), bound)
    return Keys(X, z, d, E, scale)


def next_state(WS: Tensor, X: Tensor, d: Tensor, last: Last, out: Tensor | None = None) -> Tensor:
    """W' = a W + m S - (c X)^T d and S' = h S - (n X)^T d, stacked."""
    D = WS.shape[1] // 2
    after = torch.empty_like(WS) if out is None else out
    torch.mul(WS[:, :D], last.a, out=after[:, :D]).addcmul_(WS[:, D:], last.m)
    torch.mul(WS[:, D:], last.h, out=after[:, D:])
    return after.baddbmm_(_side_by_side(X, last.c, last.n).mT, d, alpha=-1)


def read_pass(
    q: Tensor, keys: Keys, WS: list[Tensor], gates: Gates, f: Activation
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Queries through the per-token weights. Returns y [R, b, F], each layer's input and output."""
    x, u = [q], []
    for l, state in enumerate(WS):
        P = torch.bmm(x[l], keys.X[l].mT).mul_(gates.C)
        u.append(torch.bmm(_side_by_side(x[l], gates.beta[..., None], gates.m[..., None]), state))
        u[l].baddbmm_(P, keys.d[l], alpha=-1)
        if l < len(WS) - 1:
            x.append(f.value(u[l]))
    return u[-1], x, u


class _Memory(torch.autograd.Function):
    """Chunks [M, H, b, ...] and states [N, H, D, F] in the layout's order, to y and the states after."""

    @staticmethod
    def forward(ctx, layout, f, bound, q, k, v, alpha, eta, theta, *state):  # noqa: D102
        heads, depth = q.shape[1], len(state) // 2
        inputs = [x.flatten(0, 1) for x in (q, k, v, alpha, eta, theta)]
        current = [
            torch.cat(pair, -2).flatten(0, 1) for pair in zip(state[:depth], state[depth:], strict=True)
        ]
        step_bytes = sum(WS.nbytes for WS in current)
        keep_all = step_bytes * len(layout.rows) <= KEEP_ALL_BYTES
        blocks = _blocks(layout.rows, step_bytes, BLOCK_BYTES if keep_all else SPARSE_BLOCK_BYTES)
        need_grad = any(ctx.needs_input_grad)
        y, saved = torch.empty_like(v.flatten(0, 1)), []
        for block in blocks:
            part = _Part(block, heads, layout, inputs)
            start = [WS[: block.rows * heads] for WS in current]
            states, keys, after = part.run_states(start, f, bound)
            y[part.slice] = read_pass(part.q, keys, states, part.gates, f)[0]
            if need_grad:
                saved.append(states if keep_all else start)
            current = [_replace_first(whole, new) for whole, new in zip(current, after, strict=True)]
        ctx.save_for_backward(*inputs)
        ctx.saved, ctx.blocks, ctx.keep_all = saved, blocks, keep_all
        ctx.layout, ctx.f, ctx.bound, ctx.heads = layout, f, bound, heads
        final = [x.unflatten(0, (-1, heads)) for x in current]
        halves = [[_top(x, -2) for x in final], [_bottom(x, -2) for x in final]]
        return y.view_as(v), *(x.contiguous() for x in halves[0] + halves[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, *dstate):  # noqa: D102
        device = dy.device.type
        with torch.autocast(device, enabled=False):
            return _backward(ctx, dy, dstate)


def _backward(ctx, dy: Tensor, dstate: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    inputs, heads, depth = ctx.saved_tensors, ctx.heads, len(dstate) // 2
    dy = dy.flatten(0, 1)
    carry = [torch.cat(pair, -2).flatten(0, 1) for pair in zip(dstate[:depth], dstate[depth:], strict=True)]
    grads = [torch.empty_like(x) for x in inputs]
    for block, saved in zip(reversed(ctx.blocks), reversed(ctx.saved), strict=True):
        part = _Part(block, heads, ctx.layout, inputs)
        if ctx.keep_all:
            states, keys = saved, keys_pass(part.k, part.v, saved, ctx.f, ctx.bound)
        else:
            states, keys, _ = part.run_states(saved, ctx.f, ctx.bound)
        after = [d[: block.rows * heads] for d in carry]
        results, before = part.backward(dy[part.slice], states, keys, after, ctx.f, ctx.bound)
        for whole, piece in zip(grads, results, strict=True):
            whole[part.slice] = piece
        carry = [_replace_first(whole, new) for whole, new in zip(carry, before, strict=True)]
    carry = [d.unflatten(0, (-1, heads)) for d in carry]
    dstate = (*(_top(d, -2) for d in carry), *(_bottom(d, -2) for d in carry))
    return None, None, None, *(g.unflatten(0, (-1, heads)) for g in grads), *dstate


class _Part:
    """One block's share of the inputs [R, b, ...], with its gate coefficients."""

    def __init__(self, block: Block, heads: int, layout: Layout, inputs: list[Tensor] | tuple[Tensor, ...]):
        chunks = slice(block.first, block.first + block.steps * block.rows)
        self.slice = slice(chunks.start * heads, chunks.stop * heads)
        self.q, self.k, self.v, self.alpha, self.eta, self.theta = (x[self.slice] for x in inputs)
        self.gates = coefficients(self.alpha, self.eta, self.theta)
        self.steps = [slice(i * block.rows * heads, (i + 1) * block.rows * heads) for i in range(block.steps)]
        self.row = torch.arange(self.q.shape[0], device=self.q.device)
        self.end = layout.last_M[chunks].repeat_interleave(heads)
        self.last = self._last(self.gates)

    def _last(self, gates: Gates) -> Last:
        at = (self.row, self.end)
        rows, scalars = (gates.C[at], gates.N[at]), (gates.beta[at], gates.m[at], gates.h[at])
        return Last(*(x[:, :, None] for x in rows), *(x[:, None, None] for x in scalars))

    def run_states(
        self, start: list[Tensor], f: Activation, bound: float | None
    ) -> tuple[list[Tensor], Keys, list[Tensor]]:
        """Chunk after chunk: the state each chunk starts from [R, 2D, F], its keys, the state after all."""
        states = [x.new_empty(len(self.steps), *x.shape) for x in start]
        found, current = [], start
        for i, step in enumerate(self.steps):
            for whole, x in zip(states, current, strict=True):
                if i == 0:
                    whole[0] = x
            at = [whole[i] for whole in states]
            keys = keys_pass(self.k[step], self.v[step], at, f, bound)
            last = Last(*(x[step] for x in self.last))
            outs = [whole[i + 1] for whole in states] if i + 1 < len(self.steps) else [None] * len(at)
            current = [
                next_state(*args, last, out)
                for *args, out in zip(at, keys.X, keys.d, outs, strict=True)
            ]  # fmt: skip
            found.append(keys)
        return [x.flatten(0, 1) for x in states], _concatenate(found), current

    def backward(
        self, dy: Tensor, states: list[Tensor], keys: Keys, carry: list[Tensor], f: Activation,
        bound: float | None,
    ) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
        """Gradients of q, k, v, alpha, eta, theta of the block and of the state it starts from.

        ``carry`` is the gradient of the state after the block.
        """
        grad = _read_backward(self.q, dy, states, keys, self.gates, f)
        R, b = self.alpha.shape
        dlast = Last(*(x.new_zeros(R, n) for x, n in zip(self.last, (b, b, 1, 1, 1), strict=True)))
        dv = torch.empty_like(self.v)
        for step in reversed(self.steps):
            at = [WS[step] for WS in states]
            here = _Grad(grad.q, *([x[step] for x in part] for part in (grad.d, grad.X, grad.WS)), *grad[4:])
            local = Keys(*([None if x is None else x[step] for x in part] for part in _per_step(keys)))
            _update_backward(at, local, Last(*(x[step] for x in self.last)), carry, here,
                             Last(*(x[step] for x in dlast)))  # fmt: skip
            dv[step] = _keys_backward(at, local, here, f, bound)
            carry = here.WS
        dgates = self._gates_backward(grad, dlast)
        return [grad.q, grad.X[0], dv, *dgates], carry

    def _gates_backward(self, grad: _Grad, dlast: Last) -> tuple[Tensor, Tensor, Tensor]:
        at = (self.row, self.end)
        dN, dh = torch.zeros_like(self.gates.N), torch.zeros_like(self.gates.h)
        grad.C[at] += dlast.c
        grad.beta[at] += dlast.a[:, 0]
        grad.m[at] += dlast.m[:, 0]
        dN[at] = dlast.n
        dh[at] = dlast.h[:, 0]
        return coefficients_backward(
            self.alpha, self.eta, self.theta, self.gates, grad.C, dN, grad.beta, grad.m, dh
        )


class _Grad(NamedTuple):
    """Gradients that build up through the backward pass of a block."""

    q: Tensor
    d: list[Tensor]
    X: list[Tensor]
    WS: list[Tensor]
    C: Tensor
    beta: Tensor
    m: Tensor


def _read_backward(q: Tensor, dy: Tensor, WS: list[Tensor], keys: Keys, gates: Gates, f: Activation) -> _Grad:
    """Backward of the reads, top layer down, for all chunks of a block at once."""
    _, x, u = read_pass(q, keys, WS, gates, f)
    depth = len(WS)
    dd, dX, dWS = [dy] * depth, [dy] * depth, [dy] * depth
    dC, dbeta, dm = (torch.zeros_like(g) for g in (gates.C, gates.beta, gates.m))
    beta, m = gates.beta[..., None], gates.m[..., None]
    dx = dz = dy
    for l in range(depth - 1, -1, -1):
        D = x[l].shape[-1]
        through = torch.bmm(dz, WS[l].mT)  # dz W^T and dz S^T, side by side
        scores = torch.bmm(x[l], keys.X[l].mT)
        dP = torch.bmm(dz, keys.d[l].mT).neg_()
        dd[l] = torch.bmm((gates.C * scores).mT, dz).neg_()
        dC.addcmul_(dP, scores)
        dscores = dP.mul_(gates.C)
        dX[l] = torch.bmm(dscores.mT, x[l])
        dWS[l] = torch.bmm(_side_by_side(x[l], beta, m).mT, dz)
        dbeta += (through[..., :D] * x[l]).sum(-1)
        dm += (through[..., D:] * x[l]).sum(-1)
        dx = torch.bmm(dscores, keys.X[l]).addcmul_(through[..., :D], beta).addcmul_(through[..., D:], m)
        if l:
            dz = dx * f.slope(u[l - 1])
    return _Grad(dx, dd, dX, dWS, dC, dbeta, dm)


def _update_backward(
    WS: list[Tensor], keys: Keys, last: Last, after: list[Tensor], grad: _Grad, dlast: Last
) -> None:
    """Backward of `next_state` for one chunk, adding into ``grad`` and ``dlast`` in place."""
    for l, dafter in enumerate(after):
        D = keys.X[l].shape[-1]
        back = torch.bmm(keys.d[l], dafter.mT)  # d dW'^T and d dS'^T
        for dcoefficient, coefficient, part in (
            (dlast.c, last.c, back[..., :D]),
            (dlast.n, last.n, back[..., D:]),
        ):
            dcoefficient.sub_((keys.X[l] * part).sum(-1))
            grad.X[l].addcmul_(part, coefficient, value=-1)
        grad.d[l].baddbmm_(_side_by_side(keys.X[l], last.c, last.n), dafter, alpha=-1)
        dW, dS, W, S = dafter[:, :D], dafter[:, D:], WS[l][:, :D], WS[l][:, D:]
        for dcoefficient, x, y in ((dlast.a, dW, W), (dlast.m, dW, S), (dlast.h, dS, S)):
            dcoefficient.add_((x * y).sum((-1, -2))[:, None])
        grad.WS[l][:, :D].addcmul_(dW, last.a)
        grad.WS[l][:, D:].addcmul_(dW, last.m).addcmul_(dS, last.h)


def _keys_backward(WS: list[Tensor], keys: Keys, grad: _Grad, f: Activation, bound: float | None) -> Tensor:
    """Backward of `keys_pass` for one chunk, second order included, in place; returns the gradient of v."""
    depth = len(WS)
    dz, slopes = [], []
    for l in range(depth - 1):
        dg = _bound_backward(grad.d[l], keys.d[l], keys.scale[l], bound)
        slope, curvature = f.slopes(keys.z[l])
        dz.append(None if curvature is None else curvature.mul_(dg).mul_(keys.E[l]))
        slopes.append(slope)
        dE = dg * slope
        grad.d[l + 1].baddbmm_(dE, _top(WS[l + 1]))
        _top(grad.WS[l + 1]).baddbmm_(dE.mT, keys.d[l + 1])
    dv = _bound_backward(grad.d[-1], keys.d[-1], keys.scale[-1], bound).mul(-2)
    dz.append(-dv)
    for l in range(depth - 1, -1, -1):
        grad.X[l].baddbmm_(dz[l], _top(WS[l]).mT)
        _top(grad.WS[l]).baddbmm_(keys.X[l].mT, dz[l])
        if l:
            through = grad.X[l] * slopes[l - 1]
            dz[l - 1] = through if dz[l - 1] is None else dz[l - 1].add_(through)
    return dv


def _bound(g: Tensor, bound: float | None) -> tuple[Tensor, Tensor | None]:
    if bound is None:
        return g, None
    # a zero norm gives bound / 0 = inf, clamped to 1
    scale = (bound / torch.linalg.vector_norm(g, dim=-1, keepdim=True)).clamp_(max=1)
    return g.mul_(scale), scale


def _bound_backward(dd: Tensor, d: Tensor, scale: Tensor | None, bound: float | None) -> Tensor:
    """Where the bound held, d = c u with u of norm 1: only what is across u passes."""
    if scale is None or bound is None:
        return dd
    along = (d * dd).sum(-1, keepdim=True) * ((scale < 1) / bound**2)
    return dd.addcmul(d, along, value=-1).mul_(scale)


def _blocks(rows: tuple[int, ...], step_bytes: int, block_bytes: int) -> list[Block]:
    """Runs of steps with the same documents, as long as their states fit ``block_bytes``."""
    most = max(1, block_bytes * rows[0] // (step_bytes * rows[0]))
    blocks, first, step = [], 0, 0
    while step < len(rows):
        n = rows[step]
        steps = next((i for i in range(min(most, len(rows) - step)) if rows[step + i] != n), None)
        steps = steps or min(most, len(rows) - step)
        blocks.append(Block(first, steps, n))
        first, step = first + steps * n, step + steps
    return blocks


def _top(WS: Tensor, dim: int = 1) -> Tensor:
    return WS.narrow(dim, 0, WS.shape[dim] // 2)


def _bottom(WS: Tensor, dim: int = 1) -> Tensor:
    return WS.narrow(dim, WS.shape[dim] // 2, WS.shape[dim] // 2)


def _side_by_side(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return torch.cat([x * left, x * right], -1)


def _replace_first(whole: Tensor, new: Tensor) -> Tensor:
    return new if new.shape[0] == whole.shape[0] else torch.cat([new, whole[new.shape[0] :]])


def _per_step(keys: Keys) -> tuple[list[Tensor | None], ...]:
    """The last layer has no E; an empty tensor must not be cut into steps."""
    return keys.X, keys.z, keys.d, [*keys.E[:-1], None], keys.scale


def _concatenate(found: list[Keys]) -> Keys:
    if len(found) == 1:
        return found[0]
    parts = zip(*map(_per_step, found), strict=True)  # each kind: a list over chunks of lists over layers
    join = lambda tensors: None if tensors[0] is None else torch.cat(tensors)  # noqa: E731
    return Keys(*([join(layer) for layer in zip(*kind, strict=True)] for kind in parts))
