"""A call as a sequence of kernels, and as custom operators: `titans::memory_triton` and its backward.

The kernels: gates, sequential writes, reads, and their backward. The write kernel depends on the shape:
`columns` for one layer, `resident` for two layers of widths up to 64, `streamed` for other heads up to 256
wide, `stepped` for wider ones. If the write
programs fill the GPU, they also do the reads; otherwise the reads are launched layer by layer, parallel over
all chunks, from the saved chunk-start states.

The custom operators have a fake implementation and an autograd formula, so they work with torch.compile,
autocast, DDP and FSDP2. The fake implementation runs the same host code while recording the launches, so the
shapes of the two always agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, library

from titans_kernels import ran
from titans_kernels.memory.forms.triton import columns, resident, stepped, streamed, streamed_backward
from titans_kernels.memory.forms.triton.gates import Gates, coefficients, coefficients_backward
from titans_kernels.memory.forms.triton.launch import card_of, fake, float32_precision, is_recording
from titans_kernels.memory.forms.triton.reads import (
    base_layer_backward,
    partial_sums,
    read_layer,
    read_layer_backward,
    update_layer_backward,
)
from titans_kernels.memory.forms.triton.shapes import (
    Layer,
    Shape,
    flat_base,
    flatten,
    layers_of,
    padded,
    unflatten,
    widened,
)
from titans_kernels.memory.forms.triton.tables import chunk_count, document_count, tables
from titans_kernels.memory.options import Inputs, Layers, Options, Result, whole


class Tokens(NamedTuple):
    """Per-token inputs: q, k, v [tokens, H, D] of one dtype, the gates [tokens, H] in float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    alpha: Tensor
    eta: Tensor
    theta: Tensor


class Kept(NamedTuple):
    """Tensors that the forward saves for the backward; empty if they will be recomputed."""

    C: Tensor  # [M, H, b, b]
    gates: Tensor  # [5, tokens, H]
    states: Tensor  # [M, H, size], chunk-start states in the operands' dtype
    z: Tensor  # [L - 1, tokens, H, F], keys before each non-linearity
    dh: Tensor  # [L - 1, tokens, H, F], errors of the hidden layers
    dt: Tensor  # [tokens, H, V], errors of the top layer
    scale: Tensor  # [L, tokens, H], divisors of the errors by the bound
    u: Tensor  # [L - 1, tokens, H, F], reads before each non-linearity

    def d(self, layer: Layer) -> Tensor:
        """Errors of a layer."""
        return self.dh[layer.number] if layer.number < len(self.dh) else self.dt

    @staticmethod
    def empty(shape: Shape, like: Tensor, keep: bool) -> Kept:
        """Uninitialised; without ``keep``, all but the coefficients are empty."""
        tokens, H, L = shape.tokens, shape.H, shape.depth
        hidden = (L - 1, tokens, H, shape.layers[0].F)
        single = torch.float32
        sizes = [
            ((shape.M, H, shape.b, shape.b), single), ((5, tokens, H), single),
            ((shape.M, H, shape.size), like.dtype), (hidden, like.dtype), (hidden, like.dtype),
            ((tokens, H, shape.layers[-1].F), like.dtype), ((L, tokens, H), single), (hidden, like.dtype),
        ]  # fmt: skip
        empty = [like.new_empty(size if keep else 0, dtype=dtype) for size, dtype in sizes]
        return Kept(*empty)


def reads_ride_along(shape: Shape) -> bool:
    """Return True if write programs also do the reads: they fill the GPU, both fit, no score is repeated."""
    if shape.path != "columns" or (shape.b == 128 and shape.layers[0].D > 64) or shape.card.arch < 90:
        # they would need 233 KB of shared memory, of Hopper's 227, or spill 760 bytes on Ampere
        return False
    parts = shape.layers[0].F // columns.columns_per_program(shape)
    return shape.N * shape.H * parts >= shape.card.processors and parts <= 4


def forward(
    shape: Shape, x: Tokens, start: Tensor, base: Tensor | None, *, keep: bool, final: bool
) -> tuple[Tensor, Tensor, Kept]:
    """y [tokens, H, V], with ``final`` the final state [N, H, size], and what to save."""
    gates = coefficients(x.alpha, x.eta, x.theta, shape.tables, shape.b)
    along = reads_ride_along(shape)
    kept = Kept.empty(shape, x.q, keep or not along)._replace(C=gates.C, gates=gates.tokens)
    y, after = torch.empty_like(x.v), _state(shape, start, final)
    _write(shape, x, start, base, gates, kept, y, after, read=along, keep=keep or not along)
    if not along:
        _read(shape, shape.layers, x, base, gates, kept, y)
    after = after if final else start.new_empty(0)
    return y, after, kept if keep else Kept.empty(shape, x.q, False)


def recall(shape: Shape, x: Tokens, start: Tensor, base: Tensor | None) -> Kept:
    """Recomputes what a forward without ``keep`` did not save."""
    gates = coefficients(x.alpha, x.eta, x.theta, shape.tables, shape.b)
    kept = Kept.empty(shape, x.q, True)._replace(C=gates.C, gates=gates.tokens)
    nothing = x.q.new_empty(0)
    _write(shape, x, start, base, gates, kept, nothing, _state(shape, start, False), read=False, keep=True)
    _read(shape, shape.layers[:-1], x, base, gates, kept, nothing)
    return kept


def _state(shape: Shape, start: Tensor, final: bool) -> Tensor:
    """Output buffer of the final states [N, H, size]; all kernels but `columns` also work in it."""
    return start.new_empty((shape.N, shape.H, shape.size) if final or shape.path != "columns" else 0)


def _write(
    shape: Shape, x: Tokens, start: Tensor, base: Tensor | None, gates: Gates, kept: Kept, y: Tensor,
    after: Tensor, *, read: bool, keep: bool,
) -> None:  # fmt: skip
    path = shape.path
    if path == "columns":
        BV = columns.columns_per_program(shape)
        columns.write(
            shape, BV, x.q, x.k, x.v, start, gates, kept.states, kept.dt, kept.scale, y, after,
            read=read, keep=keep,
        )  # fmt: skip
    elif path == "resident":
        after.copy_(start)
        resident.write(shape, x.k, x.v, after, base, gates, kept.states, kept.z, kept.dh, kept.dt, kept.scale)
    else:
        after.copy_(start)
        write = stepped.write if path == "stepped" else streamed.write
        write(shape, x.k, x.v, gates, after, base, kept.states, kept.z, kept.dh, kept.dt, kept.scale)


def _read(
    shape: Shape, layers: tuple[Layer, ...], x: Tokens, base: Tensor | None, gates: Gates, kept: Kept,
    y: Tensor,
) -> None:  # fmt: skip
    for layer in layers:
        below = layer.number - 1
        queries, keys = (kept.u[below], kept.z[below]) if layer.number else (x.q, x.k)
        out = kept.u[layer.number] if layer.number < shape.depth - 1 else y
        read_layer(shape, layer, queries, keys, kept.d(layer), kept.states, base, gates, out)


class _Grads(NamedTuple):
    """Gradients of the tensors in `Kept`, first from the reads, then accumulated."""

    du: Tensor  # [L - 1, tokens, H, F], of u
    dX: Tensor  # [L - 1, tokens, H, F], of the inputs of layers 1..
    ddh: Tensor  # of dh
    ddt: Tensor  # of dt
    dz: Tensor  # of z
    dC: Tensor
    dtokens: Tensor  # [2 + 2 P, tokens, H], of beta and m, then P partial sums for c and n
    inner: Tensor  # [M, H, 3], of beta, m, h of each chunk's last token
    dstates: Tensor  # of the state after each chunk

    @staticmethod
    def empty(shape: Shape, kept: Kept, parts: int) -> _Grads:
        hidden = [torch.empty_like(kept.z) for _ in range(4)]
        single = {"dtype": torch.float32, "device": kept.dt.device}
        return _Grads(
            hidden[0], hidden[1], hidden[2], torch.empty_like(kept.dt), hidden[3], torch.empty_like(kept.C),
            torch.empty(2 + 2 * parts, shape.tokens, shape.H, **single),
            torch.empty(shape.M, shape.H, 3, **single), torch.empty_like(kept.states),
        )  # fmt: skip


def backward(
    shape: Shape, x: Tokens, base: Tensor | None, kept: Kept, dy: Tensor, dafter: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, alpha, eta, theta, of the starting state, and of the base if there is one."""
    gates = Gates(kept.C, kept.gates)
    BV = columns.columns_per_program(shape) if shape.path == "columns" else 0
    parts = 1
    if BV:
        parts = shape.layers[0].F // BV
    elif shape.path == "stepped":
        parts = stepped.partial_sums(shape)
    grads = _Grads.empty(shape, kept, parts)
    dq, dk, dv, dkeys = (
        torch.empty_like(x.q),
        torch.empty_like(x.k),
        torch.empty_like(x.v),
        torch.empty_like(x.k),
    )
    for layer in reversed(shape.layers):
        l, top = layer.number, layer.number == shape.depth - 1
        queries, keys, dx, dX = (
            (kept.u[l - 1], kept.z[l - 1], grads.du[l - 1], grads.dX[l - 1]) if l else (x.q, x.k, dq, dkeys)
        )
        dz, dd = (dy, grads.ddt) if top else (grads.du[l], grads.ddh[l])
        read_layer_backward(
            shape, layer, dz, queries, keys, kept.d(layer), kept.states, base, gates, dx, dX, dd, grads.dC,
            grads.dtokens,
        )  # fmt: skip
    dstart = _write_backward(shape, BV, x, gates, kept, grads, dy, dafter, dv)
    dz, sign = (grads.dz[0], 1) if shape.depth > 1 else (dv, -1)
    for layer in reversed(shape.layers):
        update_layer_backward(
            shape, layer, kept.states, grads.dstates, base, kept.d(layer), dz, sign, dkeys, gates, dk,
            grads.inner,
        )  # fmt: skip
    dgates = coefficients_backward(
        x.alpha, x.eta, x.theta, gates, grads.dC, grads.dtokens, grads.inner, shape.tables
    )
    gradients = dq, dk, dv, *dgates, dstart.sum(0, keepdim=True) if shape.shared else dstart
    if base is None:
        return gradients
    dbase = partial_sums(shape, dstart)
    for layer in shape.layers:
        below, top = layer.number - 1, layer.number == shape.depth - 1
        queries, du = kept.u[below] if layer.number else x.q, dy if top else grads.du[layer.number]
        base_layer_backward(shape, layer, queries, du, grads.dstates, gates, dbase)
    return *gradients, dbase.sum(0)


def _write_backward(
    shape: Shape, BV: int, x: Tokens, gates: Gates, kept: Kept, grads: _Grads, dy: Tensor, dafter: Tensor,
    dv: Tensor,
) -> Tensor:  # fmt: skip
    dstart = kept.scale.new_empty(shape.N, shape.H, shape.size)
    if shape.path == "columns":
        columns.backward(
            shape, BV, x.q, x.k, dy, gates, kept.dt, kept.scale, grads.ddt, dafter, grads.dstates, dv,
            grads.dtokens, dstart,
        )  # fmt: skip
        return dstart
    if dafter.numel():
        dstart.copy_(dafter)
    else:
        dstart.zero_()
    back = stepped.backward if shape.path == "stepped" else streamed_backward.backward
    back(
        shape, x.q, x.k, kept.u, kept.z, kept.dh, kept.dt, kept.scale, dy, grads.du, grads.dX, grads.ddh,
        grads.ddt, gates, kept.states, dstart, grads.dstates, grads.dz, dv, grads.dtokens,
    )  # fmt: skip
    return dstart


KEPT_OF = 64
"""A call may save this part of the GPU's memory for its backward."""
KEEP_BYTES: int | None = None
"""Maximum bytes that the forward saves for its backward; None for a fraction of the GPU's memory. A call that
needs more recomputes in the backward, with the same result."""


def write_and_read(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    """Write and read every token, as `reference.write_and_read` does, with ``options.operands``.

    Widths are padded with zeros to the tiles', which is exact: f(0) = 0, and an error of 0 stays 0.
    """
    dtype = options.operands
    given = [inputs.q.shape[-1], *(W.shape[-1] for W in weights)]
    widths = [padded(width) for width in given]
    q, k, v = (widened(x.to(dtype), padded(x.shape[-1])) for x in inputs[:3])
    tokens = Tokens(q, k, v, *(x.float() for x in inputs[3:6]))
    if options.shared_start:
        weights, momentum = whole(options.shared_start[0], options.base), options.shared_start[1]
    weights, momentum, base = (
        tuple(widened(x, *pair) for x, pair in zip(layers, pairwise(widths), strict=False))
        for layers in (weights, momentum, options.base)
    )
    y, after = _in_parts(
        tokens, flatten(weights, momentum), flat_base(base) if base else None, options, widths
    )
    y = y[..., : given[-1]]
    if not options.final:
        return y, (), ()
    state = unflatten(after, layers_of(tuple(widths))[0])
    weights, momentum = (
        tuple(x[..., :D, :F] for x, (D, F) in zip(part, pairwise(given), strict=True)) for part in state
    )
    return y, weights, momentum


def _in_parts(
    tokens: Tokens, start: Tensor, base: Tensor | None, options: Options, widths: list[int]
) -> tuple[Tensor, Tensor]:
    """y and the final state; without a gradient, long rows are processed in parts of bounded memory."""
    B, T, H, _ = tokens.q.shape
    b, packed = options.chunk_size, options.cu_seqlens is not None
    each = H * _chunk_bytes(widths, b, tokens.q.element_size())
    total = each * chunk_count(B * T, document_count(B, options.cu_seqlens), b, packed)
    rule = (widths, b, options.activation, options.surprise_bound or 0.0)
    most = keep_bytes(tokens.q.device)
    if torch.is_grad_enabled() or packed or total <= most:
        keep = torch.is_grad_enabled() and total <= most
        results = torch.ops.titans.memory_triton(
            *tokens, start, base, options.cu_seqlens, *rule, keep, options.final
        )  # fmt: skip
        return results[:2]
    out, length = [], b * max(1, most // (each * B))
    for t in range(0, T, length):
        part = (x[:, t : t + length] for x in tokens)
        y, start = torch.ops.titans.memory_triton(*part, start, base, None, *rule, False, True)[:2]
        out.append(y)
    return torch.cat(out, 1), start


def keep_bytes(device: torch.device) -> int:
    """`KEEP_BYTES`, or its default.

    A fraction of the GPU's total memory, not of its free memory, so that results do not depend on other
    processes.
    """
    if KEEP_BYTES is not None:
        return KEEP_BYTES
    if device.type != "cuda":
        return 512 * 2**20
    return torch.cuda.get_device_properties(device).total_memory // KEPT_OF


def _chunk_bytes(widths: list[int], b: int, element: int) -> int:
    """Bytes of `Kept` per chunk and head."""
    states = sum(2 * D * F for D, F in pairwise(widths)) * element
    hidden = 3 * sum(widths[1:-1]) + widths[-1]
    return states + 4 * b * b + b * (element * hidden + 4 * (5 + len(widths) - 1))


def _shape(
    q: Tensor, start: Tensor, cu_seqlens: Tensor | None, widths: Sequence[int], b: int, activation: str,
    bound: float,
) -> Shape:  # fmt: skip
    B, T, H, _ = q.shape
    layers, size = layers_of(tuple(widths))
    N, layout = document_count(B, cu_seqlens), tables(B, T, cu_seqlens, b, q.device)
    return Shape(
        N, start.shape[0] < N, H, B * T, layout.M, b, layers, size, activation, bound, float32_precision(),
        q.dtype == torch.float32, layout, card_of(q.device),
    )  # fmt: skip


def _flat(*xs: Tensor) -> list[Tensor]:
    """[B, T, ...] to contiguous [B T, ...]."""
    return [x.flatten(0, 1).contiguous() for x in xs]


@library.custom_op("titans::memory_triton", mutates_args=())
def memory_triton(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, eta: Tensor, theta: Tensor, start: Tensor,
    base: Tensor | None, cu_seqlens: Tensor | None, widths: Sequence[int], chunk_size: int, activation: str,
    bound: float, keep: bool, final: bool,
) -> list[Tensor]:  # fmt: skip
    """y, with ``final`` the final state [N, H, size], and with ``keep`` what the backward needs.

    ``start`` is [N, H, size], or [1, H, size] if all documents start from the same state; ``base`` [H,
    size / 2] is what the weights of two or more layers decay to.
    """
    shape = _shape(q, start, cu_seqlens, widths, chunk_size, activation, bound)
    x = Tokens(*_flat(q, k, v, alpha, eta, theta))
    if not is_recording():
        ran.note("neural_memory", "triton")
    y, after, kept = forward(shape, x, start.contiguous(), base, keep=keep, final=final)
    return [y.view(v.shape), after, *kept]


@library.custom_op("titans::memory_triton_backward", mutates_args=())
def memory_triton_backward(
    dy: Tensor, dafter: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, eta: Tensor, theta: Tensor,
    start: Tensor, base: Tensor | None, cu_seqlens: Tensor | None, kept: Sequence[Tensor],
    widths: Sequence[int], chunk_size: int, activation: str, bound: float,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, alpha, eta, theta, start and the base, if any; an empty ``dafter`` is zeros."""
    shape = _shape(q, start, cu_seqlens, widths, chunk_size, activation, bound)
    x = Tokens(*_flat(q, k, v, alpha, eta, theta))
    saved = Kept(*kept)
    if not saved.states.numel():
        saved = recall(shape, x, start.contiguous(), base)
    grads = backward(shape, x, base, saved, _flat(dy)[0], dafter.contiguous())
    of_tokens = (d.view(y.shape) for d, y in zip(grads, (q, k, v, alpha, eta, theta), strict=False))
    return [*of_tokens, *grads[6:]]


memory_triton.register_fake(fake(memory_triton._init_fn))
memory_triton_backward.register_fake(fake(memory_triton_backward._init_fn))


def _setup_context(ctx, inputs, output) -> None:
    *tensors, widths, chunk_size, activation, bound, _, _ = inputs
    _, _, *kept = output
    ctx.save_for_backward(*tensors, *kept)
    ctx.options = list(widths), chunk_size, activation, bound
    # most outputs are saved for the backward and have no gradients; zeros for them would double the memory
    ctx.set_materialize_grads(False)


def _autograd(ctx, grads):
    saved = ctx.saved_tensors  # read once: under activation checkpointing a second read fails
    *tensors, base, cu_seqlens = saved[:9]
    kept = list(saved[9:])
    dy = torch.zeros_like(tensors[2]) if grads[0] is None else grads[0]
    dafter = tensors[6].new_empty(0) if grads[1] is None else grads[1]
    gradients = torch.ops.titans.memory_triton_backward(
        dy, dafter, *tensors, base, cu_seqlens, kept, *ctx.options
    )
    return *gradients, *(() if base is not None else (None,)), None, None, None, None, None, None, None


memory_triton.register_autograd(_autograd, setup_context=_setup_context)
