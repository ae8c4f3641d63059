"""Products of many tokens with small weights, and what follows each in the same pass.

In C++ on a CPU (`native/products.cpp`) if the library is available and the weights fit into a core's cache,
otherwise with PyTorch's operators. The forward keeps its inputs alone.

Shapes: T tokens in any number of dimensions, D inputs, F outputs or hidden width, V vocabulary.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from titans_kernels.layers import Partial, rms_norm
from titans_kernels.native import compiled, parallel_for, pointer, serves

MAX_BYTES = 2**19
"""Maximum bytes of a call's weights: larger ones do not stay in a core's cache beside the tokens."""
MIN_TOKENS = 32
"""Minimum number of tokens: for fewer PyTorch's operators cost less to call."""
TILE = 64
"""Tokens of a job, as in products.cpp."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x weight^T + bias``, as `torch.nn.functional.linear`.

    Args:
        x: [..., D].
        weight: [F, D].
        bias: [F], or None.
    """
    fits = bias is None or (serves(bias, x) and bias.shape == weight.shape[:1])
    if fits and _serves(x, weight):
        return _Linear.apply(x, weight, bias)  # pyright: ignore[reportReturnType]
    return F.linear(x, weight, bias)


def feed_forward(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, epsilon: float) -> Tensor:
    """Apply Llama's feed-forward layer and its residual connection: x + (silu(z gate^T) * z up^T) down^T.

    Args:
        x: [..., D]; z is its RMSNorm.
        norm: weight of the norm, [D].
        gate: [F, D].
        up: [F, D].
        down: [D, F].
        epsilon: of the norm.

    Returns:
        [..., D].
    """
    fits = gate.shape == up.shape == down.shape[::-1] and norm.shape == x.shape[-1:]
    if fits and _serves(x, gate, up, down, norm):
        return _FeedForward.apply(x, norm, gate, up, down, epsilon)  # pyright: ignore[reportReturnType]
    z = rms_norm(x, norm, epsilon)
    return x + F.linear(F.silu(F.linear(z, gate)) * F.linear(z, up), down)


def token_losses(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of the logits ``x weight^T`` with ``targets``, without a reduction, at least in float32.

    Args:
        x: [T, D].
        weight: [V, D].
        targets: [T] int64; as for `torch.nn.functional.cross_entropy`, -100 has no loss.

    Returns:
        [T], in nats.
    """
    fits = x.dim() == 2 and targets.shape == x.shape[:1] and targets.dtype == torch.int64
    fits = fits and targets.device == x.device and _serves(x, weight)
    if fits and int(targets.min()) >= 0 and int(targets.max()) < len(weight):
        return _Losses.apply(x, weight, targets)  # pyright: ignore[reportReturnType]
    logits = F.linear(x, weight)
    exact = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(exact), targets, reduction="none")


def _serves(x: Tensor, *weights: Tensor) -> bool:
    """Return True if C++ is to multiply x by the first weight.

    PyTorch's operators refuse shapes that do not fit.
    """
    return (
        not torch.compiler.is_compiling()
        and x.numel() >= MIN_TOKENS * max(1, x.shape[-1])
        and weights[0].shape[1:] == x.shape[-1:]
        and serves(x, *weights)
        and sum(w.nbytes for w in weights) <= MAX_BYTES
        and not torch.is_autocast_enabled("cpu")
    )


def outer(dy: Tensor, x: Tensor) -> Tensor:
    """``dy^T x`` [F, D], the gradient of a weight, of dy [T, F] and x [T, D] that the library `serves`."""
    shape, dweight = _Shape(len(x), x.shape[1], dy.shape[1]), Partial(x.new_empty(dy.shape[1], x.shape[1]))
    call, run = (ctypes.byref(shape), pointer(x), None, pointer(dy), None), compiled(x).linear_backward
    parallel_for(shape.jobs, lambda *jobs: run(*call, dweight.of(jobs), None, *jobs))
    return dweight.sum()


class _Shape(ctypes.Structure):
    """`Layer` and `FeedForward` of products.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "inputs", "outputs")),
        ("epsilon", ctypes.c_double),
    )

    @staticmethod
    def of(x: Tensor, weight: Tensor, epsilon: float = 0.0) -> _Shape:
        return _Shape(x.numel() // x.shape[-1], x.shape[-1], weight.shape[0], epsilon)

    @property
    def jobs(self) -> int:
        return -(-self.tokens // TILE)


class _Linear(torch.autograd.Function):
    """`linear` in C++, forward and backward."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        x, weight, bias = x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous()
        ctx.save_for_backward(x, weight, bias)
        ctx.shape, y = _Shape.of(x, weight), x.new_empty(*x.shape[:-1], weight.shape[0])
        call = ctypes.byref(ctx.shape), *map(pointer, (x, weight, bias, y))
        run = compiled(x).linear_forward
        parallel_for(ctx.shape.jobs, lambda *jobs: run(*call, *jobs))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, bias = ctx.saved_tensors
        dy, dx = dy.contiguous(), torch.empty_like(x) if ctx.needs_input_grad[0] else None
        dweight, dbias = Partial(weight), None if bias is None else Partial(bias)
        call = ctypes.byref(ctx.shape), *map(pointer, (x, weight, dy, dx))
        run = compiled(x).linear_backward
        parallel_for(
            ctx.shape.jobs,
            lambda *jobs: run(*call, dweight.of(jobs), None if dbias is None else dbias.of(jobs), *jobs),
        )
        return dx, dweight.sum(), None if dbias is None else dbias.sum()


class _FeedForward(torch.autograd.Function):
    """`feed_forward` in C++, forward and backward."""

    @staticmethod
    def forward(ctx, x, norm, gate, up, down, epsilon):
        tensors = [t.contiguous() for t in (x, norm, gate, up, down)]
        ctx.save_for_backward(*tensors)
        ctx.shape, y = _Shape.of(x, gate, epsilon), torch.empty_like(tensors[0])
        call, run = (ctypes.byref(ctx.shape), *map(pointer, (*tensors, y))), compiled(x).feed_forward
        parallel_for(ctx.shape.jobs, lambda *jobs: run(*call, *jobs))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *weights = ctx.saved_tensors
        dy, dx, grads = dy.contiguous(), torch.empty_like(x), [Partial(w) for w in weights]
        call = ctypes.byref(ctx.shape), *map(pointer, (x, *weights, dy, dx))
        run = compiled(x).feed_forward_backward
        parallel_for(ctx.shape.jobs, lambda *jobs: run(*call, *(g.of(jobs) for g in grads), *jobs))
        return dx, *(g.sum() for g in grads), None


class _Losses(torch.autograd.Function):
    """`token_losses` in C++, forward and backward."""

    @staticmethod
    def forward(ctx, x, weight, targets):
        x, weight, targets = x.contiguous(), weight.contiguous(), targets.contiguous()
        ctx.shape, losses, total = _Shape.of(x, weight), x.new_empty(len(x)), x.new_empty(len(x))
        ctx.save_for_backward(x, weight, targets, total)
        call = ctypes.byref(ctx.shape), *map(pointer, (x, weight, targets, losses, total))
        run = compiled(x).loss_forward
        parallel_for(ctx.shape.jobs, lambda *jobs: run(*call, *jobs))
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx, dlosses):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, targets, total = ctx.saved_tensors
        dx, dweight = torch.empty_like(x) if ctx.needs_input_grad[0] else None, Partial(weight)
        dlosses = dlosses.contiguous()  # of a sum's gradient a copy, which must outlive the call
        call = ctypes.byref(ctx.shape), *map(pointer, (x, weight, targets, total, dlosses, dx))
        run = compiled(x).loss_backward
        parallel_for(ctx.shape.jobs, lambda *jobs: run(*call, dweight.of(jobs), *jobs))
        return dx, dweight.sum(), None
