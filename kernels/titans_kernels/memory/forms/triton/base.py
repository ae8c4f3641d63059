"""The gradient of the base that the weights decay to, parallel over groups of chunks.

The base B enters the state after a chunk and the reads of each layer with the share that is forgotten,

    W' = a W + (1 - a) B + ...,    u = beta (x W) + (1 - beta) (x B) + ...

so its gradient is the sum over all chunks and documents of ``(1 - a) dW' + x^T ((1 - beta) du)``.
"""
# Triton's language is not Python's: a constexpr is given as a number, a branch is known when compiling
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from titans_kernels.memory.forms.triton.gates import Gates
from titans_kernels.memory.forms.triton.launch import launch
from titans_kernels.memory.forms.triton.pieces import (
    add_dot,
    chunk_at,
    load_rows,
    load_tokens,
    tile_at,
    value,
)
from titans_kernels.memory.forms.triton.shapes import Layer, Shape

GROUPS = 16
"""Maximum number of partial sums per head."""


@triton.jit
def _backward(
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
    BD, BF = min(layer.D, 64), min(layer.F, 64)
    launch(
        _backward, (dbase.shape[0], shape.H, layer.D // BD * (layer.F // BF)), x, du, dstates, gates.tokens,
        dbase, *shape.chunks, shape.M, shape.H, SIZE=shape.size, AT=layer.at, D=layer.D, F=layer.F, BD=BD,
        BF=BF, b=shape.b, HIDDEN=layer.number > 0, ACTIVATION=shape.activation, PRECISION=shape.precision,
        warps=4, stages=1,
    )  # fmt: skip
