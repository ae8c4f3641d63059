"""A call as a sequence of kernels: gates, sequential writes, reads, and their backward.

The write kernel depends on the shape: `columns` for one layer, `resident` for two layers of widths up to 64,
`streamed` for the rest. If the write programs fill the GPU, they also do the reads; otherwise the reads are
launched layer by layer, parallel over all chunks, from the saved chunk-start states.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from titans_kernels.memory.forms.triton import columns, resident, streamed, streamed_backward
from titans_kernels.memory.forms.triton.gates import Gates, coefficients, coefficients_backward
from titans_kernels.memory.forms.triton.reads import read_layer, read_layer_backward, update_layer_backward
from titans_kernels.memory.forms.triton.shapes import Layer, Shape


class Tokens(NamedTuple):
    """Per-token inputs: q, k, v [tokens, H, D] of one dtype, the gates [tokens, H] in float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    alpha: Tensor
    eta: Tensor
    theta: Tensor


class Kept(NamedTuple):
    """What the forward saves for the backward; tensors are empty if they will be recomputed."""

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


def path(shape: Shape) -> str:
    """Name of the write kernels for a shape."""
    widths = [layer.D for layer in shape.layers] + [shape.layers[-1].F]
    if shape.depth == 1 and max(widths) <= 128 and (not shape.bound or widths[1] <= 64):
        return "columns"
    if shape.depth == 2 and max(widths) <= 64 and shape.b <= 64:
        return "resident"
    return "streamed"


def reads_ride_along(shape: Shape, processors: int) -> bool:
    """Whether the write programs also do the reads: they fill the GPU, both fit, scores are not repeated."""
    if path(shape) == "streamed" or (shape.b == 128 and shape.layers[0].D > 64):
        return False  # queries, keys and scores would need 233 KB of shared memory, of 227
    parts = 1
    if path(shape) == "columns":
        parts = shape.layers[0].F // columns.columns_per_program(shape, processors)
    return shape.N * shape.H * parts >= processors and parts <= 4


@lru_cache
def processors(device: torch.device) -> int:
    """Number of streaming multiprocessors; an H100's without a GPU."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def forward(
    shape: Shape, x: Tokens, start: Tensor, *, keep: bool, final: bool
) -> tuple[Tensor, Tensor, Kept]:
    """y [tokens, H, V], with ``final`` the final state [N, H, size], and what to save."""
    gates = coefficients(x.alpha, x.eta, x.theta, shape.tables, shape.b)
    along = reads_ride_along(shape, processors(x.q.device))
    kept = Kept.empty(shape, x.q, keep or not along)._replace(C=gates.C, gates=gates.tokens)
    y, after = torch.empty_like(x.v), _state(shape, start, final)
    _write(shape, x, start, gates, kept, y, after, read=along, keep=keep or not along)
    if not along:
        _read(shape, shape.layers, x, gates, kept, y)
    after = after if final else start.new_empty(0)
    return y, after, kept if keep else Kept.empty(shape, x.q, False)


def recall(shape: Shape, x: Tokens, start: Tensor) -> Kept:
    """Recomputes what a forward without ``keep`` did not save."""
    gates = coefficients(x.alpha, x.eta, x.theta, shape.tables, shape.b)
    kept = Kept.empty(shape, x.q, True)._replace(C=gates.C, gates=gates.tokens)
    nothing = x.q.new_empty(0)
    _write(shape, x, start, gates, kept, nothing, _state(shape, start, False), read=False, keep=True)
    _read(shape, shape.layers[:-1], x, gates, kept, nothing)
    return kept


def _state(shape: Shape, start: Tensor, final: bool) -> Tensor:
    """Output buffer of the final states [N, H, size]; all kernels but `columns` also work in it."""
    return start.new_empty((shape.N, shape.H, shape.size) if final or path(shape) != "columns" else 0)


def _write(
    shape: Shape, x: Tokens, start: Tensor, gates: Gates, kept: Kept, y: Tensor, after: Tensor,
    *, read: bool, keep: bool,
) -> None:  # fmt: skip
    which = path(shape)
    if which == "columns":
        BV = columns.columns_per_program(shape, processors(x.q.device))
        columns.write(
            shape, BV, x.q, x.k, x.v, start, gates, kept.states, kept.dt, kept.scale, y, after,
            read=read, keep=keep,
        )  # fmt: skip
    elif which == "resident":
        after.copy_(start)
        resident.write(
            shape, x.q, x.k, x.v, after, gates, kept.states, kept.z, kept.dh, kept.dt, kept.scale, kept.u, y,
            read=read, keep=keep,
        )  # fmt: skip
    else:
        after.copy_(start)
        streamed.write(shape, x.k, x.v, gates, after, kept.states, kept.z, kept.dh, kept.dt, kept.scale)


def _read(shape: Shape, layers: tuple[Layer, ...], x: Tokens, gates: Gates, kept: Kept, y: Tensor) -> None:
    for layer in layers:
        below = layer.number - 1
        queries, keys = (kept.u[below], kept.z[below]) if layer.number else (x.q, x.k)
        out = kept.u[layer.number] if layer.number < shape.depth - 1 else y
        read_layer(shape, layer, queries, keys, kept.d(layer), kept.states, gates, out)


class _Grads(NamedTuple):
    """Gradients of the tensors in `Kept`, first from the reads, then accumulated."""

    du: Tensor  # [L - 1, tokens, H, F], of u
    dX: Tensor  # [L - 1, tokens, H, F], of the inputs of layers 1..
    ddh: Tensor  # of dh
    ddt: Tensor  # of dt
    dz: Tensor  # of z
    dC: Tensor
    dtokens: Tensor  # [2 + 2 P, tokens, H], of beta and m, then P partial sums of those of c and n
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


def backward(shape: Shape, x: Tokens, kept: Kept, dy: Tensor, dafter: Tensor) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, alpha, eta, theta and of the starting state."""
    gates = Gates(kept.C, kept.gates)
    BV = columns.columns_per_program(shape, processors(dy.device)) if path(shape) == "columns" else 0
    grads = _Grads.empty(shape, kept, shape.layers[0].F // BV if BV else 1)
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
            shape, layer, dz, queries, keys, kept.d(layer), kept.states, gates, dx, dX, dd, grads.dC,
            grads.dtokens,
        )  # fmt: skip
    dstart = _write_backward(shape, BV, x, gates, kept, grads, dy, dafter, dv)
    dz, sign = (grads.dz[0], 1) if shape.depth > 1 else (dv, -1)
    for layer in reversed(shape.layers):
        update_layer_backward(
            shape, layer, kept.states, grads.dstates, kept.d(layer), dz, sign, dkeys, gates, dk, grads.inner
        )
    dgates = coefficients_backward(
        x.alpha, x.eta, x.theta, gates, grads.dC, grads.dtokens, grads.inner, shape.tables
    )
    return dq, dk, dv, *dgates, dstart.sum(0, keepdim=True) if shape.shared else dstart


def _write_backward(
    shape: Shape, BV: int, x: Tokens, gates: Gates, kept: Kept, grads: _Grads, dy: Tensor, dafter: Tensor,
    dv: Tensor,
) -> Tensor:  # fmt: skip
    dstart = kept.scale.new_empty(shape.N, shape.H, shape.size)
    which = path(shape)
    if which == "columns":
        columns.backward(
            shape, BV, x.q, x.k, dy, gates, kept.dt, kept.scale, grads.ddt, dafter, grads.dstates, dv,
            grads.dtokens, dstart,
        )  # fmt: skip
        return dstart
    if dafter.numel():
        dstart.copy_(dafter)
    else:
        dstart.zero_()
    if which == "resident":
        resident.backward(
            shape, x.q, x.k, kept.u, kept.z, dy, grads.du, gates, kept.states, kept.dh, kept.dt, kept.scale,
            grads.ddh, grads.ddt, grads.dX, dstart, grads.dstates, grads.dz, dv, grads.dtokens,
        )  # fmt: skip
    else:
        streamed_backward.backward(
            shape, x.q, x.k, kept.u, kept.z, kept.dh, kept.dt, kept.scale, dy, grads.du, grads.dX, grads.ddh,
            grads.ddt, gates, kept.states, dstart, grads.dstates, grads.dz, dv, grads.dtokens,
        )  # fmt: skip
    return dstart
