"""Hand-derived backward of `passes`, including second-order terms; equal to autograd's.

Shapes as in `passes`. The prefix d denotes the gradient of the outer loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from titans_kernels.memory.activations import Activation
from titans_kernels.memory.parts.gates import Gates
from titans_kernels.memory.parts.passes import Keys, Last, Reads, State, concat_scaled, read_factors
from titans_kernels.memory.residual import Curve, Norm


class ReadGrads(NamedTuple):
    """Gradients from the reads, for all chunks of a block at once."""

    q: Tensor
    d: list[Tensor]
    X: list[Tensor]
    z: list[Tensor]  # of each layer's output before the non-linearity
    C: Tensor
    starts: Tensor  # [R, b, 2] of beta and m, with a base [R, b, 3] of 1 - beta too


class Step(NamedTuple):
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
    dy: Tensor, WS: Sequence[Tensor], keys: Keys, reads: Reads, gates: Gates, f: Activation,
    norm: Norm | Curve | None = None,
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
    if norm and norm.adds_input:
        dx.add_(dy)
    return ReadGrads(dx, dd, dX, dz, dC, dstarts)


def step_backward(step: Step, carry: State, norm: Norm | Curve | None = None) -> None:
    """Backward of one chunk: updates ``carry``, the gradient of the state, from its end to its start."""
    update_backward(step, carry)
    keys_backward(step, carry, norm)


def update_backward(step: Step, carry: State) -> None:
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


def keys_backward(step: Step, carry: State, norm: Norm | Curve | None) -> None:
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


def _error_backward(step: Step, norm: Norm | Curve) -> Tensor:
    """Gradient of the last layer's output; the keys' gradient comes through the prediction."""
    z, v = step.top
    dz, dp = norm.surprise_backward(step.dd[-1], z, step.X[0], v)
    if norm.adds_input:
        step.dX[0].add_(dp)
    torch.mul(dp, 0.5, out=step.dd[-1])
    return dz


def curves(keys: Keys, f: Activation) -> tuple[list[Tensor], list[Tensor]]:
    """f'(z) and f''(z) E of each hidden layer."""
    assert f.slopes is not None  # `op.FORMS` gives gated activations to other forms
    pairs = [f.slopes(z, value) for z, value in zip(keys.z, keys.X[1:], strict=True)]
    return [p[0] for p in pairs], [p[1].mul_(E) for p, E in zip(pairs, keys.E, strict=True)]


def leaving(keys: Keys, last: Last) -> list[Tensor]:
    """c X and n X of each layer: the contributions of the keys to the state after the chunk."""
    return [concat_scaled(X, last.c, last.n) for X in keys.X]


def held(keys: Keys, bound: float | None) -> list[Tensor]:
    """1 / c^2 where the bound c is active, else 0 [R, b, 1]; times d (d . dd), it is the removed part."""
    return [(scale > 1).to(scale.dtype) / bound**2 for scale in keys.scale] if bound is not None else []


def _bound_backward(step: Step, l: int) -> None:
    """If the bound is active, d = c u with u of norm 1: only the component orthogonal to u passes."""
    if not step.scale:
        return
    d, dd = step.d[l], step.dd[l]
    along = (d * dd).sum(-1, keepdim=True).mul_(step.held[l])
    dd.addcmul_(d, along, value=-1).div_(step.scale[l])


def _sums(parts: Tensor, x: Tensor) -> Tensor:
    """Row-wise dot products of each of n ``parts`` [R, b, n D] with x [R, b, D]: [R, b, n]."""
    return (parts.view(*x.shape[:-1], -1, x.shape[-1]) * x.unsqueeze(-2)).sum(-1)
