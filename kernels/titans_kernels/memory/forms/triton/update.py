"""Kernel of the part of the write backward that is parallel over chunks.

From the state before each chunk and the gradient of the state after it: the gradients of beta, m and h of the
chunk's last token, which are inner products, and for the first layer the gradient of the keys

    dk = dX - c (d dW'^T) - n (d dS'^T) + dz W^T,   with dX from the reads
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
    chunk_at,
    dot,
    load_rows,
    load_tokens,
    store_rows,
    tile_at,
)
from titans_kernels.memory.forms.triton.shapes import Layer, Shape


@triton.jit
def _update_backward(
    states, dstates, d, dz, dX, gates, dk, inner, chunks, length, H, tokens,
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
            WW += tl.sum(dW.to(tl.float32) * W.to(tl.float32), 1)
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
    for i in tl.static_range(3):
        if ADD:
            tl.store(at + i, tl.load(at + i) + sums[i])
        else:
            tl.store(at + i, sums[i])


def update_layer_backward(
    shape: Shape, layer: Layer, states: Tensor, dstates: Tensor, d: Tensor, dz: Tensor, sign: int, dX: Tensor,
    gates: Gates, dk: Tensor, inner: Tensor,
) -> None:  # fmt: skip
    """Add one layer's part to ``inner`` [M, H, 3]; for the first layer also fill ``dk``.

    ``dz`` [tokens, H, F] times ``sign`` is the gradient of the first layer's pre-activation of the keys. The
    last layer is called first and initialises ``inner``.
    """
    launch(
        _update_backward, (shape.M, shape.H), states, dstates, d, dz, dX, gates.tokens, dk, inner,
        *shape.chunks, shape.H, shape.tokens, SIZE=shape.size, AT=layer.at, D=layer.D, F=layer.F,
        BD=min(layer.D, 64), BF=min(layer.F, 64), b=shape.b, KEYS=layer.number == 0, SIGN=sign,
        ADD=layer.number < shape.depth - 1, PRECISION=shape.precision, warps=shape.warps, stages=2,
    )  # fmt: skip
