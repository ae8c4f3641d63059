"""Kernels of the gate coefficients: C, beta, m, h of a chunk, and c, n of its last token.

Computed row by row with the recurrence itself, without logarithms or divisions, so exact for alpha = 1 and
eta = 0:

    N_t = eta_t N_{t-1} + theta_t e_t      C_t = (1 - alpha_t) C_{t-1} + N_t        rows of b, from 0
    h_t = eta_t h_{t-1}                    beta_t = (1 - alpha_t) beta_{t-1}        from 1
    m_t = (1 - alpha_t) m_{t-1} + h_t                                               from 0

A program computes one chunk of one head with one warp: each thread has one or a few elements of a row, and
many programs share a multiprocessor. All in float32.

Also the kernels of the write budget, which lowers theta (`titans_kernels.memory.budget`). The dot products of
a token with its chunk's keys are summed in float32, row by row: the loop over the tokens is inherently
sequential, so a matrix product would not shorten it. Shapes: tokens of all rows, H heads, D key width; a
program has b tokens and W features, D rounded up.
"""
# Triton's language is not Python's: a constexpr is given as a number, a branch is known when compiling
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titans_kernels.memory.forms.triton.launch import launch
from titans_kernels.memory.forms.triton.pieces import chunk_at, load_tokens, store_tokens
from titans_kernels.memory.forms.triton.tables import Tables, tables


class Gates(NamedTuple):
    """Coefficients of all chunks, float32. Rows of C past a short chunk's last token are 0."""

    C: Tensor  # [M, H, b, b]
    tokens: Tensor  # [5, tokens, H]: beta, m, h, and each token's c and n in the state after its chunk


@triton.jit
def _forward(alpha, eta, theta, C, out, chunks, length, H, tokens, b: tl.constexpr):
    chunk, h = tl.program_id(0), tl.program_id(1)
    first, count = chunk_at(chunks, chunk, length, b)
    column = tl.arange(0, b)
    rows = C + (chunk.to(tl.int64) * H + h) * b * b + column
    stride = tl.cast(tokens, tl.int64) * H
    at = tl.cast(first, tl.int64) * H + h
    N_row = tl.zeros((b,), tl.float32)
    C_row = tl.zeros((b,), tl.float32)
    beta, mix, keep = 1.0, 0.0, 1.0
    for t in range(count):
        r = 1 - tl.load(alpha + at)
        e = tl.load(eta + at)
        N_row = e * N_row + tl.where(column == t, tl.load(theta + at), 0.0)
        C_row = r * C_row + N_row
        beta = r * beta
        keep = e * keep
        mix = r * mix + keep
        tl.store(rows + t * b, C_row)
        tl.store(out + at, beta)
        tl.store(out + stride + at, mix)
        tl.store(out + 2 * stride + at, keep)
        at += H
    for t in range(count, b):
        tl.store(rows + t * b, tl.zeros((b,), tl.float32))
    valid = column < count
    store_tokens(out + 3 * stride, C_row, first, column, valid, h, H)
    store_tokens(out + 4 * stride, N_row, first, column, valid, h, H)


@triton.jit
def _at_last(pointer, is_last):
    """A scalar at the chunk's last token, zero elsewhere."""
    return tl.where(is_last, tl.load(pointer), 0.0)


@triton.jit
def _backward(
    alpha, eta, theta, C, gates, dC, dtokens, inner, dalpha, deta, dtheta, chunks, length, H, tokens,
    b: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    chunk, h = tl.program_id(0), tl.program_id(1)
    first, count = chunk_at(chunks, chunk, length, b)
    column = tl.arange(0, b)
    where = (chunk.to(tl.int64) * H + h) * b * b + column
    stride = tl.cast(tokens, tl.int64) * H
    sums = inner + (chunk.to(tl.int64) * H + h) * 3
    valid = column < count
    # c and n are the last token's rows of C and N
    dC_row = tl.zeros((b,), tl.float32)
    dN_row = tl.zeros((b,), tl.float32)
    for part in tl.static_range(PARTS):
        dC_row += load_tokens(dtokens + (2 + 2 * part) * stride, first, column, valid, h, H)
        dN_row += load_tokens(dtokens + (3 + 2 * part) * stride, first, column, valid, h, H)
    dbeta, dmix, dkeep = 0.0, 0.0, 0.0
    at = (tl.cast(first, tl.int64) + count - 1) * H + h
    for i in range(count):
        t = count - 1 - i
        r = 1 - tl.load(alpha + at)
        e = tl.load(eta + at)
        dC_row += tl.load(dC + where + t * b)
        dN_row += dC_row
        dbeta += tl.load(dtokens + at) + _at_last(sums, i == 0)
        dmix += tl.load(dtokens + stride + at) + _at_last(sums + 1, i == 0)
        dkeep += dmix + _at_last(sums + 2, i == 0)
        before = t > 0
        C_before = tl.load(C + where + (t - 1) * b, mask=column < t, other=0.0)
        beta_before = tl.load(gates + at - H, mask=before, other=1.0)
        mix_before = tl.load(gates + stride + at - H, mask=before, other=0.0)
        keep_before = tl.load(gates + 2 * stride + at - H, mask=before, other=1.0)
        tl.store(dalpha + at, -(tl.sum(dC_row * C_before) + dmix * mix_before + dbeta * beta_before))
        tl.store(dtheta + at, tl.sum(tl.where(column == t, dN_row, 0.0)))
        tl.store(deta + at, dkeep * keep_before)
        tl.store(dC + where + t * b, dN_row)
        dC_row = r * dC_row
        dN_row = e * dN_row
        dbeta = r * dbeta
        dmix = r * dmix
        dkeep = e * dkeep
        at -= H
    # gradient of eta through N: recompute its rows from the first, next to their gradients in dC
    N_row = tl.zeros((b,), tl.float32)
    at = tl.cast(first, tl.int64) * H + h
    tl.debug_barrier()
    for t in range(count):
        tl.store(deta + at, tl.load(deta + at) + tl.sum(tl.load(dC + where + t * b) * N_row))
        N_row = tl.load(eta + at) * N_row + tl.where(column == t, tl.load(theta + at), 0.0)
        at += H


def coefficients(alpha: Tensor, eta: Tensor, theta: Tensor, tables: Tables, b: int) -> Gates:
    """Coefficients from alpha, eta, theta [tokens, H], float32."""
    tokens, H = alpha.shape
    M = tables.M
    C = torch.empty(M, H, b, b, dtype=torch.float32, device=alpha.device)
    out = torch.empty(5, tokens, H, dtype=torch.float32, device=alpha.device)
    launch(
        _forward, (M, H), alpha, eta, theta, C, out, tables.chunks, tables.length, H, tokens, b=b, warps=1
    )  # fmt: skip
    return Gates(C, out)


def coefficients_backward(
    alpha: Tensor, eta: Tensor, theta: Tensor, gates: Gates,
    dC: Tensor, dtokens: Tensor, inner: Tensor, tables: Tables,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of alpha, eta, theta. Overwrites ``dC`` [M, H, b, b].

    ``dtokens`` [2 + 2 P, tokens, H]: gradients of beta and m, then P partial sums of those of c and n.
    ``inner`` [M, H, 3]: gradients of beta, m and h of each chunk's last token.
    """
    tokens, H = alpha.shape
    M, b = dC.shape[0], dC.shape[-1]
    dalpha, deta, dtheta = (torch.empty_like(alpha) for _ in range(3))
    launch(
        _backward, (M, H), alpha, eta, theta, gates.C, gates.tokens, dC, dtokens, inner, dalpha, deta,
        dtheta, tables.chunks, tables.length, H, tokens, b=b, PARTS=dtokens.shape[0] // 2 - 1, warps=1,
    )  # fmt: skip
    return dalpha, deta, dtheta


_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _keys(k, first, count, h, H, D, row, column):
    """The keys [b, W] of a chunk, float32."""
    at = ((tl.cast(first, tl.int64) + row) * H + h)[:, None] * D + column[None, :]
    return tl.load(k + at, mask=(row < count)[:, None] & (column < D)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _key(k, at, D, column):
    """One key [W], float32."""
    return tl.load(k + at * D + column, mask=column < D, other=0.0).to(tl.float32)


@triton.jit
def _budget_forward(
    k, eta, theta, limited, steps, chunks, length, H, D, held, chunk_size: tl.constexpr,
    b: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    first, count = chunk_at(chunks, tl.program_id(0), length, chunk_size)
    h = tl.program_id(1)
    row, column = tl.arange(0, b), tl.arange(0, W)
    K = _keys(k, first, count, h, H, D, row, column)
    given = tl.where(first % length < chunk_size, held, 0)
    e = tl.zeros((b,), tl.float32)
    at = tl.cast(first, tl.int64) * H + h
    for t in range(count):
        key = _key(k, at, D, column)
        overlap = tl.abs(tl.sum(K * key[None, :], 1))
        size = tl.sum(key * key)
        room = tl.maximum(1 - tl.sum(e * overlap), 0.0)
        moved = 1 - tl.load(eta + at)
        taken = tl.load(theta + at)
        counted = size >= _TINY
        over = counted & (t >= given) & (2 * taken * size > room * moved)
        full = tl.where(counted & (moved > 0), 2 * taken / tl.where(moved > 0, moved, 1.0), 0.0)
        now = tl.where(over, room / tl.where(counted, size, 1.0), full)
        tl.store(steps + at, now)
        tl.store(limited + at, tl.where(over, now * moved / 2, taken))
        e = tl.where(row == t, now, e)
        at += H


@triton.jit
def _budget_backward(
    dlimited, dsteps, k, eta, theta, limited, steps, dk, deta, dtheta, chunks, length, H, D,
    chunk_size: tl.constexpr, b: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    first, count = chunk_at(chunks, tl.program_id(0), length, chunk_size)
    h = tl.program_id(1)
    row, column = tl.arange(0, b), tl.arange(0, W)
    K = _keys(k, first, count, h, H, D, row, column)
    dK = tl.zeros((b, W), tl.float32)
    token = (tl.cast(first, tl.int64) + row) * H + h
    e = tl.load(steps + token, mask=row < count, other=0.0)
    total = tl.load(dsteps + token, mask=row < count, other=0.0)
    at = (tl.cast(first, tl.int64) + count - 1) * H + h
    for i in range(count):
        t = count - 1 - i
        key = _key(k, at, D, column)
        product = tl.sum(K * key[None, :], 1)
        size = tl.sum(key * key)
        moved, taken = 1 - tl.load(eta + at), tl.load(theta + at)
        g, own, here = tl.load(dlimited + at), tl.load(steps + at), tl.sum(tl.where(row == t, total, 0.0))
        over = tl.load(limited + at) != taken
        counted = size >= _TINY
        per_moved = tl.where(counted & (moved > 0), 1 / tl.where(moved > 0, moved, 1.0), 0.0)
        tl.store(dtheta + at, tl.where(over, 0.0, g + 2 * here * per_moved))
        tl.store(deta + at, tl.where(over, -g * own / 2, here * own * per_moved))
        share = tl.where(over & (own > 0), (here + g * moved / 2) / tl.where(counted, size, 1.0), 0.0)
        total -= tl.where(row < t, share * tl.abs(product), 0.0)
        sign = tl.where(product > 0, 1.0, tl.where(product < 0, -1.0, 0.0))
        x = tl.where(row <= t, -share * e * sign, 0.0)
        dkey = tl.sum(x[:, None] * K, 0)
        dK += x[:, None] * key[None, :] + tl.where(row == t, 1.0, 0.0)[:, None] * dkey[None, :]
        at -= H
    to = dk + token[:, None] * D + column[None, :]
    tl.store(to, dK.to(dk.dtype.element_ty), mask=(row < count)[:, None] & (column < D)[None, :])


def forward(
    k: Tensor, eta: Tensor, theta: Tensor, chunk_size: int, cu_seqlens: Tensor | None, held: int
) -> list[Tensor]:
    """theta' and e [B, T, H] of contiguous k [B, T, H, D], eta and theta."""
    out = [torch.empty_like(theta), torch.empty_like(theta)]
    _launch(_budget_forward, k, (k, eta, theta, *out), chunk_size, cu_seqlens, held)
    return out


def backward(tensors: list[Tensor], chunk_size: int, cu_seqlens: Tensor | None) -> list[Tensor]:
    """Gradients of k, eta and theta. ``tensors``: the gradients of theta' and e; k, eta, theta; theta', e."""
    k = tensors[2]
    grads = [torch.empty_like(x) for x in tensors[2:5]]
    _launch(_budget_backward, k, (*tensors, *grads), chunk_size, cu_seqlens)
    return grads


def _launch(
    kernel, k: Tensor, tensors: tuple[Tensor, ...], chunk_size: int, cu_seqlens: Tensor | None, *held: int
) -> None:
    B, T, H, D = k.shape
    found = tables(B, T, cu_seqlens, chunk_size, k.device)
    b, W = triton.next_power_of_2(chunk_size), triton.next_power_of_2(D)
    launch(
        kernel, (found.M, H), *tensors, found.chunks, max(found.length, 1), H, D, *held,
        chunk_size=chunk_size, b=b, W=W, warps=max(1, min(8, b * W // 1024)),
    )  # fmt: skip
