"""Kernels of a memory of any depth and width: one program per document and head, state streamed from L2.

A program processes a document alone, so there are no launches between chunks and no synchronisation between
programs: each stage loads what the previous one stored, with a barrier in between. The float32 state is read
and written once per chunk; products use a copy in the operands' dtype, which the reads use too.

These kernels must not be pipelined across a barrier: a load must not move before the store it depends on.
Layers are numbered from 0; layer l maps widths [D or F, F or V]; L is the depth.
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
def _copy(state, to, SIZE: tl.constexpr, part=0, PARTS: tl.constexpr = 1):
    """Copy a head's state to the copy that products use."""
    for i in range(part * 512, SIZE, PARTS * 512):
        at = i + tl.arange(0, 512)
        tl.store(to + at, tl.load(state + at).to(to.dtype.element_ty))


@triton.jit
def _load_input(
    bottom, hidden, t, row, valid, h, H, D: tl.constexpr, column, LAYER: tl.constexpr, ACT: tl.constexpr
):  # fmt: skip
    """Load a tile of a layer's input: keys (queries), or f of the layer below's pre-activation ``hidden``."""
    if LAYER == 0:
        return load_rows(bottom, t, row, valid, h, H, D, column)
    else:
        z = load_rows(hidden, t, row, valid, h, H, D, column).to(tl.float32)
        return value(z, ACT).to(bottom.dtype.element_ty)


@triton.jit
def _times_state(
    bottom, hidden, state, t, row, valid, h, H, column, b: tl.constexpr, LAYER: tl.constexpr,
    D: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Columns of a layer's input times a matrix [D, F] of the state."""
    BD: tl.constexpr = min(BLOCK, D)
    total = tl.zeros((b, column.shape[0]), tl.float32)
    for i in range(0, D, BD):
        k = i + tl.arange(0, BD)
        x = _load_input(bottom, hidden, t, row, valid, h, H, D, k, LAYER, ACT)
        total += dot(x, tl.load(state + tile_at(k, column, F)), bottom.dtype.element_ty, PRECISION)
    return total


@triton.jit
def _times_transpose(
    x, state, t, row, valid, h, H, column, b: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows x [tokens, H, F] times some rows, ``column``, of a matrix [D, F] of the state, transposed."""
    BF: tl.constexpr = min(BLOCK, F)
    total = tl.zeros((b, column.shape[0]), tl.float32)
    for j in range(0, F, BF):
        f = j + tl.arange(0, BF)
        x_tile = load_rows(x, t, row, valid, h, H, F, f)
        W = tl.load(state + tile_at(column, f, F))
        total += dot(x_tile, tl.trans(W), x.dtype.element_ty, PRECISION)
    return total


@triton.jit
def _in_range(error, to, BOUND: tl.constexpr):
    """Clamp errors before the bound to the range of half precision, where they would become infinite."""
    if BOUND > 0 and to.dtype.element_ty == tl.float16:
        return tl.minimum(tl.maximum(error, -65504.0), 65504.0)
    else:
        return error


@triton.jit
def _bound_errors(
    d, norm, scale, t, row, valid, h, H, F: tl.constexpr, BLOCK: tl.constexpr, BOUND: tl.constexpr, part=0,
    PARTS: tl.constexpr = 1,
):  # fmt: skip
    """Scale a layer's errors, whose squares sum to ``norm`` [b], in place."""
    BF: tl.constexpr = min(BLOCK, F)
    over = divisor(norm, BOUND)
    if part == 0:
        store_tokens(scale, over, t, row, valid, h, H)
    for j in range(part * BF, F, PARTS * BF):
        f = j + tl.arange(0, BF)
        error = load_rows(d, t, row, valid, h, H, F, f).to(tl.float32)
        store_rows(d, error / over[:, None], t, row, valid, h, H, F, f)
    tl.debug_barrier()


@triton.jit
def _keys_up(
    k, v, below, z, d, state, t, row, valid, h, H, b: tl.constexpr, LAYER: tl.constexpr, TOP: tl.constexpr,
    D: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr, BOUND: tl.constexpr, ACT: tl.constexpr,
    PRECISION: tl.constexpr, part=0, PARTS: tl.constexpr = 1,
):  # fmt: skip
    """Compute one layer of the keys' forward pass: z, or for the last layer the error ``d`` before the bound.

    Returns the last layer's sum of squares [b], of these columns.
    """
    BF: tl.constexpr = min(BLOCK, F)
    norm = tl.zeros((b,), tl.float32)
    for j in range(part * BF, F, PARTS * BF):
        f = j + tl.arange(0, BF)
        out = _times_state(
            k, below, state, t, row, valid, h, H, f, b, LAYER, D, F, BLOCK, ACT, PRECISION
        )  # fmt: skip
        if not TOP:
            store_rows(z, out, t, row, valid, h, H, F, f)
        else:
            out = 2 * (out - load_rows(v, t, row, valid, h, H, F, f).to(tl.float32))
            norm += tl.sum(tl.where(valid[:, None], out * out, 0.0), 1)
            store_rows(d, _in_range(out, d, BOUND), t, row, valid, h, H, F, f)
    tl.debug_barrier()
    return norm


@triton.jit
def _errors_down(
    above, z, d, state, t, row, valid, h, H, b: tl.constexpr, F: tl.constexpr, OUT: tl.constexpr,
    BLOCK: tl.constexpr, BOUND: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr, part=0,
    PARTS: tl.constexpr = 1,
):  # fmt: skip
    """Errors ``d`` of a hidden layer from those ``above``, through the [F, OUT] weights between them.

    Before the bound; returns their sum of squares [b], of these columns.
    """
    BF: tl.constexpr = min(BLOCK, F)
    norm = tl.zeros((b,), tl.float32)
    for j in range(part * BF, F, PARTS * BF):
        f = j + tl.arange(0, BF)
        error = _times_transpose(above, state, t, row, valid, h, H, f, b, OUT, BLOCK, PRECISION)
        error *= slope(load_rows(z, t, row, valid, h, H, F, f).to(tl.float32), ACT)
        norm += tl.sum(error * error, 1)
        store_rows(d, _in_range(error, d, BOUND), t, row, valid, h, H, F, f)
    tl.debug_barrier()
    return norm


@triton.jit
def _step(
    k, z, d, state, base, next_copy, more, c, share, a, mix, keep, t, row, valid, h, H,
    LAYER: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr, ACT: tl.constexpr,
    PRECISION: tl.constexpr, part=0, PARTS: tl.constexpr = 1,
):  # fmt: skip
    """Update one layer tile by tile: W' = a W + (1 - a) B + m S - X^T (c d) and S' = h S - X^T (n d)."""
    TYPE: tl.constexpr = k.dtype.element_ty
    BD: tl.constexpr = min(BLOCK, D)
    BF: tl.constexpr = min(BLOCK, F)
    for i in range(part * BD, D, PARTS * BD):
        key = i + tl.arange(0, BD)
        X = tl.trans(_load_input(k, z, t, row, valid, h, H, D, key, LAYER, ACT))
        for j in range(0, F, BF):
            f = j + tl.arange(0, BF)
            at = tile_at(key, f, F)
            error = load_rows(d, t, row, valid, h, H, F, f).to(tl.float32)
            S = tl.load(state + D * F + at)
            W = a * tl.load(state + at) + mix * S
            if base is not None:
                W += (1 - a) * tl.load(base + at)
            W = add_dot(W, X, -c[:, None] * error, TYPE, PRECISION)
            S = add_dot(keep * S, X, -share[:, None] * error, TYPE, PRECISION)
            tl.store(state + at, W)
            tl.store(state + D * F + at, S)
            if more:
                tl.store(next_copy + at, W.to(TYPE))
                tl.store(next_copy + D * F + at, S.to(TYPE))


@triton.jit(do_not_specialize=["tokens"])
def _write(
    k, v, gates, state, base, states, z, dh, dt, scale, documents, length, H, tokens,
    L: tl.constexpr, D: tl.constexpr, F: tl.constexpr, V: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, b: tl.constexpr, BOUND: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    nh = tl.program_id(0)
    n, h = nh // H, nh % H
    first, end, m = document_at(documents, n, length, b)
    row = tl.arange(0, b)
    stride = tl.cast(tokens, tl.int64) * H
    hidden_stride = stride * F
    state += nh.to(tl.int64) * SIZE
    if first < end:
        _copy(state, states + (m * H + h) * SIZE, SIZE)
    tl.debug_barrier()
    for t in range(first, end, b):
        valid = t + row < end
        now = states + (m * H + h) * SIZE
        norm = tl.zeros((b,), tl.float32)
        for l in tl.static_range(L):
            norm = _keys_up(
                k, v, z + (l - 1) * hidden_stride, z + l * hidden_stride, dt,
                now + (0 if l == 0 else 2 * (D * F + (l - 1) * F * F)), t, row, valid, h, H, b, l, l == L - 1,
                D if l == 0 else F, V if l == L - 1 else F, BLOCK, BOUND, ACT, PRECISION,
            )  # fmt: skip
        if BOUND > 0:
            _bound_errors(dt, norm, scale + (L - 1) * stride, t, row, valid, h, H, V, BLOCK, BOUND)
        for l in tl.static_range(L - 2, -1, -1):
            error = dh + l * hidden_stride
            norm = _errors_down(
                dt if l == L - 2 else dh + (l + 1) * hidden_stride, z + l * hidden_stride, error,
                now + 2 * (D * F + l * F * F), t, row, valid, h, H, b, F, V if l == L - 2 else F, BLOCK,
                BOUND, ACT, PRECISION,
            )  # fmt: skip
            if BOUND > 0:
                _bound_errors(error, norm, scale + l * stride, t, row, valid, h, H, F, BLOCK, BOUND)
        c = load_tokens(gates + 3 * stride, t, row, valid, h, H)
        share = load_tokens(gates + 4 * stride, t, row, valid, h, H)
        last = gates + tl.cast(tl.minimum(t + b, end) - 1, tl.int64) * H + h
        a, mix, keep = tl.load(last), tl.load(last + stride), tl.load(last + 2 * stride)
        for l in tl.static_range(L):
            at = 0 if l == 0 else 2 * (D * F + (l - 1) * F * F)
            _step(
                k, z + (l - 1) * hidden_stride, dt if l == L - 1 else dh + l * hidden_stride, state + at,
                base_of(base, h, at, SIZE), now + tl.cast(H, tl.int64) * SIZE + at, t + b < end, c, share, a,
                mix, keep, t, row, valid, h, H, l, D if l == 0 else F, V if l == L - 1 else F, BLOCK, ACT,
                PRECISION,
            )  # fmt: skip
        tl.debug_barrier()
        m += 1


def write(
    shape: Shape, k: Tensor, v: Tensor, gates: Gates, state: Tensor, base: Tensor | None, states: Tensor,
    z: Tensor, dh: Tensor, dt: Tensor, scale: Tensor,
) -> None:  # fmt: skip
    """Write the chunks in sequence, updating ``state`` [N, H, size] in place; saves for the backward."""
    launch(
        _write, (shape.N * shape.H,), k, v, gates.tokens, state, base, states, z, dh, dt, scale,
        *shape.documents, shape.H, shape.tokens, **shape.widths, SIZE=shape.size, BLOCK=shape.narrow_tile,
        b=shape.b, BOUND=shape.bound, ACT=shape.activation, PRECISION=shape.precision, warps=shape.warps,
        stages=1,
    )  # fmt: skip
