"""Kernels of a memory too wide for one program: chunk by chunk, each stage a launch over tiles of the state.

`streamed` and `streamed_backward` run the same stages with one program per document. Here a program has one
tile of a document's chunk, and sums over all tiles (the norm of an error) go through partial sums in memory.
The stages are launched as often as the longest document has chunks; a document without a chunk of this number
has nothing to do.

Layers are numbered from 0; a program has tile ``part`` of PARTS.
"""
# Triton's language is not Python's: a constexpr is given as a number, a branch is known when compiling
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from titans_kernels.memory.forms.triton.gates import Gates
from titans_kernels.memory.forms.triton.launch import launch
from titans_kernels.memory.forms.triton.pieces import base_of, document_at, load_tokens, store_tokens
from titans_kernels.memory.forms.triton.shapes import Layer, Shape
from titans_kernels.memory.forms.triton.streamed import _bound_errors, _copy, _errors_down, _keys_up, _step
from titans_kernels.memory.forms.triton.streamed_backward import (
    _errors_up,
    _keys_down,
    _over,
    _second_order,
    _step_back,
    _through_step,
    _top,
)

COPIES = 64
"""Programs that copy a head's first state."""


@triton.jit
def _chunk(documents, length, n, step, b: tl.constexpr, BACK: tl.constexpr):
    """Return a document's chunk ``step``, counted from its last if BACK: its first token, the document's end,
    its number, and how many chunks follow in this order, negative if there is no such chunk.
    """
    first, end, m = document_at(documents, n, length, b)
    count = (end - first + b - 1) // b
    at = count - 1 - step if BACK else step
    return first + at * b, end, m + at, count - 1 - step


@triton.jit
def _sum_parts(sums, t, row, valid, h, H, stride, PARTS: tl.constexpr):
    """Sum the partial sums [PARTS, tokens, H] of a chunk's tokens, [b]."""
    total = load_tokens(sums, t, row, valid, h, H)
    for i in tl.static_range(1, PARTS):
        total += load_tokens(sums + i * stride, t, row, valid, h, H)
    return total


@triton.jit
def _begin(
    state, states, documents, length, H, SIZE: tl.constexpr, b: tl.constexpr, BACK: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    nh, part = tl.program_id(0), tl.program_id(1)
    _, _, m, left = _chunk(documents, length, nh // H, 0, b, BACK)
    if left >= 0:
        _copy(state + nh.to(tl.int64) * SIZE, states + (m * H + nh % H) * SIZE, SIZE, part, PARTS)


@triton.jit(do_not_specialize=["tokens", "step"])
def _keys(
    k, v, below, z, d, states, sums, documents, length, H, tokens, step, SIZE: tl.constexpr,
    AT: tl.constexpr, LAYER: tl.constexpr, TOP: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    BLOCK: tl.constexpr, b: tl.constexpr, BOUND: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    nh, part = tl.program_id(0), tl.program_id(1)
    h, row = nh % H, tl.arange(0, b)
    t, end, m, left = _chunk(documents, length, nh // H, step, b, False)
    if left >= 0:
        valid = t + row < end
        norm = _keys_up(
            k, v, below, z, d, states + (m * H + h) * SIZE + AT, t, row, valid, h, H, b, LAYER, TOP, D, F,
            BLOCK, BOUND, ACT, PRECISION, part, PARTS,
        )  # fmt: skip
        if TOP and BOUND > 0:
            store_tokens(sums + part * tl.cast(tokens, tl.int64) * H, norm, t, row, valid, h, H)


@triton.jit(do_not_specialize=["tokens", "step"])
def _errors(
    above, z, d, states, sums, documents, length, H, tokens, step, SIZE: tl.constexpr, AT: tl.constexpr,
    F: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr, b: tl.constexpr, BOUND: tl.constexpr,
    ACT: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    nh, part = tl.program_id(0), tl.program_id(1)
    h, row = nh % H, tl.arange(0, b)
    t, end, m, left = _chunk(documents, length, nh // H, step, b, False)
    if left >= 0:
        valid = t + row < end
        norm = _errors_down(
            above, z, d, states + (m * H + h) * SIZE + AT, t, row, valid, h, H, b, F, OUT, BLOCK, BOUND, ACT,
            PRECISION, part, PARTS,
        )  # fmt: skip
        if BOUND > 0:
            store_tokens(sums + part * tl.cast(tokens, tl.int64) * H, norm, t, row, valid, h, H)


@triton.jit(do_not_specialize=["tokens", "step"])
def _bound(
    d, sums, scale, documents, length, H, tokens, step, F: tl.constexpr, BLOCK: tl.constexpr,
    b: tl.constexpr, BOUND: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    nh, part = tl.program_id(0), tl.program_id(1)
    h, row = nh % H, tl.arange(0, b)
    t, end, _, left = _chunk(documents, length, nh // H, step, b, False)
    if left >= 0:
        valid = t + row < end
        norm = _sum_parts(sums, t, row, valid, h, H, tl.cast(tokens, tl.int64) * H, PARTS)
        _bound_errors(d, norm, scale, t, row, valid, h, H, F, BLOCK, BOUND, part, PARTS)


@triton.jit(do_not_specialize=["tokens", "step"])
def _update(
    k, below, d, gates, state, base, states, documents, length, H, tokens, step, SIZE: tl.constexpr,
    AT: tl.constexpr, LAYER: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
    b: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    nh, part = tl.program_id(0), tl.program_id(1)
    h, row = nh % H, tl.arange(0, b)
    t, end, m, left = _chunk(documents, length, nh // H, step, b, False)
    if left >= 0:
        valid = t + row < end
        stride = tl.cast(tokens, tl.int64) * H
        c = load_tokens(gates + 3 * stride, t, row, valid, h, H)
        share = load_tokens(gates + 4 * stride, t, row, valid, h, H)
        last = gates + tl.cast(tl.minimum(t + b, end) - 1, tl.int64) * H + h
        _step(
            k, below, d, state + nh.to(tl.int64) * SIZE + AT, base_of(base, h, AT, SIZE),
            states + ((m + 1) * H + h) * SIZE + AT, left > 0, c, share, tl.load(last), tl.load(last + stride),
            tl.load(last + 2 * stride), t, row, valid, h, H, LAYER, D, F, BLOCK, ACT, PRECISION, part, PARTS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "step"])
def _through(
    k, below, d, dd, gates, dstates, dtokens, sums, documents, length, H, tokens, step, SIZE: tl.constexpr,
    AT: tl.constexpr, LAYER: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
    b: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    nh, part = tl.program_id(0), tl.program_id(1)
    h, row = nh % H, tl.arange(0, b)
    t, end, m, left = _chunk(documents, length, nh // H, step, b, True)
    if left >= 0:
        valid = t + row < end
        stride = tl.cast(tokens, tl.int64) * H
        c = load_tokens(gates + 3 * stride, t, row, valid, h, H)
        share = load_tokens(gates + 4 * stride, t, row, valid, h, H)
        dc, dn, along = _through_step(
            k, below, d, dd, dstates + (m * H + h) * SIZE + AT, c, share, t, row, valid, h, H, b, LAYER, D, F,
            BLOCK, ACT, PRECISION, part, PARTS,
        )  # fmt: skip
        store_tokens(dtokens + 2 * part * stride, dc, t, row, valid, h, H)
        store_tokens(dtokens + (2 * part + 1) * stride, dn, t, row, valid, h, H)
        store_tokens(sums + part * stride, along, t, row, valid, h, H)


@triton.jit(do_not_specialize=["tokens", "step"])
def _curves(
    z, d, dd, above, dE, dz, states, sums, scale, documents, length, H, tokens, step, SIZE: tl.constexpr,
    AT: tl.constexpr, F: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr, b: tl.constexpr,
    BOUND: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    nh, part = tl.program_id(0), tl.program_id(1)
    h, row = nh % H, tl.arange(0, b)
    t, end, m, left = _chunk(documents, length, nh // H, step, b, True)
    if left >= 0:
        valid = t + row < end
        along = _sum_parts(sums, t, row, valid, h, H, tl.cast(tokens, tl.int64) * H, PARTS)
        _second_order(
            z, d, dd, above, dE, dz, states + (m * H + h) * SIZE + AT, along,
            _over(scale, t, row, valid, h, H, BOUND), t, row, valid, h, H, b, F, OUT, BLOCK, BOUND, ACT,
            PRECISION, part, PARTS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "step"])
def _errors_back(
    above, dd_above, dE, states, sums, documents, length, H, tokens, step, SIZE: tl.constexpr,
    AT: tl.constexpr, F: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr, b: tl.constexpr,
    PRECISION: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    nh, part = tl.program_id(0), tl.program_id(1)
    h, row = nh % H, tl.arange(0, b)
    t, end, m, left = _chunk(documents, length, nh // H, step, b, True)
    if left >= 0:
        valid = t + row < end
        along = _errors_up(
            above, dd_above, dE, states + (m * H + h) * SIZE + AT, t, row, valid, h, H, b, F, OUT, BLOCK,
            PRECISION, part, PARTS,
        )  # fmt: skip
        store_tokens(sums + part * tl.cast(tokens, tl.int64) * H, along, t, row, valid, h, H)


@triton.jit(do_not_specialize=["tokens", "step"])
def _values_back(
    d, dd, dv, sums, scale, documents, length, H, tokens, step, F: tl.constexpr, BLOCK: tl.constexpr,
    b: tl.constexpr, BOUND: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    nh, part = tl.program_id(0), tl.program_id(1)
    h, row = nh % H, tl.arange(0, b)
    t, end, _, left = _chunk(documents, length, nh // H, step, b, True)
    if left >= 0:
        valid = t + row < end
        along = _sum_parts(sums, t, row, valid, h, H, tl.cast(tokens, tl.int64) * H, PARTS)
        over = _over(scale, t, row, valid, h, H, BOUND)
        _top(d, dd, dv, along, over, t, row, valid, h, H, F, BLOCK, BOUND, part, PARTS)


@triton.jit(do_not_specialize=["tokens", "step"])
def _keys_back(
    z, d, dz_out, dX, dz, gates, states, dstates, documents, length, H, tokens, step, SIZE: tl.constexpr,
    AT: tl.constexpr, D: tl.constexpr, F: tl.constexpr, SIGN: tl.constexpr, BLOCK: tl.constexpr,
    b: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    nh, part = tl.program_id(0), tl.program_id(1)
    h, row = nh % H, tl.arange(0, b)
    t, end, m, left = _chunk(documents, length, nh // H, step, b, True)
    if left >= 0:
        valid = t + row < end
        stride = tl.cast(tokens, tl.int64) * H
        c = load_tokens(gates + 3 * stride, t, row, valid, h, H)
        share = load_tokens(gates + 4 * stride, t, row, valid, h, H)
        at = (m * H + h) * SIZE + AT
        _keys_down(
            z, d, dz_out, dX, dz, states + at, dstates + at, c, share, t, row, valid, h, H, b, D, F, SIGN,
            BLOCK, ACT, PRECISION, part, PARTS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "step"])
def _update_back(
    q, k, u, z, du, dz, dE, d, gates, dstate, dstates, documents, length, H, tokens, step,
    SIZE: tl.constexpr, AT: tl.constexpr, LAYER: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    SIGN: tl.constexpr, BLOCK: tl.constexpr, b: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    nh, part = tl.program_id(0), tl.program_id(1)
    h, row = nh % H, tl.arange(0, b)
    t, end, m, left = _chunk(documents, length, nh // H, step, b, True)
    if left >= 0:
        valid = t + row < end
        stride = tl.cast(tokens, tl.int64) * H
        beta = load_tokens(gates, t, row, valid, h, H)
        beta_S = load_tokens(gates + stride, t, row, valid, h, H)
        last = gates + tl.cast(tl.minimum(t + b, end) - 1, tl.int64) * H + h
        _step_back(
            q, k, u, z, du, dz, dE, d, dstate + nh.to(tl.int64) * SIZE + AT,
            dstates + ((m - 1) * H + h) * SIZE + AT, left > 0, beta, beta_S, tl.load(last),
            tl.load(last + stride), tl.load(last + 2 * stride), t, row, valid, h, H, LAYER, D, F, SIGN, BLOCK,
            ACT, PRECISION, part, PARTS,
        )  # fmt: skip


class _Stages:
    """Launches the stages of a call's chunks."""

    def __init__(self, shape: Shape, block: int):
        self.shape, self.block = shape, block
        self.programs = shape.N * shape.H

    def tiles(self, width: int) -> int:
        """Return the number of tiles of a width."""
        return width // min(width, self.block)

    def run(self, kernel: Any, step: int, width: int, *tensors: Tensor | None, **constants: Any) -> None:
        """Launch a stage over the tiles of ``width``."""
        s, PARTS = self.shape, self.tiles(width)
        launch(
            kernel, (self.programs, PARTS), *tensors, *s.documents, s.H, s.tokens, step, BLOCK=self.block,
            b=s.b, PARTS=PARTS, warps=s.warps, stages=2, **constants,
        )  # fmt: skip

    def begin(self, state: Tensor, states: Tensor, *, back: bool) -> None:
        """Copy ``state`` [N, H, size] to the copy of each document's first chunk, or of its last one."""
        s = self.shape
        launch(
            _begin, (self.programs, COPIES), state, states, *s.documents, s.H, SIZE=s.size, b=s.b, BACK=back,
            PARTS=COPIES, warps=4,
        )  # fmt: skip

    def sums(self, like: Tensor) -> Tensor:
        """Partial sums [parts, tokens, H] of a layer."""
        s = self.shape
        return like.new_empty(max(self.tiles(layer.F) for layer in s.layers), s.tokens, s.H)


def partial_sums(shape: Shape) -> int:
    """Return the number of partial sums of the gradients of c and n."""
    stages = _Stages(shape, shape.tile)
    return sum(stages.tiles(layer.F) for layer in shape.layers)


def write(
    shape: Shape, k: Tensor, v: Tensor, gates: Gates, state: Tensor, base: Tensor | None, states: Tensor,
    z: Tensor, dh: Tensor, dt: Tensor, scale: Tensor,
) -> None:  # fmt: skip
    """Write the chunks in sequence, updating ``state`` [N, H, size] in place; saves for the backward."""
    stages, last = _Stages(shape, shape.tile), shape.depth - 1
    sums = stages.sums(scale)
    common = {"ACT": shape.activation, "PRECISION": shape.precision}
    bound = {"BOUND": shape.bound}

    def limit(layer: Layer, d: Tensor, step: int) -> None:
        if shape.bound:
            stages.run(_bound, step, layer.F, d, sums, scale[layer.number], F=layer.F, **bound)

    stages.begin(state, states, back=False)
    for step in range(shape.tables.longest):
        for layer in shape.layers:
            l, top = layer.number, layer.number == last
            below, out = z[l - 1] if l else k, dt if top else z[l]
            stages.run(
                _keys, step, layer.F, k, v, below, out, dt, states, sums, SIZE=shape.size, AT=layer.at,
                LAYER=l, TOP=top, D=layer.D, F=layer.F, **bound, **common,
            )  # fmt: skip
        limit(shape.layers[-1], dt, step)
        for l in range(last - 1, -1, -1):
            above, d = dt if l + 1 == last else dh[l + 1], dh[l]
            layer, over = shape.layers[l], shape.layers[l + 1]
            stages.run(
                _errors, step, layer.F, above, z[l], d, states, sums, SIZE=shape.size, AT=over.at, F=over.D,
                OUT=over.F, **bound, **common,
            )  # fmt: skip
            limit(layer, d, step)
        for layer in shape.layers:
            l = layer.number
            below, d = z[l - 1] if l else k, dt if l == last else dh[l]
            stages.run(
                _update, step, layer.D, k, below, d, gates.tokens, state, base, states, SIZE=shape.size,
                AT=layer.at, LAYER=l, D=layer.D, F=layer.F, **common,
            )  # fmt: skip


def backward(
    shape: Shape, q: Tensor, k: Tensor, u: Tensor, z: Tensor, dh: Tensor, dt: Tensor, scale: Tensor,
    dy: Tensor, du: Tensor, dX: Tensor, ddh: Tensor, ddt: Tensor, gates: Gates, states: Tensor,
    dstate: Tensor, dstates: Tensor, dz: Tensor, dv: Tensor, dtokens: Tensor,
) -> None:  # fmt: skip
    """Run the backward of `write`; see `streamed_backward.backward`.

    The gradients of c and n are `partial_sums` in ``dtokens``, of each layer's tiles.
    """
    stages, last = _Stages(shape, shape.tile), shape.depth - 1
    sums, dE = stages.sums(scale), z.new_empty(z.shape)
    common = {"ACT": shape.activation, "PRECISION": shape.precision}
    bound, size = {"BOUND": shape.bound}, {"SIZE": shape.size}
    of = lambda layer: (dt, ddt) if layer.number == last else (dh[layer.number], ddh[layer.number])  # noqa: E731
    stages.begin(dstate, dstates, back=True)
    for step in range(shape.tables.longest):
        part = partial_sums(shape)
        for layer in reversed(shape.layers):
            l = layer.number
            part -= stages.tiles(layer.F)
            stages.run(
                _through, step, layer.F, k, z[l - 1] if l else k, *of(layer), gates.tokens, dstates,
                dtokens[2 + 2 * part :], sums, **size, AT=layer.at, LAYER=l, D=layer.D, F=layer.F, **common,
            )  # fmt: skip
        for layer, over in zip(shape.layers, shape.layers[1:], strict=False):
            l, (above, dd_above) = layer.number, of(over)
            stages.run(
                _curves, step, over.D, z[l], *of(layer), above, dE[l], dz[l], states, sums, scale[l], **size,
                AT=over.at, F=over.D, OUT=over.F, **bound, **common,
            )  # fmt: skip
            stages.run(
                _errors_back, step, over.F, above, dd_above, dE[l], states, sums, **size, AT=over.at,
                F=over.D, OUT=over.F, PRECISION=shape.precision,
            )  # fmt: skip
        top = shape.layers[-1]
        stages.run(_values_back, step, top.F, dt, ddt, dv, sums, scale[last], F=top.F, **bound)
        for layer in reversed(shape.layers[1:]):
            l, sign = layer.number, -1 if layer.number == last else 1
            stages.run(
                _keys_back, step, layer.D, z[l - 1], of(layer)[0], dv if l == last else dz[l], dX[l - 1],
                dz[l - 1], gates.tokens, states, dstates, **size, AT=layer.at, D=layer.D, F=layer.F,
                SIGN=sign, **common,
            )  # fmt: skip
        for layer in shape.layers:
            l, sign = layer.number, -1 if layer.number == last else 1
            read, key, error = (u[l - 1], z[l - 1], dE[l - 1]) if l else (q, k, k)
            stages.run(
                _update_back, step, layer.D, q, k, read, key, dy if l == last else du[l],
                dv if l == last else dz[l], error, of(layer)[0], gates.tokens, dstate, dstates, **size,
                AT=layer.at, LAYER=l, D=layer.D, F=layer.F, SIGN=sign, **common,
            )  # fmt: skip
