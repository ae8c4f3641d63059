"""Kernels of the gate coefficients: C, beta, m, h of a chunk, and what its last token sends on.

Products are running products, without logarithm or division, so exact at alpha = 1 and eta = 0:
``A[t, s] = r_{s+1} ... r_t``, r = 1 - alpha, and E likewise of eta (the method's H); ``N = E diag(theta)``,
``C = A N``. A program does one chunk of one head, [b, b] at a time, in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titans_kernels.memory.triton.launch import launch
from titans_kernels.memory.triton.pieces import load_tokens, store_tokens
from titans_kernels.memory.triton.tables import Tables


class Gates(NamedTuple):
    """Coefficients of all chunks, float32."""

    C: Tensor  # [M, H, b, b]
    tokens: Tensor  # [5, tokens, H]: beta, m, h, and each token's share c and n of what leaves its chunk


@triton.jit
def _products(r, t, s):
    """[t, s] r_{s+1} ... r_t where t >= s, else 0, of r [b] over t."""
    P = tl.cumprod(tl.where(t > s, r[:, None], 1.0), 0)
    return tl.where(t >= s, P, 0.0)


@triton.jit
def _forward(
    alpha, eta, theta, C, out, chunks, H, tokens, b: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    m, h = tl.program_id(0), tl.program_id(1)
    first = tl.load(chunks + 2 * m)
    count = tl.load(chunks + 2 * m + 1)
    if count == 0:
        return
    row = tl.arange(0, b)
    t, s = row[:, None], row[None, :]
    token, valid = first + row, row < count
    r = 1 - load_tokens(alpha, token, valid, h, H)  # 1 where not valid
    e = tl.where(valid, load_tokens(eta, token, valid, h, H), 1.0)
    theta_b = load_tokens(theta, token, valid, h, H)
    A = _products(r, t, s)
    N = _products(e, t, s) * theta_b[None, :]
    C_bb = tl.dot(A, N, input_precision=PRECISION)
    at = (m.to(tl.int64) * H + h) * b * b + t * b + s
    tl.store(C + at, C_bb)
    h_b = tl.cumprod(e, 0)
    mixed = tl.sum(A * h_b[None, :], 1)
    last = t == count - 1
    stride = tl.cast(tokens, tl.int64) * H
    store_tokens(out, tl.cumprod(r, 0), token, valid, h, H)
    store_tokens(out + stride, mixed, token, valid, h, H)
    store_tokens(out + 2 * stride, h_b, token, valid, h, H)
    store_tokens(out + 3 * stride, tl.sum(tl.where(last, C_bb, 0.0), 0), token, valid, h, H)
    store_tokens(out + 4 * stride, tl.sum(tl.where(last, N, 0.0), 0), token, valid, h, H)


@triton.jit
def _through_products(P, dP, dstart, r_before, start_before, t, s):
    """Gradient of r from those of its products P and of its running product from the chunk's start.

    r_j stands in P[t, s] for s < j <= t as P[t, j] r_j P[j - 1, s], which asks for no division by r_j;
    ``dP`` here is P^T dP already.
    """
    earlier = tl.cumprod(tl.where(t - 1 > s, r_before[:, None], 1.0), 0)
    earlier = tl.where(t > s, earlier, 0.0)  # P[j - 1, s] at [j, s]
    return tl.sum(dP * earlier, 1) + tl.sum(P * dstart[:, None], 0) * start_before


@triton.jit
def _backward(
    alpha, eta, theta, gates, dC, dtokens, inner, dalpha, deta, dtheta, chunks, H, tokens,
    b: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    m, h = tl.program_id(0), tl.program_id(1)
    first = tl.load(chunks + 2 * m)
    count = tl.load(chunks + 2 * m + 1)
    if count == 0:
        return
    row = tl.arange(0, b)
    t, s = row[:, None], row[None, :]
    token, valid = first + row, row < count
    last = row == count - 1
    stride = tl.cast(tokens, tl.int64) * H
    h_b = load_tokens(gates + 2 * stride, token, valid, h, H)
    # what reaches the coefficients of the last token goes on top of what its own read gives
    dc = tl.zeros((b,), tl.float32)
    dn = tl.zeros((b,), tl.float32)
    for part in tl.static_range(PARTS):
        dc += load_tokens(dtokens + (2 + 2 * part) * stride, token, valid, h, H)
        dn += load_tokens(dtokens + (3 + 2 * part) * stride, token, valid, h, H)
    sums = inner + (m.to(tl.int64) * H + h) * 3
    dbeta = load_tokens(dtokens, token, valid, h, H) + tl.where(last, tl.load(sums), 0.0)
    dm = load_tokens(dtokens + stride, token, valid, h, H) + tl.where(last, tl.load(sums + 1), 0.0)
    r = 1 - load_tokens(alpha, token, valid, h, H)
    e = tl.where(valid, load_tokens(eta, token, valid, h, H), 1.0)
    theta_b = load_tokens(theta, token, valid, h, H)
    A = _products(r, t, s)
    E = _products(e, t, s)
    at = (m.to(tl.int64) * H + h) * b * b + t * b + s
    dC_bb = tl.load(dC + at, mask=valid[:, None], other=0.0) + tl.where(last[:, None], dc[None, :], 0.0)
    dN = tl.dot(tl.trans(A), dC_bb, input_precision=PRECISION) + tl.where(last[:, None], dn[None, :], 0.0)
    dN = tl.where(t >= s, dN, 0.0)
    dh = tl.sum(A * dm[:, None], 0) + tl.where(last, tl.load(sums + 2), 0.0)
    dA = tl.dot(dC_bb, tl.trans(E * theta_b[None, :]), input_precision=PRECISION)
    dA = tl.where(t >= s, dA + dm[:, None] * h_b[None, :], 0.0)
    dE = dN * theta_b[None, :]
    before = (row > 0) & valid
    r_before = tl.where(before, 1 - load_tokens(alpha, token - 1, before, h, H), 1.0)
    e_before = tl.where(before, load_tokens(eta, token - 1, before, h, H), 1.0)
    beta_before = tl.cumprod(r_before, 0)
    h_before = tl.cumprod(e_before, 0)
    dA = tl.dot(tl.trans(A), dA, input_precision=PRECISION)
    dr = _through_products(A, dA, dbeta, r_before, beta_before, t, s)
    store_tokens(dalpha, -dr, token, valid, h, H)
    store_tokens(dtheta, tl.sum(dN * E, 0), token, valid, h, H)
    dE = tl.dot(tl.trans(E), dE, input_precision=PRECISION)
    de = _through_products(E, dE, dh, e_before, h_before, t, s)
    store_tokens(deta, de, token, valid, h, H)


def _warps(b: int) -> int:
    return {16: 1, 32: 2, 64: 4, 128: 8}[b]


def coefficients(alpha: Tensor, eta: Tensor, theta: Tensor, tables: Tables, b: int, precision: str) -> Gates:
    """Coefficients from alpha, eta, theta [tokens, H], float32."""
    tokens, H = alpha.shape
    M = tables.chunks.shape[0]
    C = torch.empty(M, H, b, b, dtype=torch.float32, device=alpha.device)
    out = torch.empty(5, tokens, H, dtype=torch.float32, device=alpha.device)
    launch(
        _forward, (M, H), alpha, eta, theta, C, out, tables.chunks, H, tokens,
        b=b, PRECISION=precision, warps=_warps(b),
    )  # fmt: skip
    return Gates(C, out)


def coefficients_backward(
    alpha: Tensor, eta: Tensor, theta: Tensor, gates: Gates,
    dC: Tensor, dtokens: Tensor, inner: Tensor, tables: Tables, precision: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of alpha, eta, theta.

    ``dtokens`` [2 + 2 P, tokens, H]: of beta, m, then P shares of those of c and n. ``inner`` [M, H, 3]: of
    beta, m and h of each chunk's last token. ``dC`` [M, H, b, b].
    """
    tokens, H = alpha.shape
    M, b = dC.shape[0], dC.shape[-1]
    dalpha, deta, dtheta = (torch.empty_like(alpha) for _ in range(3))
    launch(
        _backward, (M, H), alpha, eta, theta, gates.tokens, dC, dtokens, inner, dalpha, deta, dtheta,
        tables.chunks, H, tokens,
        b=b, PARTS=dtokens.shape[0] // 2 - 1, PRECISION=precision, warps=2 * _warps(b),
    )  # fmt: skip
    return dalpha, deta, dtheta
