"""MAC's segments in C++ (`native/segments.cpp`): read, attend, write, one segment after the other.

What does not depend on the carried memory is given for all tokens at once, and what follows the last read
is left to the caller. All segments are one call, since at these sizes PyTorch's operators cost more to call
than to run: a segment of 32 tokens at width 64 took some 800 of them.

Shapes: B batch, T tokens, N documents, D model width, H heads of width E of the memory, C = H E, A channels
of attention, P persistent tokens, K convolution width, G gates of a token.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titans_kernels import ran
from titans_kernels.layers import NORM_EPS
from titans_kernels.memory.forms import native
from titans_kernels.memory.options import MemoryState, distances, whole
from titans_kernels.memory.parts.layout import document_borders
from titans_kernels.native import library, numbers, parallel_for, pointer, pointers, serves
from titans_kernels.products import outer

MAX_BYTES = 2**20
"""Maximum bytes of the projections' weights: for larger ones PyTorch's products are faster."""


class SegmentTokens(NamedTuple):
    """What does not depend on the memory, of all tokens."""

    x: Tensor  # [B, T, D], the residual stream
    read: Tensor  # queries of the memory [B, T, H, E]
    gate: Tensor | None  # output gate of the read before SiLU [B, T, C]
    q: Tensor  # of attention, not yet rotated [B, T, heads, width]
    k: Tensor
    v: Tensor


class SegmentWeights(NamedTuple):
    """Weights of what does; linear layers are [outputs, inputs]."""

    read_norm: Tensor  # [E]
    read_out: Tensor  # [D, C]
    read_in: Tensor  # keys and values of the read [2 A, D]
    read_conv: Tensor  # their convolution [K, 2 A]; K = 1 for none
    out: Tensor  # [D, A]
    norm: Tensor  # [D]
    write_in: Tensor  # q, k and v of the memory [3 C, D]
    write_conv: Tensor  # [K, 3 C]
    gates: Tensor  # alpha's and eta's where there are any, theta's [G, D]
    bias: Tensor  # [G]
    prefix_k: Tensor  # the persistent tokens' [P, A]
    prefix_v: Tensor
    scale: Tensor  # factor of attention's scores beside 1 / sqrt(width) [heads]


class CarriedState(NamedTuple):
    """The state before a segment; tensors are [N, ...], or [1, ...] to start all documents from."""

    memory: MemoryState
    read_inputs: Tensor  # of the convolutions [N, K - 1, channels]
    write_inputs: Tensor


class SegmentOptions(NamedTuple):
    """The options of a call."""

    segment_size: int
    chunk_size: int
    activation: str
    surprise_bound: float | None
    write_budget: float | None
    max_alpha: float | None
    """None: no alpha, nothing is forgotten."""
    eta: bool
    max_theta: float
    read_unit: int
    """Which of k and v are normalised, as bits."""
    write_unit: int
    """Which of q, k and v are."""
    rotary: tuple[Tensor, Tensor] | None
    """Cosine and sine at each position in a segment, [segment_size, width / 2]."""
    base: tuple[Tensor, ...]
    """As in `neural_memory`, in the state's dtype; empty for none."""
    epsilon: float


def serves_segments(x: Tensor, weights: SegmentWeights, segment_size: int) -> bool:
    """Whether the library supports a call for x [B, T, D], and is faster than PyTorch's operators."""
    kernels = max(weights.read_conv.shape[0], weights.write_conv.shape[0])
    projections = weights.read_out, weights.read_in, weights.out, weights.write_in
    return (
        segment_size >= kernels - 1
        and 2 * sum(w.nbytes for w in projections) <= MAX_BYTES
        and not torch.is_autocast_enabled("cpu")
        and serves(x, *weights)
    )


def attend_segments(
    tokens: SegmentTokens,
    weights: SegmentWeights,
    state: CarriedState,
    options: SegmentOptions,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, CarriedState | None]:
    """y = x + Attn([p] || r || Z), z = norm y and what the memory retrieves of z, written too (eqs. 21-25).

    Rows start and end on a segment border. With ``cu_seqlens``, documents of any length are packed into the
    flattened batch, and each starts from ``state``.

    Returns:
        y and z [B, T, D], the reads [B, T, H, E] before their norm, and the state, None for packed documents.
    """
    B, T, D = tokens.x.shape
    borders = tuple(range(0, B * T + 1, T)) if cu_seqlens is None else document_borders(cu_seqlens, B * T)
    layers = (*whole(state.memory.weights, options.base), *state.memory.momentum)
    before = [_rows(x, len(borders) - 1) for x in (*layers, state.read_inputs, state.write_inputs)]
    call = _Call(tokens, weights, before, options, borders)
    flat = [None if x is None else x.flatten(0, 1).contiguous() for x in tokens]
    arguments = (*flat, *weights, *options.base, *before)
    ran.note("neural_memory", "native")
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arguments):
        y, z, m, *after = _Segments.apply(call, *arguments)  # pyright: ignore[reportGeneralTypeIssues]
    else:
        y, z, m, *after = call.forward(arguments)[0]
    y, z, m = y.view(B, T, D), z.view(B, T, D), m.view(tokens.read.shape)
    if cu_seqlens is not None:
        return y, z, m, None
    L = len(state.memory.weights)
    memory = MemoryState(distances(tuple(after[:L]), options.base), tuple(after[L : 2 * L]))
    return y, z, m, CarriedState(memory, *after[2 * L :])


def _rows(x: Tensor, documents: int) -> Tensor:
    """A state of each document, contiguous; documents may share memory."""
    x = x if x[0].is_contiguous() else x.contiguous()
    return x.expand(documents, *x.shape[1:])


class _Chain(ctypes.Structure):
    _fields_ = (
        ("memory", native.Spec),
        *((name, ctypes.c_int64) for name in ("model", "width", "queries", "span", "prefix", "segment")),
        *((name, ctypes.c_int64) for name in ("read_kernel", "write_kernel", "read_unit", "write_unit")),
        *((name, ctypes.c_int64) for name in ("forgets", "moves")),
        *((name, ctypes.c_double) for name in ("epsilon", "least", "budget", "max_alpha", "max_theta")),
        *((name, ctypes.c_void_p) for name in ("borders", "chunks", "strides")),
    )


class _Call:
    """The options of a call and the layout of its documents.

    Its arguments are `SegmentTokens` flattened to [B T, ...], `SegmentWeights`, the base and the state
    [N, ...]: weights, momenta and the inputs of both convolutions.
    """

    def __init__(
        self, tokens: SegmentTokens, weights: SegmentWeights, state: Sequence[Tensor], o: SegmentOptions,
        borders: tuple[int, ...],
    ):  # fmt: skip
        found, layers = library(tokens.x.dtype), state[: (len(state) - 2) // 2]
        assert found is not None  # by `serves_segments`
        self.library, self.rotary, self.documents = found, o.rotary, len(borders) - 1
        self.sizes = len(tokens), len(weights), len(o.base), len(state)
        widths = *(W.shape[-2] for W in layers), layers[-1].shape[-1]
        lengths = tuple(b - a for a, b in pairwise(borders))
        # kept, since the chain has their addresses
        self.arrays = (
            numbers(widths),
            *native.tables(lengths, o.chunk_size),
            numbers([x.stride(0) for x in state]),
        )
        (_, _, H, E), (_, _, queries, span) = tokens.read.shape, tokens.q.shape
        spec = native.Spec(
            H, len(layers), o.chunk_size, native.ACTIVATIONS.index(o.activation), native.PLAIN,
            o.surprise_bound or 0.0, 3 if o.base else 2, 1, ctypes.addressof(self.arrays[0]),
        )  # fmt: skip
        self.chain = _Chain(
            spec, tokens.x.shape[2], E, queries, span, weights.prefix_k.shape[0], o.segment_size,
            weights.read_conv.shape[0], weights.write_conv.shape[0], o.read_unit, o.write_unit,
            o.max_alpha is not None, o.eta, o.epsilon, NORM_EPS, o.write_budget or 0.0, o.max_alpha or 0.0,
            o.max_theta, *map(ctypes.addressof, self.arrays[1:]),
        )  # fmt: skip
        self.kept_numel = self.arrays[2][len(lengths)] * H * native.kept_numel(widths)

    def forward(
        self, arguments: Sequence[Tensor | None], kept: Tensor | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """y, z, the reads and the state after the last token; and all that was made on the way."""
        tokens, weights, base, state = self._parts(arguments)
        made, after = self._made(tokens), [torch.empty(x.shape, dtype=x.dtype) for x in state]
        weights = self._weights(weights)
        before = ctypes.byref(self.chain), pointers(weights), pointers([*tokens, *made]), pointers(state)
        rest = pointers(base) if base else None, pointers(after), pointer(kept)
        run = self.library.segments_forward
        parallel_for(self.documents, lambda *jobs: run(*before, *rest, *jobs))
        return [made[7], made[8], made[-1], *after], made

    def backward(
        self, saved: Sequence[Any], douts: Sequence[Tensor], dafter: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Gradients of the arguments, from those of y, z and the reads; None in ``dafter`` is zeros."""
        count = sum(self.sizes)
        (tokens, weights, base, state), (kept, *made) = self._parts(saved[:count]), saved[count:]
        _, normed, r, _, _, _, a, _, z, pre, *_ = made
        N = self.documents
        dtokens: list[Any] = [None if x is None else torch.empty_like(x) for x in tokens]
        read_norm, _, _, read_conv, _, norm, _, write_conv, gates, _, *others = weights
        dr, dread_pre, dpre = (torch.empty_like(x) for x in (r, made[3], pre))
        dlin = r.new_empty(len(r), len(gates))
        own = [x.new_zeros(N, *x.shape) for x in (read_norm, read_conv, norm, write_conv, *others)]
        dstate = [torch.empty(x.shape, dtype=x.dtype) for x in state]
        dbase = [x.new_zeros(N, *x.shape) for x in base]
        grads = [*(x.contiguous() for x in douts), *dtokens, dr, dread_pre, dpre, dlin, *own]
        dafter = [None if x is None else x.contiguous() for x in dafter]
        weights, fixed = self._weights(weights), pointers(base) if base else None
        before = ctypes.byref(self.chain), pointers(weights), pointers([*tokens, *made])
        rest = pointers(state), fixed, pointer(kept), pointers(dafter), pointers(grads)
        rest = *rest, pointers([*dstate, *dbase])
        run = self.library.segments_backward
        parallel_for(N, lambda *jobs: run(*before, *rest, *jobs))
        dread_norm, dread_conv, dnorm, dwrite_conv, *dothers = (x.sum(0) for x in own)
        dx = dtokens[0]
        return [
            *dtokens, dread_norm, outer(dr, normed), outer(dread_pre, r), dread_conv, outer(dx, a), dnorm,
            outer(dpre, z), dwrite_conv, outer(dlin, z), dlin.sum(0), *dothers, *(x.sum(0) for x in dbase),
            *dstate,
        ]  # fmt: skip

    def _parts(self, arguments: Sequence[Tensor | None]) -> list[list[Any]]:
        given = iter(arguments)
        return [list(islice(given, size)) for size in self.sizes]

    def _weights(self, weights: Sequence[Tensor]) -> list[Tensor | None]:
        """As `Weights` of segments.cpp; projections also transposed."""
        w = SegmentWeights(*(x.contiguous() for x in weights))
        pairs = [(x, x.T.contiguous()) for x in (w.read_out, w.read_in, w.out, w.write_in)]
        rotary = self.rotary or (None, None)
        return [
            w.read_norm, *pairs[0], *pairs[1], w.read_conv, *pairs[2], w.norm, *pairs[3], w.write_conv,
            w.gates, w.bias, w.prefix_k, w.prefix_v, w.scale, *rotary,
        ]  # fmt: skip

    def _made(self, tokens: Sequence[Any]) -> list[Tensor]:
        """Empty tensors for what `Streams` of segments.cpp makes; zeros for gates that the memory lacks."""
        x, (T, H) = tokens[0], tokens[1].shape[:2]
        D, C, A = x.shape[1], tokens[1][0].numel(), tokens[3][0].numel()
        widths = C, C, D, 2 * A, A, A, A, D, D, 3 * C, C, C, C
        return [*(x.new_empty(T, n) for n in widths), *x.new_zeros(5, T, H), x.new_empty(T, C)]


class _Segments(torch.autograd.Function):
    """`_Call` as an autograd function."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *arguments: Any):
        ctx.set_materialize_grads(False)
        kept = arguments[0].new_empty(call.kept_numel)
        outputs, made = call.forward(arguments, kept)
        ctx.save_for_backward(*arguments, kept, *made)
        ctx.call = call
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *doutputs: Any):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = ctx.saved_tensors  # read once: under activation checkpointing a second read fails
        given = zip(doutputs, (saved[0], saved[0], saved[1]), strict=False)
        douts = [torch.zeros_like(x) if d is None else d for d, x in given]
        return None, *ctx.call.backward(saved, douts, doutputs[3:])
