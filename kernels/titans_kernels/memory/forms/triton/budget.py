"""Kernels of the write budget, one program per chunk and head. See `titans_kernels.memory.budget`.

The dot products of a token with its chunk's keys are summed in float32, row by row: the loop over the tokens
is inherently sequential, so a matrix product would not shorten it.

Shapes: tokens of all rows, H heads, D key width; a program has b tokens and W features, D rounded up.
"""
# Triton's language is not Python's: a constexpr is given as a number, a branch is known when compiling
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from titans_kernels.memory.forms.triton.launch import launch
from titans_kernels.memory.forms.triton.pieces import chunk_at
from titans_kernels.memory.forms.triton.tables import tables

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
def _forward(
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
def _backward(
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
    _launch(_forward, k, (k, eta, theta, *out), chunk_size, cu_seqlens, held)
    return out


def backward(tensors: list[Tensor], chunk_size: int, cu_seqlens: Tensor | None) -> list[Tensor]:
    """Gradients of k, eta and theta. ``tensors``: the gradients of theta' and e; k, eta, theta; theta', e."""
    k = tensors[2]
    grads = [torch.empty_like(x) for x in tensors[2:5]]
    _launch(_backward, k, (*tensors, *grads), chunk_size, cu_seqlens)
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
