"""Kernels of the write budget, which lowers theta (`titans_kernels.memory.budget`).

Dot products of keys are matrix products on tensor cores, in blocks of 16 tokens. What is left to do token by
token is one column of a block's 16 x 16 products each: ``used`` [16] is what earlier tokens have written
along the block's keys, and a token's step is final when all before it have been added.

A chunk of a head is one program of one warp; the keys' gradient is a kernel of its own, since it is not
sequential. Shapes: tokens of all rows, H heads, D key width; TILES of W features, D rounded up to a power of
2, or as many as a warp's registers take.
"""
# Triton's language is not Python's: a constexpr is given as a number, a branch is known when compiling
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from titans_kernels.memory.forms.triton.launch import float32_precision, launch
from titans_kernels.memory.forms.triton.pieces import add_dot, chunk_at, dot, load_tokens, store_tokens
from titans_kernels.memory.forms.triton.tables import tables

_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_EDGE = tl.constexpr(32 * torch.finfo(torch.float32).eps)  # `parts.passes.edge`
_BLOCK = tl.constexpr(16)
TILE_BYTES = 512
"""Maximum size of a key in the registers of a warp that holds 16; wider ones go through in tiles of half."""


@triton.jit
def _keys(k, t, row, valid, h, H, D, column):
    """Keys [rows, W] of tokens t + row."""
    at = ((tl.cast(t, tl.int64) + row) * H + h)[:, None] * D + column[None, :]
    return tl.load(k + at, mask=valid[:, None] & (column < D)[None, :], other=0.0)


@triton.jit
def _products(
    K, k, t, valid, u, others, row, h, H, D, column, W: tl.constexpr, TILES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Products of the keys of tokens t + row, whose first tile is ``K``, with the keys of tokens u + row."""
    TYPE: tl.constexpr = k.dtype.element_ty
    products = dot(K, tl.trans(_keys(k, u, row, others, h, H, D, column)), TYPE, PRECISION)
    for i in range(1, TILES):
        tile = i * W + column
        left = _keys(k, t, row, valid, h, H, D, tile)
        products += dot(left, tl.trans(_keys(k, u, row, others, h, H, D, tile)), TYPE, PRECISION)
    return products


@triton.jit
def _forward(
    k, eta, theta, limited, steps, chunks, length, H, D, held, chunk_size: tl.constexpr, W: tl.constexpr,
    TILES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    first, count = chunk_at(chunks, tl.program_id(0), length, chunk_size)
    h = tl.program_id(1)
    row, column = tl.arange(0, _BLOCK), tl.arange(0, W)
    held_tokens = tl.where(first % length < chunk_size, held, 0)
    for i in range(0, count, _BLOCK):
        t = first + i
        valid = i + row < count
        K = _keys(k, t, row, valid, h, H, D, column)
        used = tl.zeros((_BLOCK,), tl.float32)
        for j in range(0, i, _BLOCK):
            every = row < _BLOCK
            G = _products(
                K, k, t, valid, first + j, every, row, h, H, D, column, W, TILES, PRECISION
            )  # fmt: skip
            e = load_tokens(steps, first + j, row, every, h, H)
            used += tl.sum(tl.abs(G) * e[None, :], 1)
        G = tl.abs(_products(K, k, t, valid, t, valid, row, h, H, D, column, W, TILES, PRECISION))
        size = tl.sum(tl.where(row[:, None] == row[None, :], G, 0.0), 1)
        G = tl.where(row[:, None] > row[None, :], G, 0.0)
        counted = size >= _TINY
        moved = 1 - load_tokens(eta, t, row, valid, h, H)
        taken = load_tokens(theta, t, row, valid, h, H)
        wanted = tl.where(counted & (i + row >= held_tokens), 2 * taken * size, 0.0)
        full = tl.where(counted & (moved > 0), 2 * taken / tl.where(moved > 0, moved, 1.0), 0.0)
        per_size = 1 / tl.where(counted, size, 1.0)
        for u in range(_BLOCK):
            room = tl.where(1 - used > _EDGE, 1 - used, 0.0)
            now = tl.where(wanted > (room + _EDGE) * moved, room * per_size, full)
            used += tl.sum(tl.where(row == u, now, 0.0)) * tl.sum(tl.where(row[None, :] == u, G, 0.0), 1)
        room = tl.where(1 - used > _EDGE, 1 - used, 0.0)
        over = wanted > (room + _EDGE) * moved
        now = tl.where(over, room * per_size, full)
        store_tokens(steps, now, t, row, valid, h, H)
        store_tokens(limited, tl.where(over, now * moved / 2, taken), t, row, valid, h, H)
        tl.debug_barrier()


@triton.jit
def _backward(
    dlimited, dsteps, k, eta, theta, limited, steps, deta, dtheta, shares, chunks, length, H, D,
    chunk_size: tl.constexpr, W: tl.constexpr, TILES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``shares`` [tokens, H]: the gradient of each limited token's step over its key's squared norm."""
    first, count = chunk_at(chunks, tl.program_id(0), length, chunk_size)
    h = tl.program_id(1)
    row, column = tl.arange(0, _BLOCK), tl.arange(0, W)
    blocks = (count + _BLOCK - 1) // _BLOCK
    for n in range(blocks):
        i = (blocks - 1 - n) * _BLOCK
        t = first + i
        valid = i + row < count
        K = _keys(k, t, row, valid, h, H, D, column)
        total = load_tokens(dsteps, t, row, valid, h, H)
        for j in range(i + _BLOCK, count, _BLOCK):
            later = j + row < count
            G = _products(
                K, k, t, valid, first + j, later, row, h, H, D, column, W, TILES, PRECISION
            )  # fmt: skip
            share = load_tokens(shares, first + j, row, later, h, H)
            total -= tl.sum(tl.abs(G) * share[None, :], 1)
        G = tl.abs(_products(K, k, t, valid, t, valid, row, h, H, D, column, W, TILES, PRECISION))
        size = tl.sum(tl.where(row[:, None] == row[None, :], G, 0.0), 1)
        G = tl.where(row[:, None] < row[None, :], G, 0.0)
        counted = size >= _TINY
        moved = 1 - load_tokens(eta, t, row, valid, h, H)
        taken = load_tokens(theta, t, row, valid, h, H)
        own = load_tokens(steps, t, row, valid, h, H)
        g = load_tokens(dlimited, t, row, valid, h, H)
        over = load_tokens(limited, t, row, valid, h, H) != taken
        per_size = tl.where(over & (own > 0), 1 / tl.where(counted, size, 1.0), 0.0)
        half = g * moved / 2
        for u in range(_BLOCK):
            share = (total + half) * per_size
            at_u = tl.sum(tl.where(row == _BLOCK - 1 - u, share, 0.0))
            total -= at_u * tl.sum(tl.where(row[None, :] == _BLOCK - 1 - u, G, 0.0), 1)
        per_moved = tl.where(counted & (moved > 0), 1 / tl.where(moved > 0, moved, 1.0), 0.0)
        store_tokens(shares, (total + half) * per_size, t, row, valid, h, H)
        store_tokens(dtheta, tl.where(over, 0.0, g + 2 * total * per_moved), t, row, valid, h, H)
        deta_now = tl.where(over, -g * own / 2, total * own * per_moved)
        store_tokens(deta, deta_now, t, row, valid, h, H)
        tl.debug_barrier()


@triton.jit
def _keys_backward(
    k, steps, shares, dk, chunks, length, H, D, chunk_size: tl.constexpr, b: tl.constexpr, W: tl.constexpr,
    TILES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``dk = -(sign(K K^T) * (X + X^T)) K`` with ``X_tu = share_t e_u`` for u <= t.

    A program has b tokens and one tile of their features.
    """
    first, count = chunk_at(chunks, tl.program_id(0), length, chunk_size)
    h, i = tl.program_id(1), tl.program_id(2) // TILES * b
    TYPE: tl.constexpr = k.dtype.element_ty
    # shares may exceed the range of float16
    WIDE: tl.constexpr = TYPE if TYPE != tl.float16 else tl.float32  # noqa: SIM300  # pyright: ignore[reportAssignmentType]
    row, column = tl.arange(0, b), tl.arange(0, W)
    own = tl.program_id(2) % TILES * W + column
    valid = i + row < count
    K = _keys(k, first + i, row, valid, h, H, D, column)
    e = load_tokens(steps, first + i, row, valid, h, H)
    share = load_tokens(shares, first + i, row, valid, h, H)
    dK = tl.zeros((b, W), tl.float32)
    for j in range(0, count, b):
        others = j + row < count
        e_j = load_tokens(steps, first + j, row, others, h, H)
        share_j = load_tokens(shares, first + j, row, others, h, H)
        product = _products(
            K, k, first + i, valid, first + j, others, row, h, H, D, column, W, TILES, PRECISION
        )  # fmt: skip
        x = tl.where((i + row)[:, None] >= (j + row)[None, :], share[:, None] * e_j[None, :], 0.0)
        x += tl.where((i + row)[:, None] <= (j + row)[None, :], e[:, None] * share_j[None, :], 0.0)
        x = tl.where(product > 0, -x, tl.where(product < 0, x, 0.0))
        dK = add_dot(dK, x, _keys(k, first + j, row, others, h, H, D, own), WIDE, PRECISION)
    to = dk + ((tl.cast(first + i, tl.int64) + row) * H + h)[:, None] * D + own[None, :]
    tl.store(to, dK.to(dk.dtype.element_ty), mask=valid[:, None] & (own < D)[None, :])


def forward(
    k: Tensor, eta: Tensor, theta: Tensor, chunk_size: int, cu_seqlens: Tensor | None, held: int
) -> list[Tensor]:
    """theta' and e [B, T, H] of contiguous k [B, T, H, D], eta and theta."""
    B, T, H, D = k.shape
    layout = tables(B, T, cu_seqlens, chunk_size, k.device)
    out = [torch.empty_like(theta), torch.empty_like(theta)]
    launch(
        _forward, (layout.M, H), k, eta, theta, *out, layout.chunks, max(layout.length, 1), H, D, held,
        chunk_size=chunk_size, **_features(k), PRECISION=float32_precision(), warps=1,
    )  # fmt: skip
    return out


def backward(tensors: list[Tensor], chunk_size: int, cu_seqlens: Tensor | None) -> list[Tensor]:
    """Gradients of k, eta and theta. ``tensors``: the gradients of theta' and e; k, eta, theta; theta', e."""
    k, eta, theta, _, steps = tensors[2:]
    B, T, H, D = k.shape
    layout = tables(B, T, cu_seqlens, chunk_size, k.device)
    dk, deta, dtheta, shares = (torch.empty_like(x) for x in (k, eta, theta, theta))
    features = _features(k)
    options = {"chunk_size": chunk_size, "PRECISION": float32_precision(), **features}
    launch(
        _backward, (layout.M, H), *tensors, deta, dtheta, shares, layout.chunks, max(layout.length, 1), H, D,
        warps=1, **options,
    )  # fmt: skip
    largest = 64
    if k.element_size() == 4:  # float32 operands are split into parts
        largest = 32 if D <= 64 else 16
    b = max(16, min(largest, triton.next_power_of_2(chunk_size)))
    programs = triton.cdiv(chunk_size, b) * features["TILES"]
    launch(
        _keys_backward, (layout.M, H, programs), k, steps, shares, dk, layout.chunks, max(layout.length, 1),
        H, D, b=b, warps=4, **options,
    )  # fmt: skip
    return [dk, deta, dtheta]


def _features(k: Tensor) -> dict[str, int]:
    """Widths of a tile of a key and number of tiles."""
    D, most = k.shape[-1], TILE_BYTES // k.element_size()
    W = max(16, triton.next_power_of_2(D) if most >= D else most // 2)
    return {"W": W, "TILES": triton.cdiv(D, W)}
