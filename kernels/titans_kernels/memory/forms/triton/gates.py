"""Kernels of the gate coefficients: C, beta, m, h of a chunk, and c, n of its last token.

Computed row by row with the recurrence itself, without logarithms or divisions, so exact for alpha = 1 and
eta = 0:

    N_t = eta_t N_{t-1} + theta_t e_t      C_t = (1 - alpha_t) C_{t-1} + N_t        rows of b, from 0
    h_t = eta_t h_{t-1}                    beta_t = (1 - alpha_t) beta_{t-1}        from 1
    m_t = (1 - alpha_t) m_{t-1} + h_t                                               from 0

A program computes one chunk of one head with one warp: each thread has one or a few elements of a row, and
many programs share a multiprocessor. All in float32.
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
from titans_kernels.memory.forms.triton.tables import Tables


class Gates(NamedTuple):
    """Coefficients of all chunks, float32. Rows of C past a short chunk's last token are 0."""

    C: Tensor  # [M, H, b, b]
    tokens: Tensor  # [5, tokens, H]: beta, m, h, and each token's c and n in the state after its chunk


@triton.jit(do_not_specialize=["tokens"])
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
    """Load a scalar at the chunk's last token, zero elsewhere."""
    return tl.where(is_last, tl.load(pointer), 0.0)


@triton.jit(do_not_specialize=["tokens"])
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
    """Return gradients of alpha, eta, theta. Overwrites ``dC`` [M, H, b, b].

    ``dtokens`` [2 + 2 P, tokens, H]: gradients of beta and m, then P partial sums of the gradients of c and
    n. ``inner`` [M, H, 3]: gradients of beta, m and h of each chunk's last token.
    """
    tokens, H = alpha.shape
    M, b = dC.shape[0], dC.shape[-1]
    dalpha, deta, dtheta = (torch.empty_like(alpha) for _ in range(3))
    launch(
        _backward, (M, H), alpha, eta, theta, gates.C, gates.tokens, dC, dtokens, inner, dalpha, deta,
        dtheta, tables.chunks, tables.length, H, tokens, b=b, PARTS=dtokens.shape[0] // 2 - 1, warps=1,
    )  # fmt: skip
    return dalpha, deta, dtheta
