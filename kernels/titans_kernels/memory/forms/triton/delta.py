"""The states of a linear memory with chunks of one token (`forms/online.py`), block after block.

Of each block of b tokens the triangular systems are solved, so that its writes are affine in the state W, S
that it starts from: ``U = X - Y W - Z S``. A program carries ``[D, BV]`` of weights and momentum through all
blocks of a row in float32, and stores what the rest of the form takes for all blocks at once:

    U_i = X_i - Y_i W_i - Z_i S_i
    W_{i+1} = beta_i W_i + m_i S_i + k_i^T (c_i U_i),    S_{i+1} = h_i S_i + k_i^T (n_i U_i)

Shapes: R rows (documents x heads), n blocks of b tokens, D and F the widths of key and value.
"""
# Triton's language is not Python's: a constexpr is given as a number, a branch is known when compiling
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, library

from titans_kernels.memory.forms.triton import assembler
from titans_kernels.memory.forms.triton.launch import fake, float32_precision, launch
from titans_kernels.memory.forms.triton.pieces import INTERPRETED, add_dot, dot, tile_at
from titans_kernels.memory.options import on_gpu

BLOCKS = (16, 32, 64)
WIDTHS = (16, 32, 64, 128, 256)
KEYS = WIDTHS[:-1]
"""Widths of keys: with 256 a program spills 1.4 KB per thread."""


def refusal(key: Tensor, value: Tensor) -> str | None:
    """Return the reason for which the kernels refuse blocks with keys [R, n, b, D], values [R, n, b, F], or
    None.
    """
    if not on_gpu(key) and not INTERPRETED:
        return f"tensors are on {key.device.type}, and Triton's interpreter is off"
    if key.dtype != torch.float32:
        return f"no kernel for {key.dtype}"
    if key.shape[2] not in BLOCKS or key.shape[-1] not in KEYS or value.shape[-1] not in WIDTHS:
        return f"blocks of {key.shape[2]} tokens with widths {key.shape[-1]} and {value.shape[-1]}"
    return None if INTERPRETED or not key.is_cuda else assembler.refusal(assembler.arch_of(key.device.index))


@triton.jit
def _forward(
    x, y, z, k, writes, ends, start, states, written, n, rows,
    D: tl.constexpr, F: tl.constexpr, BV: tl.constexpr, b: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    r, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, key = tl.arange(0, b), tl.arange(0, D)
    column = part * BV + tl.arange(0, BV)
    blocks = tl.cast(rows, tl.int64) * n
    by_key, by_value, cell = tile_at(row, key, D), tile_at(row, column, F), tile_at(key, column, F)
    W = tl.load(start + r * 2 * D * F + cell)
    S = tl.load(start + r * 2 * D * F + D * F + cell)
    for i in range(n):
        at = r * n + i
        to = states + (at + r) * 2 * D * F + cell
        tl.store(to, W)
        tl.store(to + D * F, S)
        token = at * b
        U = tl.load(x + token * F + by_value)
        U -= dot(tl.load(y + token * D + by_key), W, tl.float32, PRECISION)
        U -= dot(tl.load(z + token * D + by_key), S, tl.float32, PRECISION)
        tl.store(written + token * F + by_value, U)
        keys = tl.trans(tl.load(k + token * D + by_key))
        c = tl.load(writes + token + row)[:, None]
        share = tl.load(writes + blocks * b + token + row)[:, None]
        W = tl.load(ends + at) * W + tl.load(ends + blocks + at) * S
        W = add_dot(W, keys, c * U, tl.float32, PRECISION)
        S = add_dot(tl.load(ends + 2 * blocks + at) * S, keys, share * U, tl.float32, PRECISION)
    to = states + ((r + 1) * (n + 1) - 1) * 2 * D * F + cell
    tl.store(to, W)
    tl.store(to + D * F, S)


@triton.jit
def _backward(
    y, z, k, writes, ends, dstates, dwritten, dafter, dx, dstart, n, rows,
    D: tl.constexpr, F: tl.constexpr, BV: tl.constexpr, b: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    r, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, key = tl.arange(0, b), tl.arange(0, D)
    column = part * BV + tl.arange(0, BV)
    blocks = tl.cast(rows, tl.int64) * n
    by_key, by_value, cell = tile_at(row, key, D), tile_at(row, column, F), tile_at(key, column, F)
    of = dstates + ((r + 1) * (n + 1) - 1) * 2 * D * F + cell
    dW = tl.load(of)
    dS = tl.load(of + D * F)
    for i in range(n):
        at = r * n + n - 1 - i
        to = dafter + at * 2 * D * F + cell
        tl.store(to, dW)
        tl.store(to + D * F, dS)
        token = at * b
        keys = tl.load(k + token * D + by_key)
        c = tl.load(writes + token + row)[:, None]
        share = tl.load(writes + blocks * b + token + row)[:, None]
        dU = tl.load(dwritten + token * F + by_value)
        dU += c * dot(keys, dW, tl.float32, PRECISION) + share * dot(keys, dS, tl.float32, PRECISION)
        tl.store(dx + token * F + by_value, dU)
        of = dstates + (at + r) * 2 * D * F + cell
        dS = tl.load(ends + 2 * blocks + at) * dS + tl.load(ends + blocks + at) * dW + tl.load(of + D * F)
        dW = tl.load(ends + at) * dW + tl.load(of)
        dW = add_dot(dW, tl.trans(tl.load(y + token * D + by_key)), -dU, tl.float32, PRECISION)
        dS = add_dot(dS, tl.trans(tl.load(z + token * D + by_key)), -dU, tl.float32, PRECISION)
    tl.store(dstart + r * 2 * D * F + cell, dW)
    tl.store(dstart + r * 2 * D * F + D * F + cell, dS)


def _launch(kernel, *tensors: Tensor, like: Tensor, keys: Tensor) -> None:
    """``like`` [R, n, b, F] and ``keys`` [R, n, b, D] have the sizes."""
    (rows, n, b, D), F = keys.shape, like.shape[-1]
    # with twice the columns a program of D = 64 or 128 spills 0.4 KB per thread instead of 0 or 0.1
    BV = 16 if D >= 64 else min(F, 2048 // D)
    launch(kernel, (rows, F // BV), *tensors, n, rows, D=D, F=F, BV=BV, b=b, PRECISION=float32_precision(),
           warps=8 if D == 128 else 4, stages=2)  # fmt: skip


@library.custom_op("titans::delta_states", mutates_args=())
def delta_states(
    x: Tensor, y: Tensor, z: Tensor, k: Tensor, writes: Tensor, ends: Tensor, start: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the states [R, n + 1, 2 D, F] before each block and after the last one, and U [R, n, b, F].

    Args:
        x: [R, n, b, F].
        y: [R, n, b, D].
        z: [R, n, b, D].
        k: keys, [R, n, b, D].
        writes: c and n, [2, R, n, b].
        ends: beta, m and h of each block's last token, [3, R, n].
        start: the state before the first block, [R, 2 D, F].

    All are float32.
    """
    states = x.new_empty(x.shape[0], x.shape[1] + 1, *start.shape[1:])
    x, y, z, k, writes, ends, start = (t.contiguous() for t in (x, y, z, k, writes, ends, start))
    written = torch.empty_like(x)
    _launch(_forward, x, y, z, k, writes, ends, start, states, written, like=x, keys=k)
    return states, written


@library.custom_op("titans::delta_states_backward", mutates_args=())
def delta_states_backward(
    y: Tensor, z: Tensor, k: Tensor, writes: Tensor, ends: Tensor, dstates: Tensor, dwritten: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the state after each block [R, n, 2 D, F], of x and of start."""
    y, z, k, writes, ends, dstates, dwritten = (
        t.contiguous() for t in (y, z, k, writes, ends, dstates, dwritten)
    )
    dafter, dx = torch.empty_like(dstates[:, 1:]), torch.empty_like(dwritten)
    dstart = torch.empty_like(dstates[:, 0])
    given = y, z, k, writes, ends, dstates, dwritten, dafter, dx, dstart
    _launch(_backward, *given, like=dx, keys=k)
    return dafter, dx, dstart


delta_states.register_fake(fake(delta_states._init_fn))
delta_states_backward.register_fake(fake(delta_states_backward._init_fn))


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[1:6], *output)


def _autograd(ctx, dstates: Tensor, dwritten: Tensor):
    y, z, k, writes, ends, states, written = ctx.saved_tensors
    dafter, dx, dstart = torch.ops.titans.delta_states_backward(y, z, k, writes, ends, dstates, dwritten)
    before, D = states[:, :-1], k.shape[-1]
    dy, dz = (-dx @ before.mT).split(D, -1)
    parts = dafter.split(D, 2)  # of weights and momentum, each [R, n, D, F]
    dk = sum((share[..., None] * written) @ part.mT for share, part in zip(writes, parts, strict=True))
    dwrites = torch.stack([((k @ part) * written).sum(-1) for part in parts])
    W, S = before.split(D, 2)
    pairs = (parts[0], W), (parts[0], S), (parts[1], S)
    dends = torch.stack([(part * state).sum((-2, -1)) for part, state in pairs])
    return dx, dy, dz, dk, dwrites, dends, dstart


delta_states.register_autograd(_autograd, setup_context=_setup_context)
