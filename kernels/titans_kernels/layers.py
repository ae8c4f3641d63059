"""Fused layers around the memory: the short convolution with its normalisation, and gated RMSNorm.

In C++ on a CPU if the library is available (`titans_kernels.native`), otherwise with PyTorch's operators.

Shapes: B batch, T tokens, K convolution width, G parts (q, k, v) of H heads of width E, C = G H E channels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from titans_kernels.memory.parts.layout import document_borders
from titans_kernels.native import compiled, numbers, parallel_for, pointer, pointers, serves

NORM_EPS = 1e-6
"""Lower bound of the norm by which a vector is divided."""


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, gate: Tensor | None = None) -> Tensor:
    """RMSNorm: x / rms(x) * weight, times silu(gate) if a gate is given.

    Args:
        x: [..., D].
        weight: [D].
        epsilon: added to the mean square of x.
        gate: [..., D], or None.

    Returns:
        [..., D]; in the dtype of ``gate`` if one is given.
    """
    fits = weight.shape == x.shape[-1:] and (gate is None or gate.shape == x.shape)
    if fits and serves(x, weight) and (gate is None or serves(gate, x)):
        return _Norm.apply(x, weight, gate, epsilon)  # pyright: ignore[reportReturnType]
    y = F.rms_norm(x, weight.shape, weight.to(x.dtype), epsilon)
    return y if gate is None else y.to(gate.dtype) * F.silu(gate)


class _Norm(torch.autograd.Function):
    """`rms_norm` in C++, forward and backward."""

    @staticmethod
    def forward(ctx, x, weight, gate, epsilon):
        x, weight, gate = x.contiguous(), weight.contiguous(), None if gate is None else gate.contiguous()
        ctx.save_for_backward(x, weight, gate)
        ctx.epsilon, y = epsilon, torch.empty_like(x)
        shape, tensors = _norm_shape(x, epsilon), [pointer(t) for t in (x, weight, gate, y)]
        forward = compiled(x).norm_forward
        parallel_for(x.numel() // x.shape[-1], lambda *rows: forward(*shape, *tensors, *rows))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, gate = ctx.saved_tensors
        dy, dx, dgate = dy.contiguous(), torch.empty_like(x), None if gate is None else torch.empty_like(gate)
        shape, dweight = _norm_shape(x, ctx.epsilon), Partial(weight)
        before, after = [pointer(t) for t in (x, weight, gate, dy, dx)], pointer(dgate)
        backward = compiled(x).norm_backward
        parallel_for(
            x.numel() // x.shape[-1], lambda *rows: backward(*shape, *before, dweight.of(rows), after, *rows)
        )
        return dx, dweight.sum(), dgate, None


def short_convolution(
    x: Tensor,
    weight_KC: Tensor,
    state: Tensor,
    parts: Sequence[bool],
    heads: int,
    cu_seqlens: Tensor | None = None,
) -> list[Tensor] | None:
    """SiLU, causal depthwise convolution and L2 normalisation per head, from x to q, k and v.

    Computes ``y_t = sum_j weight_j silu(x)_{t-j}`` and scales the heads of the selected parts to norm 1.

    Args:
        x: [B, T, C], the concatenated projections to q, k and v.
        weight_KC: convolution weights, [K, C].
        state: inputs before each row, after silu, [B, K - 1, C]; [1, K - 1, C] for packed documents.
        parts: for each part, whether to normalise its heads.
        heads: number of heads per part.
        cu_seqlens: cumulative lengths of documents packed into the flattened batch; each starts from
            ``state``.

    Returns:
        The parts, [B, T, H, E] each; None if the C++ library does not support the call or x is empty.
    """
    if not x.numel() or not serves(x, weight_KC, state):
        return None
    B, T = x.shape[:2]
    borders = tuple(range(0, B * T + 1, T)) if cu_seqlens is None else document_borders(cu_seqlens, B * T)
    state = state.expand(len(borders) - 1, -1, -1)
    return list(_Mix.apply(x, weight_KC, state, tuple(parts), heads, borders))  # pyright: ignore[reportGeneralTypeIssues]


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kernel", "parts", "heads", "width", "unit")),
        ("least", ctypes.c_double),
        ("borders", ctypes.c_void_p),
        ("state_stride", ctypes.c_int64),
    )


class _Mix(torch.autograd.Function):
    """`short_convolution` in C++, forward and backward."""

    @staticmethod
    def forward(ctx, x, weight, state, parts, heads, borders):
        x, weight = x.contiguous(), weight.contiguous()
        state = state if state[0].is_contiguous() else state.contiguous()
        width, held = x.shape[-1] // len(parts) // heads, numbers(borders)
        unit = sum(1 << i for i, scaled in enumerate(parts) if scaled)
        shape = _Shape(
            weight.shape[0], len(parts), heads, width, unit, NORM_EPS, ctypes.addressof(held),
            state.stride(0) if len(state) > 1 else 0,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, state)
        ctx.shape, ctx.borders = shape, held
        out = [x.new_empty(*x.shape[:-1], heads, width) for _ in parts]
        tensors = [ctypes.byref(shape), *map(pointer, (x, weight, state)), pointers(out)]
        forward = compiled(x).mix_forward
        parallel_for(len(borders) - 1, lambda *rows: forward(*tensors, *rows))
        return tuple(out)

    @staticmethod
    @once_differentiable
    def backward(ctx, *douts):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, state = ctx.saved_tensors
        dx, dstate, dweight = torch.empty_like(x), x.new_empty(state.shape), Partial(weight)
        douts = [g.contiguous() for g in douts]
        before = [ctypes.byref(ctx.shape), *map(pointer, (x, weight, state)), pointers(douts), pointer(dx)]
        after, backward = pointer(dstate), compiled(x).mix_backward
        parallel_for(len(ctx.borders) - 1, lambda *rows: backward(*before, dweight.of(rows), after, *rows))
        return dx, dweight.sum(), dstate, None, None, None


class Partial:
    """A gradient accumulated in one tensor per thread."""

    def __init__(self, like: Tensor):
        self.like, self.parts = like, {}

    def of(self, rows: Sequence[ctypes.c_int64]) -> ctypes.c_void_p:
        part = self.parts[rows[0].value] = torch.zeros_like(self.like)
        return pointer(part)

    def sum(self) -> Tensor:
        first, *rest = (self.parts[key] for key in sorted(self.parts))
        for part in rest:
            first += part
        return first


def _norm_shape(x: Tensor, epsilon: float) -> tuple[ctypes.c_int64, ctypes.c_double]:
    return ctypes.c_int64(x.shape[-1]), ctypes.c_double(epsilon)
