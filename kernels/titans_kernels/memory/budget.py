"""The write budget: the maximum number of full steps along a direction of key space within a chunk.

Gradients are frozen over a chunk, so one token repeated b times writes b steps at once: the memory overshoots
by a factor of b and diverges from chunk to chunk, even if each token's surprise is bounded. The budget
shrinks the step of a token by what earlier tokens of the chunk have written along its key:

    e_t = min(2 theta_t / (1 - eta_t), max(0, c - sum_{u < t} e_u |k_t . k_u|) / |k_t . k_t|)
    theta'_t = e_t (1 - eta_t) / 2

c is the budget. With c = 1 no direction of a linear memory overshoots, but distinct keys that overlap a
little also use it up: later tokens of a chunk write nothing, and recall suffers. With c = 2 recall is as good
as without a budget, and repeated tokens overshoot by a bounded factor.

e_t is the effective step: the fraction of the distance from prediction to value that a linear memory covers
for a unit key once momentum has decayed. It depends only on keys and gates, so every form of the operator
receives theta' in place of theta and needs no change. A deep memory also needs `surprise_bound`.

Both limits have another gradient on either side. A step that exactly fits counts as fitting: theta' = theta
and no gradient to keys and earlier tokens. A budget that is exactly used up counts as exceeded: theta' = 0
and no gradient at all. "Exactly" is within `edge`, a few roundings: in a run of one repeated key the sum is
at its limit up to rounding, which must not choose the gradient. Orthogonal keys have no gradient through
their product (sign(0) = 0), and neither has a key of norm 0.

Shapes: B batch, T tokens, H heads, D key width, b tokens per chunk, p tokens already in an open chunk.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch import library as operators
from torch.autograd.function import once_differentiable

from titans_kernels.memory.options import state_dtype, without_autocast
from titans_kernels.memory.parts.layout import document_borders, layout_of
from titans_kernels.memory.parts.passes import edge
from titans_kernels.native import library, numbers, parallel_for, pointer, serves

Held = tuple[Tensor, Tensor]
"""Keys [B, H, p, D] and effective steps e [B, H, p] of the tokens already in the open chunk."""


def write_budget(
    k: Tensor,
    eta: Tensor,
    theta: Tensor,
    chunk_size: int,
    cu_seqlens: Tensor | None = None,
    held: Held | None = None,
    budget: float = 1.0,
) -> Tensor:
    """Step sizes theta' limited by the write budget of each chunk.

    A token's limit depends on itself and on earlier tokens of its chunk and head. If its step fits into the
    budget, theta' equals theta bit for bit. A key of norm 0 writes nothing and is not limited. For eta = 1 no
    full step is finite, so theta' is 0 unless theta or the key is 0. Gradients flow to k, eta, theta and
    ``held``. Where eta or theta is per column, the step of a token is the largest of its columns', and all
    columns shrink by one factor.

    Args:
        k: keys [B, T, H, D] of any norm; a full step is the step of a key of norm 1.
        eta: momentum in [0, 1], [B, T, H], or per column [B, T, H, A].
        theta: step size, at least 0, [B, T, H] or [B, T, H, A].
        chunk_size: b; chunks start at the start of each row or packed document.
        cu_seqlens: [N + 1] cumulative lengths of documents packed into B = 1, as in `neural_memory`.
        held: keys and effective steps of the tokens already in the open chunk; not with ``cu_seqlens``.
        budget: c, in full steps.

    Returns:
        theta' in the shape of theta, float32 (float64 for float64 keys).
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
    """`write_budget`, and the effective steps e / c [B, T, H], which are part of an open chunk's state."""
    dtype, p = state_dtype(k), 0
    for name, x in (("eta", eta), ("theta", theta)):
        if x.shape[:3] != k.shape[:3]:
            raise ValueError(f"{name}: {list(x.shape)} does not fit keys {list(k.shape)}")
    if 0 in k.shape[:3]:
        return theta.to(dtype), k.new_zeros(k.shape[:3], dtype=dtype)
    if k.ndim in (eta.ndim, theta.ndim):
        eta, theta = eta.to(dtype), theta.to(dtype)
        moved, own = (x if x.ndim == k.ndim else x[..., None] for x in (1 - eta, theta))
        full = (own / moved.clamp(min=torch.finfo(dtype).eps)).amax(-1)
        limited, e = effective_steps(k, torch.zeros_like(full), full, chunk_size, cu_seqlens, held, budget)
        part = torch.where(full > 0, limited / torch.where(full > 0, full, 1), 1)
        return theta * (part[..., None] if theta.ndim == k.ndim else part), e
    # normalise steps by the budget, so that the code below works with a budget of 1
    eta, own = eta.to(dtype), theta.to(dtype)
    theta = own / budget
    if held is not None and held[1].shape[-1]:
        keys, steps = (x.transpose(1, 2) for x in held)
        if keys.shape != (len(k), steps.shape[1], *k.shape[2:]) or steps.shape != keys.shape[:3]:
            raise ValueError(f"held: keys {list(held[0].shape)} do not fit keys {list(k.shape)}")
        p = steps.shape[1]
        # with eta = 0 the full step of theta = e / 2 is e
        eta = torch.cat([torch.zeros_like(steps), eta], 1)
        k, theta = torch.cat([keys, k.to(keys.dtype)], 1), torch.cat([steps / 2, theta], 1)
    # the custom operator costs more than a small call: only for torch.compile and meta tensors
    opaque = torch.compiler.is_compiling() or k.is_meta
    outcome = (budget_steps if opaque else _Steps.apply)(k, eta, theta, chunk_size, cu_seqlens, p)
    limited, e = (x[:, p:] for x in outcome) if p else outcome
    if budget != 1:
        limited = torch.where(limited == theta[:, p:], own, limited * budget)
    return limited, e


def _steps(
    k: Tensor, eta: Tensor, theta: Tensor, chunk_size: int, cu_seqlens: Tensor | None, held: int
) -> list[Tensor]:
    """theta' and e [B, T, H]; the first ``held`` tokens of each row have e = 2 theta, without a limit."""
    k, eta, theta = k.contiguous(), eta.contiguous(), theta.contiguous()
    if _has_kernel(k):
        from titans_kernels.memory.forms.triton import budget as kernels

        return kernels.forward(k, eta, theta, chunk_size, cu_seqlens, held)
    if serves(keys := k.to(theta.dtype), eta, theta):
        return _Compiled.of(keys, chunk_size, cu_seqlens, held).forward(keys, eta, theta)
    with torch.no_grad(), without_autocast(k):
        return _forward(keys, eta, theta, chunk_size, cu_seqlens, held)


def _steps_backward(tensors: list[Tensor], chunk_size: int, cu_seqlens: Tensor | None) -> list[Tensor]:
    """Gradients of k, eta and theta. ``tensors``: the gradients of theta' and e; k, eta, theta; theta', e."""
    tensors = [x.contiguous() for x in tensors]
    k = tensors[2]
    if _has_kernel(k):
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
    """`_steps` as an autograd function."""

    @staticmethod
    def forward(ctx, k, eta, theta, chunk_size, cu_seqlens, held):
        steps = _steps(k, eta, theta, chunk_size, cu_seqlens, held)
        _setup(ctx, (k, eta, theta, chunk_size, cu_seqlens, held), steps)
        return tuple(steps)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        *tensors, cu_seqlens = ctx.saved_tensors
        return *_steps_backward([*grads, *tensors], ctx.chunk_size, cu_seqlens), None, None, None


@operators.custom_op(
    "titans::budget_steps",
    mutates_args=(),
    schema="(Tensor k, Tensor eta, Tensor theta, int chunk_size, Tensor? cu_seqlens, int held) -> Tensor[]",
)
def budget_steps(k, eta, theta, chunk_size, cu_seqlens, held):
    """Compute `_steps` as a custom operator, for torch.compile, torch.export and meta tensors."""
    return _steps(k, eta, theta, chunk_size, cu_seqlens, held)


@operators.custom_op(
    "titans::budget_steps_backward",
    mutates_args=(),
    schema="(Tensor dlimited, Tensor de, Tensor k, Tensor eta, Tensor theta, Tensor limited, Tensor e, "
    "int chunk_size, Tensor? cu_seqlens) -> Tensor[]",
)
def budget_steps_backward(dlimited, de, k, eta, theta, limited, e, chunk_size, cu_seqlens):
    """`_steps_backward` as a custom operator."""
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


def _has_kernel(k: Tensor) -> bool:
    """Return True if the Triton kernels support the call."""
    if not k.is_cuda or k.dtype == torch.float64:
        return False
    from titans_kernels.memory.forms.triton import assembler
    from titans_kernels.memory.forms.triton.refusal import no_compiler

    # the memory falls back to PyTorch's operators for the same reason
    reason = no_compiler(assembler.arch_of(k.device.index))
    return not reason


def _forward(
    k: Tensor, eta: Tensor, theta: Tensor, chunk_size: int, cu_seqlens: Tensor | None, held: int
) -> list[Tensor]:
    """Limit the steps with PyTorch's operators: token by token, over all chunks at once."""
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
    # compares products instead of quotients, since 1 - eta and the key's squared norm may be 0
    wanted = torch.where(counted & free, 2 * taken * size, 0)
    size = torch.where(counted, size, 1)
    e, over, slack = torch.zeros_like(taken), torch.zeros_like(free), edge(taken)
    for t in range(b):
        room = 1 - (G[..., t, :t] * e[..., :t]).sum(-1)
        room = room.masked_fill_(room <= slack, 0)
        over[..., t] = wanted[..., t] > (room + slack) * moved[..., t]
        e[..., t] = torch.where(over[..., t], room / size[..., t], full[..., t])
    limited = torch.where(over, e * moved / 2, taken)
    return [layout.join(limited).contiguous(), layout.join(e).contiguous()]


def _backward(tensors: list[Tensor], chunk_size: int, cu_seqlens: Tensor | None) -> list[Tensor]:
    """Go back with PyTorch's operators: the total gradient of every e by one triangular solve.

    The e of a limited token decreases by G_tu / G_tt per unit of each earlier e_u, so the gradients are
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
    """A call of `native/budget.cpp`, parallel over documents and heads."""

    def __init__(self, shape: _Shape, borders: ctypes.Array, compiled: ctypes.CDLL):
        self.shape, self.borders, self.compiled = shape, borders, compiled

    @staticmethod
    def of(k: Tensor, chunk_size: int, cu_seqlens: Tensor | None, held: int = 0) -> _Compiled:
        B, T, H, D = k.shape
        borders = range(0, B * T + 1, T) if cu_seqlens is None else document_borders(cu_seqlens, T)
        table, compiled = numbers(tuple(borders)), library(k.dtype)
        assert compiled is not None
        return _Compiled(_Shape(H, D, min(chunk_size, T), held, ctypes.addressof(table)), table, compiled)

    def forward(self, k: Tensor, eta: Tensor, theta: Tensor) -> list[Tensor]:
        out = [torch.empty_like(theta), torch.empty_like(theta)]
        self._run(self.compiled.budget_forward, (k, eta, theta, *out))
        return out

    def backward(self, tensors: list[Tensor]) -> list[Tensor]:
        grads = [torch.empty_like(x) for x in tensors[2:5]]
        self._run(self.compiled.budget_backward, (*tensors, *grads))
        return grads

    def _run(self, function, tensors: tuple[Tensor, ...]) -> None:
        arguments = ctypes.byref(self.shape), *map(pointer, tensors)
        jobs = (len(self.borders) - 1) * self.shape.heads
        parallel_for(jobs, lambda *part: function(*arguments, *part))
