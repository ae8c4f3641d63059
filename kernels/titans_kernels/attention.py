"""Attention within a window and to persistent tokens in C++ (`native/attention.cpp`): one call for all rows.

PyTorch's form of it (`titans_core.attention`) copies queries, keys and values into blocks of twice the
window, and into twice the width where there are persistent tokens.

Shapes: B batch, T tokens, N rows or packed documents, H heads, E head width, P persistent tokens, S keys held
from before the call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titans_kernels.memory.parts.layout import document_borders
from titans_kernels.native import compiled, numbers, parallel_for, pointer, serves

MAX_SPAN = 512
"""Maximum number of keys that a query sees: for more PyTorch's operators are faster."""

Pair = tuple[Tensor, Tensor]


class WindowOptions(NamedTuple):
    """The options of a call."""

    window: int | None
    """Number of keys that a token sees, its own among them; None for all."""
    keep: int
    """How many of the last keys are returned, at most S + T; 0 for packed documents."""
    rotary: Pair | None
    """Cosine and sine at each token's position in its row or document, [T, E / 2]."""
    held_B: Tensor | None = None
    """[B] int64, how many of the last held keys a row sees; None for all."""
    cu_seqlens: Tensor | None = None
    """Cumulative lengths of documents packed into the flattened batch."""


def serves_window(q: Tensor, others: Sequence[Tensor], window: int | None, held: int) -> bool:
    """Whether the library supports a call for q [B, T, H, E], and is faster than PyTorch's operators.

    ``others`` are the other tensors of the call, ``held`` the number of cached keys.
    """
    T, E = q.shape[1], q.shape[-1]
    visible_keys = held + T if window is None else min(window, held + T)
    return T > 1 and E % 2 == 0 and visible_keys <= MAX_SPAN and bool(q.numel()) and serves(q, *others)


def attend_window(
    q: Tensor, k: Tensor, v: Tensor, scale_H: Tensor, options: WindowOptions,
    prefix: Pair | None = None, held: Pair | None = None,
) -> tuple[Tensor, Pair]:  # fmt: skip
    """Softmax attention of each token to the tokens of its window, and to the prefix without positions.

    Args:
        q: queries, not yet rotated, [B, T, H, E].
        k: keys, not yet rotated, [B, T, H, E].
        v: values, [B, T, H, E].
        scale_H: factor of the scores, [H].
        options: as in `WindowOptions`.
        prefix: keys and values that every token sees, [1, H, P, E]; scored with queries as given.
        held: rotated keys and values of the tokens before each row, [B, H, S, E].

    Returns:
        [B, T, H, E], and the last ``keep`` keys, rotated, and values [N, H, keep, E].
    """
    B, T, H, E = q.shape
    cu_seqlens = options.cu_seqlens
    borders = tuple(range(0, B * T + 1, T)) if cu_seqlens is None else document_borders(cu_seqlens, B * T)
    none = q.new_empty(1, H, 0, E)
    given = q, k, v, scale_H.to(q.dtype), *(prefix or (none, none)), *(held or (none, none))
    if options.held_B is not None:
        options = options._replace(held_B=options.held_B.expand(B).contiguous())
    y, *after = _Attend.apply(borders, options, *given)  # pyright: ignore[reportGeneralTypeIssues]
    return y, (after[0], after[1])


class _Window(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("heads", "width", "window", "prefix", "before", "after")),
        *((name, ctypes.c_void_p) for name in ("borders", "held")),
    )


class _Given(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in ("q", "k", "v", "prefix_k", "prefix_v", "scale", "cos", "sin", "before_k", "before_v")
    )


def _call(borders: ctypes.Array, o: WindowOptions, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
    q, k, v, scale, prefix_k, prefix_v, before_k, before_v = tensors
    S, longest = before_k.shape[2], q.shape[1]
    window = _Window(
        *q.shape[2:], o.window or S + longest, prefix_k.shape[2], S, o.keep, ctypes.addressof(borders),
        pointer(o.held_B),
    )  # fmt: skip
    cos, sin = o.rotary or (None, None)
    given = q, k, v, prefix_k, prefix_v, scale, cos, sin, before_k, before_v
    return ctypes.byref(window), ctypes.byref(_Given(*map(pointer, given)))


class _Attend(torch.autograd.Function):
    """`attend_window`, forward and backward; arguments are q, k, v, scale, prefix and held."""

    @staticmethod
    def forward(ctx, borders, options, *tensors):
        ctx.set_materialize_grads(False)
        tensors, q = [t.contiguous() for t in tensors], tensors[0]
        if options.rotary is not None:
            options = options._replace(rotary=tuple(t.contiguous() for t in options.rotary))
        ctx.save_for_backward(*tensors)
        ctx.borders, ctx.options = numbers(borders), options
        ctx.documents = N = len(borders) - 1
        after = [q.new_empty(N, q.shape[2], options.keep, q.shape[3]) for _ in range(2)]
        y = torch.empty_like(tensors[0])
        call = *_call(ctx.borders, options, tensors), *map(pointer, (y, *after))
        run = compiled(q).window_forward
        parallel_for(N * q.shape[2], lambda *jobs: run(*call, *jobs))
        return y, *after

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, *dcache):  # pyright: ignore[reportIncompatibleMethodOverride]
        tensors = ctx.saved_tensors
        q, *_ = tensors
        fixed = tensors[4:]
        N, H = ctx.documents, q.shape[2]
        dy = torch.zeros_like(q) if dy is None else dy.contiguous()
        # gradients of the returned key-value cache; packed documents return none
        dcache = [None if d is None or not ctx.options.keep else d.contiguous() for d in dcache]
        dq, dk, dv = (torch.empty_like(q) for _ in range(3))
        dprefix, dscale = [q.new_empty(N, *x.shape[1:]) for x in fixed[:2]], q.new_empty(N, H)
        dbefore = [torch.empty_like(x) for x in fixed[2:]]
        call = _call(ctx.borders, ctx.options, tensors)
        call = *call, *map(pointer, (dy, *dcache, dq, dk, dv, *dprefix, dscale, *dbefore))
        run = compiled(q).window_backward
        parallel_for(N * H, lambda *jobs: run(*call, *jobs))
        dprefix = [d.sum(0, keepdim=True) for d in dprefix]
        return None, None, dq, dk, dv, dscale.sum(0), *dprefix, *dbefore
