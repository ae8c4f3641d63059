"""Kernels of the linear memory: chunks in sequence, the columns of the state split over programs.

A program carries ``[D, BV]`` of weights and momentum through a document in float32. With a surprise bound one
program has all columns, since the norm of an error is over all of them.
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
    divisor,
    document_at,
    dot,
    load_rows,
    load_tokens,
    store_rows,
    store_tokens,
    through_bound,
    tile_at,
)
from titans_kernels.memory.forms.triton.shapes import Shape


@triton.jit(do_not_specialize=["tokens"])
def _write(
    q, k, v, start, C, gates, states, d, scale, y, after, documents, length, H, tokens,
    D: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, b: tl.constexpr, BOUND: tl.constexpr,
    READ: tl.constexpr, KEEP: tl.constexpr, SHARED: tl.constexpr, FINAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    nh, part = tl.program_id(0), tl.program_id(1)
    n, h = nh // H, nh % H
    first, end, m = document_at(documents, n, length, b)
    TYPE: tl.constexpr = k.dtype.element_ty
    row, key = tl.arange(0, b), tl.arange(0, D)
    column = part * BV + tl.arange(0, BV)
    stride = tl.cast(tokens, tl.int64) * H
    cell = tile_at(key, column, V)
    mine = (h if SHARED else nh).to(tl.int64) * 2 * D * V
    W = tl.load(start + mine + cell)
    S = tl.load(start + mine + D * V + cell)
    for t in range(first, end, b):
        valid = t + row < end
        if KEEP:
            to = states + (m * H + h) * 2 * D * V + cell
            tl.store(to, W.to(TYPE))
            tl.store(to + D * V, S.to(TYPE))
        k_tile = load_rows(k, t, row, valid, h, H, D, key)
        z = dot(k_tile, W, TYPE, PRECISION)
        error = 2 * (z - load_rows(v, t, row, valid, h, H, V, column).to(tl.float32))
        error = tl.where(valid[:, None], error, 0.0)
        if BOUND > 0:
            over = divisor(tl.sum(error * error, 1), BOUND)
            error = error / over[:, None]
            if KEEP:
                store_tokens(scale, over, t, row, valid, h, H)
        if KEEP:
            store_rows(d, error, t, row, valid, h, H, V, column)
        if READ:
            q_tile = load_rows(q, t, row, valid, h, H, D, key)
            beta = load_tokens(gates, t, row, valid, h, H)
            mix = load_tokens(gates + stride, t, row, valid, h, H)
            at_C = C + (m * H + h) * b * b + tile_at(row, row, b)
            C_bb = tl.load(at_C)
            scores = dot(q_tile, tl.trans(k_tile), TYPE, PRECISION)
            out = beta[:, None] * dot(q_tile, W, TYPE, PRECISION)
            out += mix[:, None] * dot(q_tile, S, TYPE, PRECISION)
            out -= dot(C_bb * scores, error, TYPE, PRECISION)
            store_rows(y, out, t, row, valid, h, H, V, column)
        c = load_tokens(gates + 3 * stride, t, row, valid, h, H)
        share = load_tokens(gates + 4 * stride, t, row, valid, h, H)
        last = gates + tl.cast(tl.minimum(t + b, end) - 1, tl.int64) * H + h
        # scale errors instead of keys, so that the loaded keys are an operand as they are
        W = tl.load(last) * W + tl.load(last + stride) * S
        W = add_dot(W, tl.trans(k_tile), -c[:, None] * error, TYPE, PRECISION)
        S = tl.load(last + 2 * stride) * S
        S = add_dot(S, tl.trans(k_tile), -share[:, None] * error, TYPE, PRECISION)
        m += 1
    if FINAL:
        mine = nh.to(tl.int64) * 2 * D * V
        tl.store(after + mine + cell, W)
        tl.store(after + mine + D * V + cell, S)


@triton.jit(do_not_specialize=["tokens"])
def _backward(
    q, k, dy, gates, d, scale, dd_reads, dafter, dstates, dv, dtokens, dstart, documents, length, H, tokens,
    D: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, b: tl.constexpr, BOUND: tl.constexpr,
    FINAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    nh, part = tl.program_id(0), tl.program_id(1)
    n, h = nh // H, nh % H
    first, end, m = document_at(documents, n, length, b)
    count = (end - first + b - 1) // b
    m += count
    TYPE: tl.constexpr = k.dtype.element_ty
    row, key = tl.arange(0, b), tl.arange(0, D)
    column = part * BV + tl.arange(0, BV)
    stride = tl.cast(tokens, tl.int64) * H
    cell = tile_at(key, column, V)
    mine = nh.to(tl.int64) * 2 * D * V
    dW = tl.zeros((D, BV), tl.float32)
    dS = tl.zeros((D, BV), tl.float32)
    if FINAL:
        dW = tl.load(dafter + mine + cell)
        dS = tl.load(dafter + mine + D * V + cell)
    for i in range(count):
        m -= 1
        t = first + (count - 1 - i) * b
        valid = t + row < end
        to = dstates + (m * H + h) * 2 * D * V + cell
        tl.store(to, dW.to(TYPE))
        tl.store(to + D * V, dS.to(TYPE))
        k_tile = load_rows(k, t, row, valid, h, H, D, key)
        error = load_rows(d, t, row, valid, h, H, V, column).to(tl.float32)
        to_W = dot(k_tile, dW, TYPE, PRECISION)
        to_S = dot(k_tile, dS, TYPE, PRECISION)
        mine_c = dtokens + (2 + 2 * part) * stride
        store_tokens(mine_c, -tl.sum(to_W * error, 1), t, row, valid, h, H)
        store_tokens(mine_c + stride, -tl.sum(to_S * error, 1), t, row, valid, h, H)
        c = load_tokens(gates + 3 * stride, t, row, valid, h, H)
        share = load_tokens(gates + 4 * stride, t, row, valid, h, H)
        dd = load_rows(dd_reads, t, row, valid, h, H, V, column).to(tl.float32)
        dd -= c[:, None] * to_W + share[:, None] * to_S
        if BOUND > 0:
            over = tl.where(valid, load_tokens(scale, t, row, valid, h, H), 1.0)
            dd = through_bound(dd, error, tl.sum(dd * error, 1), over, BOUND)
        store_rows(dv, -2 * dd, t, row, valid, h, H, V, column)
        dy_tile = load_rows(dy, t, row, valid, h, H, V, column).to(tl.float32)
        queries = tl.trans(load_rows(q, t, row, valid, h, H, D, key))
        beta = load_tokens(gates, t, row, valid, h, H)
        mix = load_tokens(gates + stride, t, row, valid, h, H)
        last = gates + tl.cast(tl.minimum(t + b, end) - 1, tl.int64) * H + h
        dS = tl.load(last + 2 * stride) * dS + tl.load(last + stride) * dW
        dS = add_dot(dS, queries, mix[:, None] * dy_tile, TYPE, PRECISION)
        dW = add_dot(tl.load(last) * dW, queries, beta[:, None] * dy_tile, TYPE, PRECISION)
        dW = add_dot(dW, tl.trans(k_tile), 2 * dd, TYPE, PRECISION)
    tl.store(dstart + mine + cell, dW)
    tl.store(dstart + mine + D * V + cell, dS)


def columns_per_program(shape: Shape) -> int:
    """BV: all columns with a bound, else the largest that still gives every multiprocessor a program."""
    V = shape.layers[0].F
    if shape.bound:
        return V
    for BV in (64, 32):
        if (
            V >= BV
            and shape.layers[0].D * BV <= 4096
            and shape.card.processors <= shape.N * shape.H * (V // BV)
        ):
            return BV
    return min(V, 16 if shape.b <= 64 else 32)


def _warps(shape: Shape, BV: int) -> int:
    """Weights and momentum take at most 64 registers a thread."""
    return 8 if shape.b == 128 or shape.layers[0].D * BV > 4096 else 4


def write(
    shape: Shape, BV: int, q: Tensor, k: Tensor, v: Tensor, start: Tensor, gates: Gates,
    states: Tensor, d: Tensor, scale: Tensor, y: Tensor, after: Tensor, *, read: bool, keep: bool,
) -> None:  # fmt: skip
    """Write the chunks in sequence; ``read`` fills y, ``keep`` what the backward needs.

    ``start`` is [N, H, size], or [1, H, size] if shared; ``after`` [N, H, size] is filled unless it is empty.
    ``BV`` is the number of columns per program.
    """
    layer = shape.layers[0]
    launch(
        _write, (shape.N * shape.H, layer.F // BV), q, k, v, start, gates.C, gates.tokens, states, d, scale,
        y, after, *shape.documents, shape.H, shape.tokens, D=layer.D, V=layer.F, BV=BV, b=shape.b,
        BOUND=shape.bound, READ=read, KEEP=keep, SHARED=shape.shared, FINAL=after.numel() > 0,
        PRECISION=shape.precision, warps=_warps(shape, BV), stages=2,
    )  # fmt: skip


def backward(
    shape: Shape, BV: int, q: Tensor, k: Tensor, dy: Tensor, gates: Gates, d: Tensor, scale: Tensor,
    dd: Tensor, dafter: Tensor, dstates: Tensor, dv: Tensor, dtokens: Tensor, dstart: Tensor,
) -> None:  # fmt: skip
    """Backward of `write`, from the last chunk to the first; an empty ``dafter`` means zeros.

    Fills ``dv``, ``dstart``, ``dstates`` (the gradient of the state after each chunk) and the gradients of c
    and n in ``dtokens``, one partial sum per program.
    """
    layer = shape.layers[0]
    launch(
        _backward, (shape.N * shape.H, layer.F // BV), q, k, dy, gates.tokens, d, scale, dd, dafter, dstates,
        dv, dtokens, dstart, *shape.documents, shape.H, shape.tokens, D=layer.D, V=layer.F, BV=BV,
        b=shape.b, BOUND=shape.bound, FINAL=dafter.numel() > 0, PRECISION=shape.precision,
        warps=_warps(shape, BV), stages=2,
    )  # fmt: skip
