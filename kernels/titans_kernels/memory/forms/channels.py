"""The parallel form for alpha per group of columns of a layer: alpha [B, T, H, A].

Eq. 13 with a vector is ``M_t = diag(1 - alpha_t) M_{t-1} + S_t``. The paper's M maps a column vector,
``y = M q``, so diag scales its rows, the outputs of a layer; here ``y = q W``, so it scales the columns of W.
A layer of F columns has A groups of F / A adjacent columns, each with its own alpha. Momentum and step size
remain per head.

Columns are independent within a chunk: a read needs ``x W`` column by column, and the keys' gradients are
taken at the weights at the start of the chunk. So each group g is a chunk with its own scalar gates (see
`gates`),

    u[:, g] = beta_g (x W[:, g]) + m_g (x S[:, g]) - ((x X^T) * C_g) d[:, g],    C_g = A_g E diag(theta),

with the same scores ``x X^T`` for all groups, and likewise for the state after the chunk. This takes A
matrices [b, b] instead of one, so it needs more memory and time than alpha per head; there is no division,
and alpha = 1 is exact. The backward is autograd's; large calls save only the states and recompute the rest.

Shapes: N documents, n active documents, H heads, b tokens per chunk, D/F widths of a layer, A groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from titans_kernels.memory.activations import ACTIVATIONS
from titans_kernels.memory.forms.reference import surprise
from titans_kernels.memory.options import Inputs, Layers, Options, Result, broadcast_gate
from titans_kernels.memory.parts.gates import decay_products
from titans_kernels.memory.parts.layout import Layout, StepRange, layout_of
from titans_kernels.memory.residual import Residual, predict

KEEP_BYTES = 256 * 2**20
"""Coefficients up to this size are saved for the backward pass; larger calls save only states."""


def write_and_read(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    """Write and read every token, as `reference.write_and_read` does."""
    again = torch.is_grad_enabled() and _coefficient_bytes(inputs, options) > KEEP_BYTES
    return _write_and_read(inputs.to_state_dtype(), weights, momentum, options, again)


def gradients(
    inputs: Inputs, weights: Layers, momentum: Layers, options: Options, doutputs: Sequence[Tensor]
) -> list[Tensor]:
    """Return gradients of all inputs, weights, momenta, base and LN from the gradients of y and the final
    state.

    For the custom operator, inside of which autograd does not record.
    """
    depth, based = len(weights), len(options.base)

    def outputs(*given: Tensor) -> tuple[Tensor, ...]:
        W, S, rest = given[6 : 6 + depth], given[6 + depth : 6 + 2 * depth], given[6 + 2 * depth :]
        residual = Residual(*rest[based:]) if options.norm else options.residual
        own = options._replace(residual=residual, base=rest[:based])
        y, W, S = _write_and_read(Inputs.of(*given[:6]), W, S, own, False)
        return y, *W, *S

    _, pullback, *_ = torch.func.vjp(outputs, *inputs[:6], *weights, *momentum, *options.base, *options.norm)
    return list(pullback(tuple(doutputs)))


def _write_and_read(
    inputs: Inputs, weights: Layers, momentum: Layers, options: Options, again: bool
) -> Result:
    """``again``: recompute each step in the backward (activation checkpointing)."""
    layout = layout_of(inputs.q, options.chunk_size, options.cu_seqlens)
    chunks = Inputs(*(layout.split(x) for x in inputs))
    state = [x if layout.order is None else x[layout.order] for x in (*weights, *momentum)]
    outputs = []
    for i, rows in enumerate(layout.rows):
        index = layout.index(StepRange(i, i + 1, slice(None)))
        here = Inputs(*(x[index].flatten(0, len(index) - 2) for x in chunks))
        running = [x[:rows] for x in state]
        arguments = (here, running, _last(layout, i, rows), options)
        y, *after = checkpoint(_step, *arguments, use_reentrant=False) if again else _step(*arguments)
        outputs.append(y)
        state = [
            torch.cat([new, x[rows:]]) if rows < len(x) else new for new, x in zip(after, state, strict=True)
        ]
    y = layout.join(torch.stack(outputs) if layout.order is None else torch.cat(outputs))
    state = state if layout.back is None else [x[layout.back] for x in state]
    return y, tuple(state[: len(weights)]), tuple(state[len(weights) :])


class Chunk(NamedTuple):
    """Coefficients of a chunk per group; `gates.Gates` has them per head."""

    C: Tensor  # [n, H, A, b, b]
    N: Tensor  # [n, H, b, b]
    beta: Tensor  # [n, H, b, A]
    m: Tensor
    h: Tensor  # [n, H, b]

    @staticmethod
    def of(alpha: Tensor, eta: Tensor, theta: Tensor) -> Chunk:
        """From alpha [n, H, b, A], eta and theta [n, H, b]."""
        keep, h = 1 - alpha, eta.cumprod(-1)
        N = decay_products(eta) * theta[..., None, :]
        both: Tensor = _Forgotten.apply(keep.movedim(2, 0), torch.cat([N, h[..., None]], -1).movedim(2, 0))
        C, m = both.movedim(0, 3).split([N.shape[-1], 1], -1)
        return Chunk(C, N, keep.cumprod(-2), m[..., 0].mT, h)


class _Forgotten(torch.autograd.Function):
    """A_g X for every group: ``Z_t = keep_t Z_{t-1} + X_t``.

    keep [b, n, H, A], X [b, n, H, c], Z [b, n, H, A, c].
    """

    @staticmethod
    def forward(keep: Tensor, X: Tensor) -> Tensor:
        Z = X[..., None, :].repeat(1, 1, 1, keep.shape[-1], 1)
        for t in range(1, len(Z)):
            Z[t].addcmul_(keep[t][..., None], Z[t - 1])
        return Z

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    @once_differentiable
    def backward(ctx, dZ):  # pyright: ignore[reportIncompatibleMethodOverride]
        keep, Z = ctx.saved_tensors
        dZ = dZ.clone(memory_format=torch.contiguous_format)
        for t in range(len(Z) - 1, 0, -1):
            dZ[t - 1].addcmul_(keep[t][..., None], dZ[t])
        dkeep = (dZ[1:] * Z[:-1]).sum(-1)
        return torch.cat([torch.zeros_like(keep[:1]), dkeep]), dZ.sum(-2)


def _step(inputs: Inputs, state: list[Tensor], last: Tensor | int, options: Options) -> tuple[Tensor, ...]:
    """y [n, H, b, D] of a chunk of each document, and weights and momenta after its ``last`` token."""
    depth, f = len(state) // 2, ACTIVATIONS[options.activation]
    weights, momentum = state[:depth], state[depth:]
    chunk = Chunk.of(inputs.alpha, inputs.eta, inputs.theta)
    keys, errors = surprise(tuple(weights), inputs.k, inputs.v, options, options.rule.error)
    x, outputs = inputs.q, []
    for l, (W, S, X, d) in enumerate(zip(weights, momentum, keys, errors, strict=True)):
        x = x if l == 0 else f.value(x)
        widen = lambda gate, width=W.shape[-1]: broadcast_gate(gate, width, True)  # noqa: E731
        beta, m = (widen(gate)[..., 0, :] for gate in (chunk.beta, chunk.m))
        z, scores = beta * (x @ W) + m * (x @ S), x @ X.mT
        z = z + (1 - beta) * (x @ options.base[l]) if options.base else z
        x = z - _by_group(scores[:, :, None] * chunk.C, d)
        c, n, h = (_token(part, last) for part in (chunk.C.movedim(2, 4), chunk.N, chunk.h[..., None]))
        a, b = (widen(_token(gate, last)) for gate in (chunk.beta, chunk.m))
        forgotten = a * W + (1 - a) * options.base[l] if options.base else a * W
        outputs.append((
            forgotten + b * S - X.mT @ (widen(c)[..., 0, :] * d),
            h[..., None] * S - X.mT @ (n[..., None] * d),
        ))  # fmt: skip
    after = [x for part in zip(*outputs, strict=True) for x in part]
    return predict(options.residual, inputs.q, x), *after


def _by_group(P: Tensor, d: Tensor) -> Tensor:
    """Multiply P [n, H, A, b, b] of each group with its columns of d [n, H, b, F]."""
    grouped = d.unflatten(-1, (P.shape[2], -1)).movedim(3, 2)
    return (P @ grouped).movedim(2, 3).flatten(3)


def _token(x: Tensor, at: Tensor | int) -> Tensor:
    """x [n, H, b, ...] at token index ``at``, shared or per document."""
    return x[:, :, at] if isinstance(at, int) else x[torch.arange(len(at), device=at.device), :, at]


def _last(layout: Layout, step: int, rows: int) -> Tensor | int:
    """Index of the last valid token in each of a step's chunks."""
    _, last = layout.ends(StepRange(step, step + 1, slice(None)), rows)
    return last


def _coefficient_bytes(inputs: Inputs, options: Options) -> int:
    B, T, H, A = inputs.alpha.shape
    return 4 * B * T * H * A * options.chunk_size * inputs.alpha.element_size()
