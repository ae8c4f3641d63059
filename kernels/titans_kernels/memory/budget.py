"""The write budget: how many full steps a direction of key space is written at most within a chunk.

Gradients are frozen over a chunk, so one token repeated b times writes b steps at once: the memory overshoots
by a factor of b, and from chunk to chunk it diverges, whatever bounds each token's surprise. The budget
shrinks the steps of later tokens by what earlier tokens of the chunk have written along their keys:

    e_t = min(2 theta_t / (1 - eta_t), max(0, c - sum_{u < t} e_u |k_t . k_u|) / |k_t . k_t|)
    theta'_t = e_t (1 - eta_t) / 2

c is the budget. With 1 no direction of a linear memory overshoots, but unlike keys that overlap a little use
it up as well: later tokens of a chunk write nothing, and recall is learnt worse. With 2 it is learnt as well
as without a budget, and repeats overshoot by a bounded factor.

e_t is the effective step: the share of the way from prediction to value that a linear memory goes for a unit
key, once momentum has run out. It is a function of keys and gates alone, so every form of the operator
receives theta' in place of theta and stays as it is. A deep memory needs `surprise_bound` beside it.

Shapes: B rows, T tokens, H heads, D key width, b tokens of a chunk, p held tokens of an open chunk.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titans_kernels.memory.options import state_dtype, without_autocast
from titans_kernels.memory.parts.layout import document_borders, layout_of
from titans_kernels.native import library, numbers, parallel_for, pointer, serves

MAX_KERNEL_NUMEL = 2**14
"""Numbers in a chunk's keys up to which the Triton kernel serves."""
Held = tuple[Tensor, Tensor]
"""Of an open chunk's tokens so far: keys [B, H, p, D] and effective steps e [B, H, p]."""


def write_budget(
    k: Tensor,
    eta: Tensor,
    theta: Tensor,
    chunk_size: int,
    cu_seqlens: Tensor | None = None,
    held: Held | None = None,
    budget: float = 1.0,
) -> Tensor:
    """The steps theta' that tokens take under the write budget of their chunk.

    A token looks at itself and at earlier tokens of its chunk and head. Where its own step fits, theta' is
    theta bit for bit. A key of norm 0 writes nothing and has no limit; eta of 1 has no finite full step, so
    theta' is 0 there unless theta or the key is 0. Gradients flow to k, eta, theta and ``held``.

    Args:
        k: keys [B, T, H, D], of any norm; a full step is that of a key of norm 1.
        eta, theta: [B, T, H]; eta in [0, 1], theta >= 0.
        chunk_size: b; chunks begin where a row or a packed document does.
        cu_seqlens: [N + 1] borders of documents packed into B = 1, as in `neural_memory`.
        held: tokens of the chunk that is open where the rows begin; not with ``cu_seqlens``.
        budget: c, full steps.

    Returns:
        theta' [B, T, H], float32 (float64 for float64 keys).
    """
    return effective_steps(k, eta, theta, chunk_size, cu_seqlens, held, budget)[0]


def effective_steps(
    k: Tensor,
    eta: Tensor,
    theta: Tensor,
    chunk_size: int,
    cu_seqlens: Tensor | None = None,
    held: Held | None = None,
    budget: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`write_budget`, and the effective steps e / c [B, T, H], which an open chunk has to keep."""
    dtype, p = state_dtype(k), 0
    if 0 in k.shape[:3]:
        return theta.to(dtype), torch.zeros_like(theta, dtype=dtype)
    # steps are counted in budgets, of which what follows has one
    eta, own = eta.to(dtype), theta.to(dtype)
    theta = own / budget
    if held is not None and held[1].shape[-1]:
        keys, steps = (x.transpose(1, 2) for x in held)
        p = steps.shape[1]
        # with eta = 0 the full step of theta = e / 2 is e
        eta = torch.cat([torch.zeros_like(steps), eta], 1)
        k, theta = torch.cat([keys, k.to(keys.dtype)], 1), torch.cat([steps / 2, theta], 1)
    # the library's operator costs more than a small call: for a compiler, and shapes without values
    opaque = torch.compiler.is_compiling() or k.is_meta
    found = (budget_steps if opaque else _Steps.apply)(k, eta, theta, chunk_size, cu_seqlens, p)
    limited, e = (x[:, p:] for x in found) if p else found
    if budget != 1:
        limited = torch.where(limited == theta[:, p:], own, limited * budget)
    return limited, e


def _steps(
    k: Tensor, eta: Tensor, theta: Tensor, chunk_size: int, cu_seqlens: Tensor | None, held: int
) -> list[Tensor]:
    """theta' and e [B, T, H]; the first ``held`` tokens of each row have e = 2 theta, whatever the budget."""
    k, eta, theta = k.contiguous(), eta.contiguous(), theta.contiguous()
    if _has_kernel(k, chunk_size):
        from titans_kernels.memory.forms.triton import budget as kernels

        return kernels.forward(k, eta, theta, chunk_size, cu_seqlens, held)
    if serves(keys := k.to(theta.dtype), eta, theta):
        return _Compiled.of(keys, chunk_size, cu_seqlens, held).forward(keys, eta, theta)
    with torch.no_grad(), without_autocast(k):
        return _forward(keys, eta, theta, chunk_size, cu_seqlens, held)


def _steps_backward(tensors: list[Tensor], chunk_size: int, cu_seqlens: Tensor | None) -> list[Tensor]:
    """Gradients of k, eta and theta; ``tensors`` are those of theta' and e, then k, eta, theta, theta', e."""
    tensors = [x.contiguous() for x in tensors]
    k = tensors[2]
    if _has_kernel(k, chunk_size):
        from titans_kernels.memory.forms.triton import budget as kernels

        return kernels.backward(tensors, chunk_size, cu_seqlens)
    keys = tensors[2] = k.to(tensors[3].dtype)
    if serves(keys, *tensors[3:]):
        dk, *gates = _Compiled.of(keys, chunk_size, cu_seqlens).backward(tensors)
    else:
        with torch.no_grad(), without_autocast(k):
            dk, *gates = _backward(tensors, chunk_size, cu_seqlens)
    return [dk.to(k.dtype), *gates]


class _Steps(torch.autograd.Function):
    """`_steps` with a gradient."""

    @staticmethod
    def forward(ctx, k, eta, theta, chunk_size, cu_seqlens, held):
        found = _steps(k, eta, theta, chunk_size, cu_seqlens, held)
        _setup(ctx, (k, eta, theta, chunk_size, cu_seqlens, held), found)
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        *tensors, cu_seqlens = ctx.saved_tensors
        return *_steps_backward([*grads, *tensors], ctx.chunk_size, cu_seqlens), None, None, None


@torch.library.custom_op(
    "titans::budget_steps",
    mutates_args=(),
    schema="(Tensor k, Tensor eta, Tensor theta, int chunk_size, Tensor? cu_seqlens, int held) -> Tensor[]",
)
def budget_steps(k, eta, theta, chunk_size, cu_seqlens, held):
    """`_steps` for torch.compile, torch.export and meta tensors."""
    return _steps(k, eta, theta, chunk_size, cu_seqlens, held)


@torch.library.custom_op(
    "titans::budget_steps_backward",
    mutates_args=(),
    schema="(Tensor dlimited, Tensor de, Tensor k, Tensor eta, Tensor theta, Tensor limited, Tensor e, "
    "int chunk_size, Tensor? cu_seqlens) -> Tensor[]",
)
def budget_steps_backward(dlimited, de, k, eta, theta, limited, e, chunk_size, cu_seqlens):
    """`_steps_backward` as an operator."""
    return _steps_backward([dlimited, de, k, eta, theta, limited, e], chunk_size, cu_seqlens)


@budget_steps.register_fake
def _(k, eta, theta, *options):
    return [theta.new_empty(theta.shape), theta.new_empty(theta.shape)]


@budget_steps_backward.register_fake
def _(dlimited, de, k, eta, theta, *others):
    return [x.new_empty(x.shape) for x in (k, eta, theta)]


def _setup(ctx, inputs, output) -> None:
    k, eta, theta, ctx.chunk_size, cu_seqlens, _ = inputs
    ctx.save_for_backward(k, eta, theta, *output, cu_seqlens)


def _autograd(ctx, grads):
    *tensors, cu_seqlens = ctx.saved_tensors
    given = [torch.zeros_like(tensors[2]) if g is None else g for g in grads]
    tensors = [*given, *tensors]
    return *budget_steps_backward(*tensors, ctx.chunk_size, cu_seqlens), None, None, None


budget_steps.register_autograd(_autograd, setup_context=_setup)


def _has_kernel(k: Tensor, chunk_size: int) -> bool:
    """Whether Triton serves: a chunk's keys and their gradients have to fit a program's registers."""
    return k.is_cuda and k.dtype != torch.float64 and chunk_size * k.shape[-1] <= MAX_KERNEL_NUMEL


def _forward(
    k: Tensor, eta: Tensor, theta: Tensor, chunk_size: int, cu_seqlens: Tensor | None, held: int
) -> list[Tensor]:
    """By PyTorch's operators: one step after the other, all chunks at once."""
    layout = layout_of(k, chunk_size, cu_seqlens)
    free = torch.ones_like(theta, dtype=torch.bool)
    free[:, :held] = False
    K, moved, taken, free = (layout.split(x) for x in (k, 1 - eta, theta, free))
    free = free.bool()  # packed documents are split by `where` with a number
    G, b = (K @ K.mT).abs(), K.shape[-2]
    size = G.diagonal(dim1=-2, dim2=-1)
    counted = size >= torch.finfo(size.dtype).tiny
    moves = counted & (moved > 0)
    full = torch.where(moves, 2 * taken / torch.where(moves, moved, 1), 0)
    # products, not quotients, are compared: neither 1 - eta nor the key's size need be above 0
    wanted = torch.where(counted & free, 2 * taken * size, 0)
    size = torch.where(counted, size, 1)
    e, over = torch.zeros_like(taken), torch.zeros_like(free)
    for t in range(b):
        room = (1 - (G[..., t, :t] * e[..., :t]).sum(-1)).clamp_(min=0)
        over[..., t] = wanted[..., t] > room * moved[..., t]
        e[..., t] = torch.where(over[..., t], room / size[..., t], full[..., t])
    limited = torch.where(over, e * moved / 2, taken)
    return [layout.join(limited).contiguous(), layout.join(e).contiguous()]


def _backward(tensors: list[Tensor], chunk_size: int, cu_seqlens: Tensor | None) -> list[Tensor]:
    """By PyTorch's operators: what each e adds up to is one triangular solve.

    A limited token's e falls by G_tu / G_tt for each e_u before it, so the gradients of all e are
    ``lambda_u = g_u - sum_{t > u, t limited} lambda_t G_tu / G_tt``.
    """
    layout = layout_of(tensors[2], chunk_size, cu_seqlens)
    dlimited, de, K, eta, theta, limited, e = (layout.split(x) for x in tensors)
    moved = 1 - eta
    over = limited != theta
    product = K @ K.mT
    G = product.abs()
    size = G.diagonal(dim1=-2, dim2=-1)
    counted = size >= torch.finfo(size.dtype).tiny
    per_size = torch.where(over & (e > 0), 1 / torch.where(counted, size, 1), 0)
    L = (G * per_size[..., None]).tril(-1)
    g = de + torch.where(over, dlimited * moved / 2, 0)
    total = torch.linalg.solve_triangular(L.mT, g[..., None], upper=True, unitriangular=True)[..., 0]
    per_moved = torch.where(counted & (moved > 0), 1 / torch.where(moved > 0, moved, 1), 0)
    dtheta = torch.where(over, 0, dlimited + 2 * total * per_moved)
    deta = torch.where(over, -dlimited * e / 2, total * e * per_moved)
    dproduct = -(total * per_size)[..., None] * (e[..., None, :] * product.sign()).tril()
    dk = (dproduct + dproduct.mT) @ K
    return [layout.join(x).contiguous() for x in (dk, deta, dtheta)]


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("heads", "width", "chunk", "held")),
        ("borders", ctypes.c_void_p),
    )


class _Compiled:
    """A call of `native/budget.cpp`: a document and head at a time."""

    def __init__(self, shape: _Shape, borders: ctypes.Array, found: ctypes.CDLL):
        self.shape, self.borders, self.library = shape, borders, found

    @staticmethod
    def of(k: Tensor, chunk_size: int, cu_seqlens: Tensor | None, held: int = 0) -> _Compiled:
        B, T, H, D = k.shape
        borders = range(0, B * T + 1, T) if cu_seqlens is None else document_borders(cu_seqlens, T)
        table, found = numbers(tuple(borders)), library(k.dtype)
        assert found is not None
        return _Compiled(_Shape(H, D, min(chunk_size, T), held, ctypes.addressof(table)), table, found)

    def forward(self, k: Tensor, eta: Tensor, theta: Tensor) -> list[Tensor]:
        out = [torch.empty_like(theta), torch.empty_like(theta)]
        self._run(self.library.budget_forward, (k, eta, theta, *out))
        return out

    def backward(self, tensors: list[Tensor]) -> list[Tensor]:
        grads = [torch.empty_like(x) for x in tensors[2:5]]
        self._run(self.library.budget_backward, (*tensors, *grads))
        return grads

    def _run(self, function, tensors: tuple[Tensor, ...]) -> None:
        arguments = ctypes.byref(self.shape), *map(pointer, tensors)
        jobs = (len(self.borders) - 1) * self.shape.heads
        parallel_for(jobs, lambda *part: function(*arguments, *part))
