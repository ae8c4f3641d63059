"""Writes of a memory of two layers of widths up to 64, one program per document and head.

A program carries the weights of both layers, ``[D, F]`` and ``[F, V]``, through a document in registers,
float32. Momentum is needed once per chunk, so it stays in the L1 and L2 caches, which frees registers for the
tiles. Layers are numbered from 1: layer 1 takes keys, layer 2 gives values.

The backward is `streamed_backward`: with the gradients of both layers in registers a thread spilled 1,608
bytes on Hopper.
"""
# Triton's language is not Python's: a constexpr is given as a number, a branch is known when compiling
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from titans_kernels.memory.forms.triton.gates import Gates
from titans_kernels.memory.forms.triton.launch import launch
from titans_kernels.memory.forms.triton.pieces import (
    add_dot,
    base_of,
    divisor,
    document_at,
    dot,
    load_rows,
    load_tokens,
    slope,
    store_rows,
    store_tokens,
    tile_at,
    value,
)
from titans_kernels.memory.forms.triton.shapes import Shape


@triton.jit
def _step(W, S, S_copy, X, error, c, share, a, mix, keep, TYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Return W' = a W + m S - X^T (c d); store S' = h S - X^T (n d) at ``S``, and S at ``S_copy``."""
    error = error.to(tl.float32)
    before = tl.load(S)
    tl.store(S_copy, before.to(TYPE))
    W = add_dot(a * W + mix * before, tl.trans(X), -c * error, TYPE, PRECISION)
    tl.store(S, add_dot(keep * before, tl.trans(X), -share * error, TYPE, PRECISION))
    return W


@triton.jit(do_not_specialize=["tokens"])
def _write(
    k, v, state, base, gates, states, z, d1, d2, scale, documents, length, H, tokens,
    D: tl.constexpr, F: tl.constexpr, V: tl.constexpr, b: tl.constexpr, BOUND: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    nh = tl.program_id(0)
    n, h = nh // H, nh % H
    first, end, m = document_at(documents, n, length, b)
    TYPE: tl.constexpr = k.dtype.element_ty
    SIZE: tl.constexpr = 2 * F * (D + V)
    row, key, hidden, column = tl.arange(0, b), tl.arange(0, D), tl.arange(0, F), tl.arange(0, V)
    stride = tl.cast(tokens, tl.int64) * H
    cell1 = tile_at(key, hidden, F)
    cell2 = 2 * D * F + tile_at(hidden, column, V)
    mine = state + nh.to(tl.int64) * SIZE
    B1 = base_of(base, h, 0, SIZE)
    B2 = base_of(base, h, 2 * D * F, SIZE)
    W1 = tl.load(mine + cell1)
    W2 = tl.load(mine + cell2)
    forgotten = 0.0
    for t in range(first, end, b):
        valid = t + row < end
        # the base's share of the step before: here, because at the end of a chunk there are no registers left
        if base is not None:
            W1 += forgotten * tl.load(B1 + cell1)
            W2 += forgotten * tl.load(B2 + tile_at(hidden, column, V))
        to = states + (m * H + h) * SIZE
        tl.store(to + cell1, W1.to(TYPE))
        tl.store(to + cell2, W2.to(TYPE))
        k_tile = load_rows(k, t, row, valid, h, H, D, key)
        z_tile = dot(k_tile, W1, TYPE, PRECISION)
        X = value(z_tile, ACTIVATION).to(TYPE)
        values = load_rows(v, t, row, valid, h, H, V, column).to(tl.float32)
        error2 = tl.where(valid[:, None], 2 * (dot(X, W2, TYPE, PRECISION) - values), 0.0)
        if BOUND > 0:
            over2 = divisor(tl.sum(error2 * error2, 1), BOUND)
            error2 = error2 / over2[:, None]
            store_tokens(scale + stride, over2, t, row, valid, h, H)
        error2 = error2.to(TYPE)
        error1 = dot(error2, tl.trans(W2), TYPE, PRECISION) * slope(z_tile, ACTIVATION)
        if BOUND > 0:
            over1 = divisor(tl.sum(error1 * error1, 1), BOUND)
            error1 = error1 / over1[:, None]
            store_tokens(scale, over1, t, row, valid, h, H)
        error1 = error1.to(TYPE)
        store_rows(z, z_tile, t, row, valid, h, H, F, hidden)
        store_rows(d1, error1, t, row, valid, h, H, F, hidden)
        store_rows(d2, error2, t, row, valid, h, H, V, column)
        c = load_tokens(gates + 3 * stride, t, row, valid, h, H)[:, None]
        share = load_tokens(gates + 4 * stride, t, row, valid, h, H)[:, None]
        last = gates + tl.cast(tl.minimum(t + b, end) - 1, tl.int64) * H + h
        a, mix_out, keep = tl.load(last), tl.load(last + stride), tl.load(last + 2 * stride)
        W1 = _step(
            W1, mine + D * F + cell1, to + D * F + cell1, k_tile, error1, c, share, a, mix_out, keep,
            TYPE, PRECISION,
        )  # fmt: skip
        W2 = _step(
            W2, mine + F * V + cell2, to + F * V + cell2, X, error2, c, share, a, mix_out, keep, TYPE,
            PRECISION,
        )  # fmt: skip
        forgotten = 1 - a
        tl.debug_barrier()
        m += 1
    if base is not None:
        W1 += forgotten * tl.load(B1 + cell1)
        W2 += forgotten * tl.load(B2 + tile_at(hidden, column, V))
    tl.store(mine + cell1, W1)
    tl.store(mine + cell2, W2)


def write(
    shape: Shape, k: Tensor, v: Tensor, state: Tensor, base: Tensor | None, gates: Gates, states: Tensor,
    z: Tensor, d1: Tensor, d2: Tensor, scale: Tensor,
) -> None:  # fmt: skip
    """Write the chunks in sequence, updating ``state`` [N, H, size] in place; saves for the backward.

    The reads are kernels of their own: with the reads in this one, a thread spills 696 bytes on Hopper.
    """
    lower, upper = shape.layers
    launch(
        _write, (shape.N * shape.H,), k, v, state, base, gates.tokens, states, z, d1, d2, scale,
        *shape.documents, shape.H, shape.tokens, D=lower.D, F=lower.F, V=upper.F, b=shape.b,
        BOUND=shape.bound, ACTIVATION=shape.activation, PRECISION=shape.precision, warps=4, stages=1,
    )  # fmt: skip
