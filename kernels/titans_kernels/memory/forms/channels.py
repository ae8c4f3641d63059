"""The parallel form for gates per group of columns of a layer: alpha, eta or theta [B, T, H, A].

Eqs. 32 and 33 are ``M_t = diag(1 - alpha_t) M_{t-1} + S_t`` and ``S_t = diag(eta_t) S_{t-1} - diag(theta_t)
u_t``, with u_t the gradient. The paper's M maps a column vector, ``y = M q``, so diag scales its rows, the
outputs of a layer; here ``y = q W``, so it scales the columns of W, in every layer of a deep memory. A layer
of F columns has A groups of F / A adjacent columns, each with gates of its own.

Columns are independent within a chunk: a read needs ``x W`` column by column, and the keys' gradients are
taken at the weights at the start of the chunk. So each group g is a chunk with its own scalar gates (see
`gates`),

    u[:, g] = beta_g (x W[:, g]) + m_g (x S[:, g]) - ((x X^T) * C_g) theta_g d[:, g],    C_g = A_g E_g,

with the same scores ``x X^T`` for all groups, and likewise for the state after the chunk. This takes A
matrices [b, b] instead of one (none more for theta alone), so it needs more memory and time than gates per
head; there is no division, and alpha = 1 and eta = 0 are exact. The backward is autograd's; large calls save
only the states and recompute the rest.

Shapes: N documents, n active documents, H heads, b tokens per chunk, D/F widths of a layer, A groups; a gate
per head is one group, and G is A or 1.
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
    """Return gradients of inputs, weights, momenta, base and LN from the gradients of y and the final state.

    For the custom operator, inside of which autograd does not record.
    """
    depth, based = len(weights), len(options.base)

    def outputs(*leaves: Tensor) -> tuple[Tensor, ...]:
        W, S, rest = leaves[6 : 6 + depth], leaves[6 + depth : 6 + 2 * depth], leaves[6 + 2 * depth :]
        residual = Residual(*rest[based:]) if options.norm else options.residual
        own = options._replace(residual=residual, base=rest[:based])
        y, W, S = _write_and_read(Inputs.of(*leaves[:6]), W, S, own, False)
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
        chunk = Inputs(*(x[index].flatten(0, len(index) - 2) for x in chunks))
        running = [x[:rows] for x in state]
        arguments = (chunk, running, _last(layout, i, rows), options)
        y, *after = checkpoint(_step, *arguments, use_reentrant=False) if again else _step(*arguments)
        outputs.append(y)
        state = [
            torch.cat([new, x[rows:]]) if rows < len(x) else new for new, x in zip(after, state, strict=True)
        ]
    y = layout.join(torch.stack(outputs) if layout.order is None else torch.cat(outputs))
    state = state if layout.back is None else [x[layout.back] for x in state]
    return y, tuple(state[: len(weights)]), tuple(state[len(weights) :])


class Chunk(NamedTuple):
    """Coefficients of a chunk per group, but for theta; `ChunkGates` has them per head."""

    C: Tensor  # [b, n, H, b, A]: of gradient i in the weights after token t at [t, ..., i, :]
    beta: Tensor  # [b, n, H, A]
    m: Tensor
    end: tuple[Tensor, ...]  # of the last token: C and N [n, H, b, A], beta, m and h [n, H, A]

    @staticmethod
    def of(alpha: Tensor, eta: Tensor, last: Tensor | int) -> Chunk:
        """Compute the coefficients from alpha and eta [n, H, b, G].

        ``last`` is the index of the last token, shared or per document.
        """
        keep, eta = torch.broadcast_tensors(*(gate.movedim(2, 0) for gate in (1 - alpha, eta)))
        C, _, m, h, c, n = _Scan.apply(keep, eta, last)
        beta = keep.cumprod(0)
        return Chunk(C, beta, m, (c, n, *(_token(x, last) for x in (beta, m, h))))


class _Scan(torch.autograd.Function):
    """``N_t = eta_t N_{t-1}``, plus one at i = t, and ``C_t = keep_t C_{t-1} + N_t``: E_g, and A_g E_g.

    From gates [b, n, H, A], C and N [b, n, H, b, A]; m and h [b, n, H, A], which start as S does; C and N of
    the last token.
    """

    @staticmethod
    def forward(keep: Tensor, eta: Tensor, last: Tensor | int) -> tuple[Tensor, ...]:
        b, keeps, etas = len(keep), keep[..., None, :], eta[..., None, :]
        N, C = (keep.new_zeros(*keep.shape[:3], b, keep.shape[3]) for _ in range(2))
        h, m = eta.cumprod(0), torch.empty_like(eta, memory_format=torch.contiguous_format)
        for t in range(b):
            if t:
                torch.mul(N[t - 1], etas[t], out=N[t])
            N[t, ..., t, :] = 1
            torch.addcmul(N[t], keeps[t], C[max(t - 1, 0)], out=C[t])
            m[t] = h[t] + (keep[t] * m[t - 1] if t else 0)
        return C, N, m, h, _token(C, last), _token(N, last)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        *gates, ctx.last = inputs
        ctx.save_for_backward(*gates, *output[:4])
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx, dC, dN, dm, dh, dc, dn):  # pyright: ignore[reportIncompatibleMethodOverride]
        keep, eta, C, N, m, h = ctx.saved_tensors
        fresh = lambda dx, x: torch.zeros_like(x) if dx is None else dx.clone()  # noqa: E731
        dC, dN, dm, dh = map(fresh, (dC, dN, dm, dh), (C, N, m, h))
        for dx, at_end in ((dC, dc), (dN, dn)):
            if at_end is not None:
                dx[_index(dx, ctx.last)] += at_end
        keeps, etas = keep[..., None, :], eta[..., None, :]
        for t in range(len(N) - 1, -1, -1):
            dN[t] += dC[t]
            dh[t] += dm[t]
            if t:
                dC[t - 1].addcmul_(keeps[t], dC[t])
                dN[t - 1].addcmul_(etas[t], dN[t])
                dm[t - 1].addcmul_(keep[t], dm[t])
                dh[t - 1].addcmul_(eta[t], dh[t])
        dkeep, deta = (torch.zeros_like(gate, memory_format=torch.contiguous_format) for gate in (keep, eta))
        dkeep[1:] = (dC[1:] * C[:-1]).sum(-2) + dm[1:] * m[:-1]
        deta[1:] = (dN[1:] * N[:-1]).sum(-2) + dh[1:] * h[:-1]
        deta[0] = dh[0]
        return dkeep, deta, None


def _step(inputs: Inputs, state: list[Tensor], last: Tensor | int, options: Options) -> tuple[Tensor, ...]:
    """y [n, H, b, D] of a chunk of each document, and weights and momenta after its ``last`` token."""
    depth, f = len(state) // 2, ACTIVATIONS[options.activation]
    weights, momentum = state[:depth], state[depth:]
    alpha, eta, theta = (x if x.ndim == inputs.q.ndim else x[..., None] for x in inputs[3:6])
    chunk = Chunk.of(alpha, eta, last)
    keys, errors = surprise(tuple(weights), inputs.k, inputs.v, options, options.rule.error)
    x, outputs = inputs.q, []
    for l, (W, S, X, d) in enumerate(zip(weights, momentum, keys, errors, strict=True)):
        x = x if l == 0 else f.value(x)
        widen = lambda gate, width=W.shape[-1]: broadcast_gate(gate, width, True)[..., 0, :]  # noqa: E731
        beta, m = (widen(gate).movedim(0, 2) for gate in (chunk.beta, chunk.m))
        d = widen(theta) * d
        z, scores = beta * (x @ W) + m * (x @ S), x @ X.mT
        z = z + (1 - beta) * (x @ options.base[l]) if options.base else z
        x = z - _mixed(scores, chunk.C, d)
        c, n, a, b, h = map(widen, chunk.end)
        a, b, h = (gate[..., None, :] for gate in (a, b, h))
        forgotten = a * W + (1 - a) * options.base[l] if options.base else a * W
        outputs.append((forgotten + b * S - X.mT @ (c * d), h * S - X.mT @ (n * d)))
    after = [x for part in zip(*outputs, strict=True) for x in part]
    return predict(options.residual, inputs.q, x), *after


def _mixed(scores: Tensor, C: Tensor, d: Tensor) -> Tensor:
    """Return ``(scores * C_g) d`` [n, H, b, F], each group with its own C [b, n, H, b, A]."""
    groups = C.shape[-1]
    if groups == 1:
        return (scores * C[..., 0].movedim(0, 2)) @ d
    own = (C[..., None] * d.unflatten(-1, (groups, -1))).flatten(-2)
    return (scores.movedim(2, 0)[..., None, :] @ own)[..., 0, :].movedim(0, 2)


def _token(x: Tensor, at: Tensor | int) -> Tensor:
    """x [b, n, ...] at token index ``at``, shared or per document."""
    return x[_index(x, at)]


def _index(x: Tensor, at: Tensor | int) -> tuple:
    return (at,) if isinstance(at, int) else (at, torch.arange(len(at), device=x.device))


def _last(layout: Layout, step: int, rows: int) -> Tensor | int:
    """Index of the last valid token in each of a step's chunks."""
    _, last = layout.ends(StepRange(step, step + 1, slice(None)), rows)
    return last


def _coefficient_bytes(inputs: Inputs, options: Options) -> int:
    per_token = max(gate[0, 0].numel() for gate in inputs[3:6])
    return 4 * inputs.q.shape[:2].numel() * per_token * options.chunk_size * inputs.q.element_size()
