"""Kernels that are parallel over chunks, since each chunk needs only its starting state; layer by layer.

Reads, queries through the per-token weights, and their backward:

    u = beta (x W) + m (x S) - ((x X^T) * C) d,   with x, X the layer's input for the queries and the keys

or with decay towards a base B, ``beta (x W) + (1 - beta) (x B)`` in place of ``beta (x W)``.

A part of the backward of the writes, from the state before each chunk and the gradient of the state after
it: the gradients of beta, m and h of the chunk's last token, which are inner products, and for the first
layer the gradient of the keys

    dk = dX - c (d dW'^T) - n (d dS'^T) + dz W^T,   with dX from the reads

The gradient of the base, which enters the state after a chunk and the reads with the share that is forgotten:
the sum over all chunks and documents of ``(1 - a) dW' + x^T ((1 - beta) du)``.
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
    chunk_at,
    dot,
    load_rows,
    load_tokens,
    slope,
    store_rows,
    store_tokens,
    tile_at,
    value,
)
from titans_kernels.memory.forms.triton.shapes import Layer, Shape

GROUPS = 16
"""Maximum number of partial sums per head."""


@triton.jit(do_not_specialize=["tokens"])
def _forward(
    x, X, d, states, base, C, gates, out, chunks, length, H, tokens, SIZE: tl.constexpr, AT: tl.constexpr,
    D: tl.constexpr, F: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, b: tl.constexpr,
    HIDDEN: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    m, h, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t, count = chunk_at(chunks, m, length, b)
    if count == 0:
        return
    TYPE: tl.constexpr = d.dtype.element_ty
    row = tl.arange(0, b)
    valid = row < count
    column = part * BF + tl.arange(0, BF)
    stride = tl.cast(tokens, tl.int64) * H
    state = states + (m.to(tl.int64) * H + h) * SIZE + AT
    scores = tl.zeros((b, b), tl.float32)
    from_W = tl.zeros((b, BF), tl.float32)
    from_S = tl.zeros((b, BF), tl.float32)
    from_B = tl.zeros((b, BF), tl.float32)
    B = base_of(base, h, AT, SIZE)
    for i in range(0, D, BD):
        k = i + tl.arange(0, BD)
        x_tile = load_rows(x, t, row, valid, h, H, D, k)
        X_tile = load_rows(X, t, row, valid, h, H, D, k)
        if HIDDEN:
            x_tile = value(x_tile.to(tl.float32), ACTIVATION)
            X_tile = value(X_tile.to(tl.float32), ACTIVATION)
        scores += dot(x_tile, tl.trans(X_tile), TYPE, PRECISION)
        from_W += dot(x_tile, tl.load(state + tile_at(k, column, F)), TYPE, PRECISION)
        from_S += dot(x_tile, tl.load(state + D * F + tile_at(k, column, F)), TYPE, PRECISION)
        if B is not None:
            from_B += dot(x_tile, tl.load(B + tile_at(k, column, F)), TYPE, PRECISION)
    at_C = C + (m.to(tl.int64) * H + h) * b * b + tile_at(row, row, b)
    C_bb = tl.load(at_C)
    beta = load_tokens(gates, t, row, valid, h, H)
    mix = load_tokens(gates + stride, t, row, valid, h, H)
    d_tile = load_rows(d, t, row, valid, h, H, F, column)
    u = beta[:, None] * from_W + mix[:, None] * from_S - dot(C_bb * scores, d_tile, TYPE, PRECISION)
    if B is not None:
        u += (1 - beta[:, None]) * from_B
    store_rows(out, u, t, row, valid, h, H, F, column)


@triton.jit(do_not_specialize=["tokens"])
def _backward(
    dz, x, X, d, states, base, C, gates, dx, dX, dd, dC, dtokens, chunks, length, H, tokens,
    SIZE: tl.constexpr, AT: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BD: tl.constexpr,
    BF: tl.constexpr, b: tl.constexpr, HIDDEN: tl.constexpr, ADD: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    m, h = tl.program_id(0), tl.program_id(1)
    t, count = chunk_at(chunks, m, length, b)
    if count == 0:
        return
    TYPE: tl.constexpr = d.dtype.element_ty
    row = tl.arange(0, b)
    valid = row < count
    stride = tl.cast(tokens, tl.int64) * H
    state = states + (m.to(tl.int64) * H + h) * SIZE + AT
    at_C = (m.to(tl.int64) * H + h) * b * b + tile_at(row, row, b)
    C_bb = tl.load(C + at_C)
    beta = load_tokens(gates, t, row, valid, h, H)
    mix = load_tokens(gates + stride, t, row, valid, h, H)
    scores = tl.zeros((b, b), tl.float32)
    for i in range(0, D, BD):
        k = i + tl.arange(0, BD)
        x_tile = load_rows(x, t, row, valid, h, H, D, k)
        X_tile = load_rows(X, t, row, valid, h, H, D, k)
        if HIDDEN:
            x_tile = value(x_tile.to(tl.float32), ACTIVATION)
            X_tile = value(X_tile.to(tl.float32), ACTIVATION)
        scores += dot(x_tile, tl.trans(X_tile), TYPE, PRECISION)
    inner = tl.zeros((b, b), tl.float32)  # dz d^T
    for j in range(0, F, BF):
        f = j + tl.arange(0, BF)
        dz_tile = load_rows(dz, t, row, valid, h, H, F, f)
        d_tile = load_rows(d, t, row, valid, h, H, F, f)
        inner += dot(dz_tile, tl.trans(d_tile), TYPE, PRECISION)
        dd_tile = -dot(tl.trans(C_bb * scores), dz_tile, TYPE, PRECISION)
        store_rows(dd, dd_tile, t, row, valid, h, H, F, f)
    dC_bb = -inner * scores
    if ADD:
        dC_bb += tl.load(dC + at_C)
    tl.store(dC + at_C, dC_bb)
    dscores = -inner * C_bb
    dbeta = tl.zeros((b,), tl.float32)
    dmix = tl.zeros((b,), tl.float32)
    B = base_of(base, h, AT, SIZE)
    for i in range(0, D, BD):
        k = i + tl.arange(0, BD)
        to_W = tl.zeros((b, BD), tl.float32)
        to_S = tl.zeros((b, BD), tl.float32)
        to_B = tl.zeros((b, BD), tl.float32)
        for j in range(0, F, BF):
            f = j + tl.arange(0, BF)
            dz_tile = load_rows(dz, t, row, valid, h, H, F, f)
            to_W += dot(dz_tile, tl.trans(tl.load(state + tile_at(k, f, F))), TYPE, PRECISION)
            to_S += dot(dz_tile, tl.trans(tl.load(state + D * F + tile_at(k, f, F))), TYPE, PRECISION)
            if B is not None:
                to_B += dot(dz_tile, tl.trans(tl.load(B + tile_at(k, f, F))), TYPE, PRECISION)
        u_tile = load_rows(x, t, row, valid, h, H, D, k).to(tl.float32)
        X_tile = load_rows(X, t, row, valid, h, H, D, k)
        x_tile = u_tile
        if HIDDEN:
            x_tile = value(u_tile, ACTIVATION)
            X_tile = value(X_tile.to(tl.float32), ACTIVATION)
        if B is not None:
            to_W -= to_B
        dbeta += tl.sum(to_W * x_tile, 1)
        dmix += tl.sum(to_S * x_tile, 1)
        dx_tile = beta[:, None] * to_W + mix[:, None] * to_S + dot(dscores, X_tile, TYPE, PRECISION)
        if B is not None:
            dx_tile += to_B
        if HIDDEN:
            dx_tile = dx_tile * slope(u_tile, ACTIVATION)
        store_rows(dx, dx_tile, t, row, valid, h, H, D, k)
        store_rows(dX, dot(tl.trans(dscores), x_tile, TYPE, PRECISION), t, row, valid, h, H, D, k)
    if ADD:
        dbeta += load_tokens(dtokens, t, row, valid, h, H)
        dmix += load_tokens(dtokens + stride, t, row, valid, h, H)
    store_tokens(dtokens, dbeta, t, row, valid, h, H)
    store_tokens(dtokens + stride, dmix, t, row, valid, h, H)


def read_layer(
    shape: Shape, layer: Layer, x: Tensor, X: Tensor, d: Tensor, states: Tensor, base: Tensor | None,
    gates: Gates, out: Tensor,
) -> None:  # fmt: skip
    """Fill ``out`` [tokens, H, F] with u of one layer.

    ``x`` and ``X`` [tokens, H, D]: queries and keys, or in later layers their pre-activations from the layer
    before. ``d`` [tokens, H, F]: the keys' errors. ``states`` [M, H, size]: chunk-start states. ``base`` [H,
    size / 2].
    """
    BD, BF = min(layer.D, shape.read_tile), min(layer.F, shape.read_tile)
    launch(
        _forward, (shape.M, shape.H, layer.F // BF), x, X, d, states, base, gates.C, gates.tokens, out,
        *shape.chunks, shape.H, shape.tokens, SIZE=shape.size, AT=layer.at, D=layer.D, F=layer.F,
        BD=BD, BF=BF, b=shape.b, HIDDEN=layer.number > 0, ACTIVATION=shape.activation,
        PRECISION=shape.precision, warps=shape.warps, stages=2,
    )  # fmt: skip


def read_layer_backward(
    shape: Shape, layer: Layer, dz: Tensor, x: Tensor, X: Tensor, d: Tensor, states: Tensor,
    base: Tensor | None, gates: Gates, dx: Tensor, dX: Tensor, dd: Tensor, dC: Tensor, dtokens: Tensor,
) -> None:  # fmt: skip
    """Backward of a layer: from ``dz`` [tokens, H, F] to ``dx``, ``dX`` and ``dd``.

    ``dx`` [tokens, H, D] is the gradient of x as given, before the activation. ``dC`` [M, H, b, b] and
    ``dtokens`` [2.., tokens, H], of beta and m, are sums over layers: the last layer writes, others add.
    """
    BD, BF = min(layer.D, shape.narrow_tile), min(layer.F, shape.narrow_tile)
    launch(
        _backward, (shape.M, shape.H), dz, x, X, d, states, base, gates.C, gates.tokens, dx, dX, dd, dC,
        dtokens, *shape.chunks, shape.H, shape.tokens, SIZE=shape.size, AT=layer.at, D=layer.D, F=layer.F,
        BD=BD, BF=BF, b=shape.b, HIDDEN=layer.number > 0, ADD=layer.number < shape.depth - 1,
        ACTIVATION=shape.activation, PRECISION=shape.precision, warps=8 if shape.float32 else shape.warps,
        stages=2, registers=255,  # by default ptxas uses 32 on an A100 and spills
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _update_backward(
    states, dstates, base, d, dz, dX, gates, dk, inner, chunks, length, H, tokens,
    SIZE: tl.constexpr, AT: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BD: tl.constexpr,
    BF: tl.constexpr, b: tl.constexpr, KEYS: tl.constexpr, SIGN: tl.constexpr, ADD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    m, h = tl.program_id(0), tl.program_id(1)
    t, count = chunk_at(chunks, m, length, b)
    if count == 0:
        return
    TYPE: tl.constexpr = d.dtype.element_ty
    row = tl.arange(0, b)
    valid = row < count
    stride = tl.cast(tokens, tl.int64) * H
    state = states + (m.to(tl.int64) * H + h) * SIZE + AT
    dstate = dstates + (m.to(tl.int64) * H + h) * SIZE + AT
    B = base_of(base, h, AT, SIZE)
    c = load_tokens(gates + 3 * stride, t, row, valid, h, H)
    share = load_tokens(gates + 4 * stride, t, row, valid, h, H)
    WW = tl.zeros((BD,), tl.float32)
    WS = tl.zeros((BD,), tl.float32)
    SS = tl.zeros((BD,), tl.float32)
    for i in range(0, D, BD):
        k = i + tl.arange(0, BD)
        dk_tile = tl.zeros((b, BD), tl.float32)
        for j in range(0, F, BF):
            f = j + tl.arange(0, BF)
            W = tl.load(state + tile_at(k, f, F))
            S = tl.load(state + D * F + tile_at(k, f, F)).to(tl.float32)
            dW = tl.load(dstate + tile_at(k, f, F))
            dS = tl.load(dstate + D * F + tile_at(k, f, F))
            away = W.to(tl.float32)
            if B is not None:
                away -= tl.load(B + tile_at(k, f, F))
            WW += tl.sum(dW.to(tl.float32) * away, 1)
            WS += tl.sum(dW.to(tl.float32) * S, 1)
            SS += tl.sum(dS.to(tl.float32) * S, 1)
            if KEYS:
                error = load_rows(d, t, row, valid, h, H, F, f)
                dz_tile = load_rows(dz, t, row, valid, h, H, F, f)
                # this product first: as the last it would still run asynchronously while W's next tile loads
                dk_tile += SIGN * dot(dz_tile, tl.trans(W), TYPE, PRECISION)
                dk_tile -= c[:, None] * dot(error, tl.trans(dW), TYPE, PRECISION)
                dk_tile -= share[:, None] * dot(error, tl.trans(dS), TYPE, PRECISION)
        if KEYS:
            dk_tile += load_rows(dX, t, row, valid, h, H, D, k).to(tl.float32)
            store_rows(dk, dk_tile, t, row, valid, h, H, D, k)
    at = inner + (m.to(tl.int64) * H + h) * 3
    sums = (tl.sum(WW, 0), tl.sum(WS, 0), tl.sum(SS, 0))
    # needs no barrier: only one thread stores a scalar, and adds to what it loaded itself
    for i in tl.static_range(3):
        if ADD:
            tl.store(at + i, tl.load(at + i) + sums[i])
        else:
            tl.store(at + i, sums[i])


def update_layer_backward(
    shape: Shape, layer: Layer, states: Tensor, dstates: Tensor, base: Tensor | None, d: Tensor, dz: Tensor,
    sign: int, dX: Tensor, gates: Gates, dk: Tensor, inner: Tensor,
) -> None:  # fmt: skip
    """Add one layer's part to ``inner`` [M, H, 3]; for the first layer also fill ``dk``.

    ``dz`` [tokens, H, F] times ``sign`` is the gradient of the first layer's pre-activation of the keys. The
    last layer is called first and initialises ``inner``.
    """
    tile = shape.narrow_tile if shape.float32 else 64
    launch(
        _update_backward, (shape.M, shape.H), states, dstates, base, d, dz, dX, gates.tokens, dk, inner,
        *shape.chunks, shape.H, shape.tokens, SIZE=shape.size, AT=layer.at, D=layer.D, F=layer.F,
        BD=min(layer.D, tile), BF=min(layer.F, tile), b=shape.b, KEYS=layer.number == 0, SIGN=sign,
        ADD=layer.number < shape.depth - 1, PRECISION=shape.precision, warps=shape.warps, stages=2,
    )  # fmt: skip


@triton.jit
def _base_backward(
    x, du, dstates, gates, dbase, chunks, length, M, H, SIZE: tl.constexpr, AT: tl.constexpr,
    D: tl.constexpr, F: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, b: tl.constexpr,
    HIDDEN: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    group, h, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    TYPE: tl.constexpr = du.dtype.element_ty
    row = tl.arange(0, b)
    key = part // (F // BF) * BD + tl.arange(0, BD)
    column = part % (F // BF) * BF + tl.arange(0, BF)
    total = tl.zeros((BD, BF), tl.float32)
    for m in range(group, M, tl.num_programs(0)):
        t, count = chunk_at(chunks, m, length, b)
        if count > 0:
            valid = row < count
            last = (tl.cast(t, tl.int64) + count - 1) * H + h
            dstate = dstates + (tl.cast(m, tl.int64) * H + h) * SIZE + AT
            total += (1 - tl.load(gates + last)) * tl.load(dstate + tile_at(key, column, F)).to(tl.float32)
            x_tile = load_rows(x, t, row, valid, h, H, D, key)
            if HIDDEN:
                x_tile = value(x_tile.to(tl.float32), ACTIVATION)
            forgotten = 1 - load_tokens(gates, t, row, valid, h, H)
            du_tile = load_rows(du, t, row, valid, h, H, F, column).to(tl.float32)
            total = add_dot(total, tl.trans(x_tile), forgotten[:, None] * du_tile, TYPE, PRECISION)
    to = dbase + (group.to(tl.int64) * H + h) * (SIZE // 2) + AT // 2
    tl.store(to + tile_at(key, column, F), total)


def partial_sums(shape: Shape, like: Tensor) -> Tensor:
    """Uninitialised float32 partial sums [G, H, size / 2] of the base's gradient."""
    return like.new_empty(min(shape.M, GROUPS), shape.H, shape.size // 2)


def base_layer_backward(
    shape: Shape, layer: Layer, x: Tensor, du: Tensor, dstates: Tensor, gates: Gates, dbase: Tensor
) -> None:
    """Fill one layer of ``dbase`` [G, H, size / 2] with partial sums.

    ``x`` [tokens, H, D]: queries, or in later layers their pre-activations; ``du`` [tokens, H, F]: the
    gradient of the reads. ``dstates`` [M, H, size]: the gradient of the state after each chunk.
    """
    BD, BF = min(layer.D, shape.read_tile), min(layer.F, shape.read_tile)
    launch(
        _base_backward, (dbase.shape[0], shape.H, layer.D // BD * (layer.F // BF)), x, du, dstates,
        gates.tokens, dbase, *shape.chunks, shape.M, shape.H, SIZE=shape.size, AT=layer.at, D=layer.D,
        F=layer.F, BD=BD, BF=BF, b=shape.b, HIDDEN=layer.number > 0, ACTIVATION=shape.activation,
        PRECISION=shape.precision, warps=4, stages=1,
    )  # fmt: skip
