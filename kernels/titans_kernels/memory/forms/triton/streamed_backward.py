"""The backward of `streamed`, from the last chunk to the first, one program per document and head.

For each chunk: the backward of the state update, of the errors' backward pass and of the keys' forward pass,
then the gradient of the state before the chunk.
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
    document_at,
    dot,
    load_rows,
    load_tokens,
    second_derivative,
    slope,
    store_rows,
    store_tokens,
    through_bound,
    tile_at,
)
from titans_kernels.memory.forms.triton.shapes import Shape
from titans_kernels.memory.forms.triton.streamed import (
    _copy,
    _load_input,
    _times_state,
    _times_transpose,
)


@triton.jit
def _through_step(
    k, z, d, dd, dstate, c, share, t, row, valid, h, H, b: tl.constexpr, LAYER: tl.constexpr,
    D: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr,
    part=0, PARTS: tl.constexpr = 1,
):  # fmt: skip
    """Add to ``dd`` of one layer the gradient of the state update; returns the sums (dc, dn, d dd) [b]."""
    BF: tl.constexpr = min(BLOCK, F)
    dc = tl.zeros((b,), tl.float32)
    dn = tl.zeros((b,), tl.float32)
    along = tl.zeros((b,), tl.float32)
    for j in range(part * BF, F, PARTS * BF):
        f = j + tl.arange(0, BF)
        to_W = _times_state(k, z, dstate, t, row, valid, h, H, f, b, LAYER, D, F, BLOCK, ACT, PRECISION)
        to_S = _times_state(
            k, z, dstate + D * F, t, row, valid, h, H, f, b, LAYER, D, F, BLOCK, ACT, PRECISION
        )  # fmt: skip
        error = load_rows(d, t, row, valid, h, H, F, f).to(tl.float32)
        dd_tile = load_rows(dd, t, row, valid, h, H, F, f).to(tl.float32)
        dd_tile -= c[:, None] * to_W + share[:, None] * to_S
        store_rows(dd, dd_tile, t, row, valid, h, H, F, f)
        dc -= tl.sum(to_W * error, 1)
        dn -= tl.sum(to_S * error, 1)
        along += tl.sum(dd_tile * error, 1)
    return dc, dn, along


@triton.jit
def _load_unbounded(
    d, dd, along, over, t, row, valid, h, H, F: tl.constexpr, f, BOUND: tl.constexpr
):  # fmt: skip
    """Load a tile of dd after the backward of the bound."""
    dd_tile = load_rows(dd, t, row, valid, h, H, F, f).to(tl.float32)
    if BOUND > 0:
        error = load_rows(d, t, row, valid, h, H, F, f).to(tl.float32)
        dd_tile = through_bound(dd_tile, error, along, over, BOUND)
    return dd_tile


@triton.jit
def _second_order(
    z, d, dd, above, dE, dz, W, along, over, t, row, valid, h, H, b: tl.constexpr, F: tl.constexpr,
    OUT: tl.constexpr, BLOCK: tl.constexpr, BOUND: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr,
    part=0, PARTS: tl.constexpr = 1,
):  # fmt: skip
    """Store dE = dd f'(z) of a hidden layer and dz = dd E f''(z), the second-order part of z's gradient."""
    BF: tl.constexpr = min(BLOCK, F)
    for j in range(part * BF, F, PARTS * BF):
        f = j + tl.arange(0, BF)
        E = _times_transpose(above, W, t, row, valid, h, H, f, b, OUT, BLOCK, PRECISION)
        dd_tile = _load_unbounded(d, dd, along, over, t, row, valid, h, H, F, f, BOUND)
        z_tile = load_rows(z, t, row, valid, h, H, F, f).to(tl.float32)
        store_rows(dE, dd_tile * slope(z_tile, ACT), t, row, valid, h, H, F, f)
        store_rows(dz, dd_tile * E * second_derivative(z_tile, ACT), t, row, valid, h, H, F, f)
    tl.debug_barrier()


@triton.jit
def _errors_up(
    above, dd_above, dE, W, t, row, valid, h, H, b: tl.constexpr, F: tl.constexpr, OUT: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, part=0, PARTS: tl.constexpr = 1,
):  # fmt: skip
    """Add dE W to dd of the layer above; return its sum d dd [b]."""
    BF: tl.constexpr = min(BLOCK, F)
    BO: tl.constexpr = min(BLOCK, OUT)
    TYPE: tl.constexpr = above.dtype.element_ty
    along = tl.zeros((b,), tl.float32)
    for i in range(part * BO, OUT, PARTS * BO):
        o = i + tl.arange(0, BO)
        dd_tile = load_rows(dd_above, t, row, valid, h, H, OUT, o).to(tl.float32)
        for j in range(0, F, BF):
            f = j + tl.arange(0, BF)
            dE_tile = load_rows(dE, t, row, valid, h, H, F, f)
            dd_tile += dot(dE_tile, tl.load(W + tile_at(f, o, OUT)), TYPE, PRECISION)
        error = load_rows(above, t, row, valid, h, H, OUT, o).to(tl.float32)
        along += tl.sum(dd_tile * error, 1)
        store_rows(dd_above, dd_tile, t, row, valid, h, H, OUT, o)
    tl.debug_barrier()
    return along


@triton.jit
def _top(
    d, dd, dv, along, over, t, row, valid, h, H, F: tl.constexpr, BLOCK: tl.constexpr, BOUND: tl.constexpr,
    part=0, PARTS: tl.constexpr = 1,
):  # fmt: skip
    """dv = -2 dd; the gradient of the last layer's output is its negative."""
    BF: tl.constexpr = min(BLOCK, F)
    for j in range(part * BF, F, PARTS * BF):
        f = j + tl.arange(0, BF)
        dd_tile = _load_unbounded(d, dd, along, over, t, row, valid, h, H, F, f, BOUND)
        store_rows(dv, -2 * dd_tile, t, row, valid, h, H, F, f)
    tl.debug_barrier()


@triton.jit
def _keys_down(
    z, d, dz_out, dX, dz, W, dstate, c, share, t, row, valid, h, H, b: tl.constexpr, D: tl.constexpr,
    F: tl.constexpr, SIGN: tl.constexpr, BLOCK: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr,
    part=0, PARTS: tl.constexpr = 1,
):  # fmt: skip
    """Compute ``dz`` of the layer below from the gradient of a layer's output, SIGN times ``dz_out``."""
    BD: tl.constexpr = min(BLOCK, D)
    for i in range(part * BD, D, PARTS * BD):
        k = i + tl.arange(0, BD)
        total = load_rows(dX, t, row, valid, h, H, D, k).to(tl.float32)
        total += SIGN * _times_transpose(dz_out, W, t, row, valid, h, H, k, b, F, BLOCK, PRECISION)
        back = _times_transpose(d, dstate, t, row, valid, h, H, k, b, F, BLOCK, PRECISION)
        total -= c[:, None] * back
        back = _times_transpose(d, dstate + D * F, t, row, valid, h, H, k, b, F, BLOCK, PRECISION)
        total -= share[:, None] * back
        z_tile = load_rows(z, t, row, valid, h, H, D, k).to(tl.float32)
        total = total * slope(z_tile, ACT) + load_rows(dz, t, row, valid, h, H, D, k).to(tl.float32)
        store_rows(dz, total, t, row, valid, h, H, D, k)
    tl.debug_barrier()


@triton.jit
def _step_back(
    q, k, u, z, du, dz, dE, d, dstate, previous_copy, more, beta, beta_S, a, mix, keep, t, row, valid, h, H,
    LAYER: tl.constexpr, D: tl.constexpr, F: tl.constexpr, SIGN: tl.constexpr, BLOCK: tl.constexpr,
    ACT: tl.constexpr, PRECISION: tl.constexpr, part=0, PARTS: tl.constexpr = 1,
):  # fmt: skip
    """Compute the gradient of one layer's state before the chunk from the gradient after it, tile by tile."""
    TYPE: tl.constexpr = k.dtype.element_ty
    BD: tl.constexpr = min(BLOCK, D)
    BF: tl.constexpr = min(BLOCK, F)
    for i in range(part * BD, D, PARTS * BD):
        key = i + tl.arange(0, BD)
        X = tl.trans(_load_input(k, z, t, row, valid, h, H, D, key, LAYER, ACT))
        x = tl.trans(_load_input(q, u, t, row, valid, h, H, D, key, LAYER, ACT))
        for j in range(0, F, BF):
            f = j + tl.arange(0, BF)
            at = tile_at(key, f, F)
            read = load_rows(du, t, row, valid, h, H, F, f).to(tl.float32)
            write = SIGN * load_rows(dz, t, row, valid, h, H, F, f).to(tl.float32)
            dW = tl.load(dstate + at)
            dS = keep * tl.load(dstate + D * F + at) + mix * dW
            dS = add_dot(dS, x, beta_S[:, None] * read, TYPE, PRECISION)
            dW = add_dot(a * dW, x, beta[:, None] * read, TYPE, PRECISION)
            dW = add_dot(dW, X, write, TYPE, PRECISION)
            if LAYER > 0:
                back = load_rows(dE, t, row, valid, h, H, D, key)
                error = load_rows(d, t, row, valid, h, H, F, f)
                dW = add_dot(dW, tl.trans(back), error, TYPE, PRECISION)
            tl.store(dstate + at, dW)
            tl.store(dstate + D * F + at, dS)
            if more:
                tl.store(previous_copy + at, dW.to(TYPE))
                tl.store(previous_copy + D * F + at, dS.to(TYPE))


@triton.jit
def _over(scale, t, row, valid, h, H, BOUND: tl.constexpr):
    """Divisor of each error by the bound."""
    if BOUND > 0:
        return tl.where(valid, load_tokens(scale, t, row, valid, h, H), 1.0)
    else:
        return tl.full(row.shape, 1.0, tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def _backward(
    q, k, u, z, dh, dt, scale, dy, du, dX, ddh, ddt, dE, gates, states, dstate, dstates, dz, dv, dtokens,
    documents, length, H, tokens,
    L: tl.constexpr, D: tl.constexpr, F: tl.constexpr, V: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, b: tl.constexpr, BOUND: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    nh = tl.program_id(0)
    n, h = nh // H, nh % H
    first, end, m = document_at(documents, n, length, b)
    count = (end - first + b - 1) // b
    m += count
    row = tl.arange(0, b)
    stride = tl.cast(tokens, tl.int64) * H
    hidden = stride * F
    dstate += nh.to(tl.int64) * SIZE
    if count > 0:
        _copy(dstate, dstates + ((m - 1) * H + h) * SIZE, SIZE)
    tl.debug_barrier()
    for i in range(count):
        m -= 1
        t = first + (count - 1 - i) * b
        valid = t + row < end
        W = states + (m * H + h) * SIZE
        dafter = dstates + (m * H + h) * SIZE
        c = load_tokens(gates + 3 * stride, t, row, valid, h, H)
        share = load_tokens(gates + 4 * stride, t, row, valid, h, H)
        dc = tl.zeros((b,), tl.float32)
        dn = tl.zeros((b,), tl.float32)
        along = tl.zeros((b,), tl.float32)
        for l in tl.static_range(L - 1, -1, -1):
            more_c, more_n, along = _through_step(
                k, z + (l - 1) * hidden, dt if l == L - 1 else dh + l * hidden,
                ddt if l == L - 1 else ddh + l * hidden,
                dafter + (0 if l == 0 else 2 * (D * F + (l - 1) * F * F)), c, share, t, row, valid, h, H, b,
                l, D if l == 0 else F, V if l == L - 1 else F, BLOCK, ACT, PRECISION,
            )  # fmt: skip
            dc += more_c
            dn += more_n
        store_tokens(dtokens + 2 * stride, dc, t, row, valid, h, H)
        store_tokens(dtokens + 3 * stride, dn, t, row, valid, h, H)
        tl.debug_barrier()
        for l in tl.static_range(L - 1):
            W_above = W + 2 * (D * F + l * F * F)
            above = dt if l == L - 2 else dh + (l + 1) * hidden
            _second_order(
                z + l * hidden, dh + l * hidden, ddh + l * hidden, above, dE + l * hidden, dz + l * hidden,
                W_above, along, _over(scale + l * stride, t, row, valid, h, H, BOUND), t, row, valid, h, H, b,
                F, V if l == L - 2 else F, BLOCK, BOUND, ACT, PRECISION,
            )  # fmt: skip
            along = _errors_up(
                above, ddt if l == L - 2 else ddh + (l + 1) * hidden, dE + l * hidden, W_above, t, row, valid,
                h, H, b, F, V if l == L - 2 else F, BLOCK, PRECISION,
            )  # fmt: skip
        over = _over(scale + (L - 1) * stride, t, row, valid, h, H, BOUND)
        _top(dt, ddt, dv, along, over, t, row, valid, h, H, V, BLOCK, BOUND)
        for l in tl.static_range(L - 1, 0, -1):
            at = 2 * (D * F + (l - 1) * F * F)
            _keys_down(
                z + (l - 1) * hidden, dt if l == L - 1 else dh + l * hidden,
                dv if l == L - 1 else dz + l * hidden, dX + (l - 1) * hidden, dz + (l - 1) * hidden, W + at,
                dafter + at, c, share, t, row, valid, h, H, b, F, V if l == L - 1 else F,
                -1 if l == L - 1 else 1, BLOCK, ACT, PRECISION,
            )  # fmt: skip
        beta = load_tokens(gates, t, row, valid, h, H)
        beta_S = load_tokens(gates + stride, t, row, valid, h, H)
        last = gates + tl.cast(tl.minimum(t + b, end) - 1, tl.int64) * H + h
        a, mix, keep = tl.load(last), tl.load(last + stride), tl.load(last + 2 * stride)
        for l in tl.static_range(L):
            at = 0 if l == 0 else 2 * (D * F + (l - 1) * F * F)
            _step_back(
                q, k, u + (l - 1) * hidden, z + (l - 1) * hidden, dy if l == L - 1 else du + l * hidden,
                dv if l == L - 1 else dz + l * hidden, dE + (l - 1) * hidden,
                dt if l == L - 1 else dh + l * hidden, dstate + at,
                dafter - tl.cast(H, tl.int64) * SIZE + at, i + 1 < count, beta, beta_S, a, mix, keep,
                t, row, valid, h, H, l, D if l == 0 else F, V if l == L - 1 else F,
                -1 if l == L - 1 else 1, BLOCK, ACT, PRECISION,
            )  # fmt: skip
        tl.debug_barrier()


def backward(
    shape: Shape, q: Tensor, k: Tensor, u: Tensor, z: Tensor, dh: Tensor, dt: Tensor, scale: Tensor,
    dy: Tensor, du: Tensor, dX: Tensor, ddh: Tensor, ddt: Tensor, gates: Gates, states: Tensor,
    dstate: Tensor, dstates: Tensor, dz: Tensor, dv: Tensor, dtokens: Tensor,
) -> None:  # fmt: skip
    """Run the backward of `streamed.write`: ``dstate`` [N, H, size] becomes the initial state's gradient.

    Fills ``dv``, ``dz`` (of the hidden layers), ``dstates`` (the gradient of the state after each chunk) and
    the gradients of c and n in ``dtokens``. Overwrites ``ddh`` and ``ddt``.
    """
    warps = 8 if shape.float32 and shape.layers[0].F > 16 else shape.warps
    launch(
        _backward, (shape.N * shape.H,), q, k, u, z, dh, dt, scale, dy, du, dX, ddh, ddt,
        z.new_empty(z.shape), gates.tokens, states, dstate, dstates, dz, dv, dtokens,
        *shape.documents, shape.H, shape.tokens, **shape.widths, SIZE=shape.size,
        BLOCK=min(shape.narrow_tile, 32), b=shape.b, BOUND=shape.bound, ACT=shape.activation,
        PRECISION=shape.precision, warps=warps, stages=1,
    )  # fmt: skip
