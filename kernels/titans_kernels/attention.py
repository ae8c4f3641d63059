"""Attention in C++: within a window (`native/attention.cpp`), and in MAC's segments (`native/segments.cpp`).

`attend_window` is one call for all rows. PyTorch's form of it (`titans_core.attention`) copies queries, keys
and values into blocks of twice the window, and into twice the width where there are persistent tokens.

`attend_segments` is read, attend, write, one segment after the other, in one call. What does not depend on
the carried memory is given for all tokens at once, and what follows the last read is left to the caller. At
these sizes PyTorch's operators cost more to call than to run: a segment of 32 tokens at width 64 took some
800 of them.

Shapes: B batch, T tokens, N rows or packed documents, D model width, H heads, E head width, P persistent
tokens, S keys held from before the call. Of segments H heads of width E are the memory's, C = H E; A channels
of attention, K convolution width, G gates of a token.
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
from titans_kernels.native import compiled, library, numbers, parallel_for, pointer, pointers, serves
from titans_kernels.products import outer

MAX_SPAN = 512
"""Maximum number of keys that a query sees: for more PyTorch's operators are faster."""
MAX_BYTES = 2**20
"""Maximum bytes of the projections' weights of a segment: for larger ones PyTorch's products are faster."""

Pair = tuple[Tensor, Tensor]


class WindowOptions(NamedTuple):
    """The options of a call."""

    window: int | None
    """Number of keys that a token sees, its own among them; None for all."""
    keep: int
    """Number of the last keys to return, at most S + T; 0 for packed documents."""
    rotary: Pair | None
    """Cosine and sine at each token's position in its row or document, [T, E / 2]."""
    held_B: Tensor | None = None
    """[B] int64, how many of the last held keys a row sees; None for all."""
    cu_seqlens: Tensor | None = None
    """Cumulative lengths of documents packed into the flattened batch."""


def serves_window(q: Tensor, others: Sequence[Tensor], window: int | None, held: int) -> bool:
    """Return True if the library supports a call for q [B, T, H, E] and is faster than PyTorch's operators.

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


class SegmentTokens(NamedTuple):
    """Inputs of all tokens that do not depend on the memory."""

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
    """Return True if the library supports a call for x [B, T, D] and is faster than PyTorch's operators."""
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
    """Expand a state to one per document, each contiguous; documents may share memory."""
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
        compiled, layers = library(tokens.x.dtype), state[: (len(state) - 2) // 2]
        assert compiled is not None  # by `serves_segments`
        self.cdll, self.rotary, self.documents = compiled, o.rotary, len(borders) - 1
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
            H, len(layers), o.chunk_size, native.ACTIVATIONS.index(o.activation), 0,
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
        run = self.cdll.segments_forward
        parallel_for(self.documents, lambda *jobs: run(*before, *rest, *jobs))
        return [made[7], made[8], made[-1], *after], made

    def backward(
        self, saved: Sequence[Any], douts: Sequence[Tensor], dafter: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Return gradients of the arguments from the gradients of y, z and the reads; None in ``dafter`` is
        zeros.
        """
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
        run = self.cdll.segments_backward
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
        """Lay out `Weights` of segments.cpp; projections also transposed."""
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
