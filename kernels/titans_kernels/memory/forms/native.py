"""The paper's rule in C++ for a CPU: `native/memory.cpp`.

Parallel over documents and heads, whose state and temporaries stay in the cache if the memory is small. On
one thread it is about three times as fast as `chunked` with heads of width 64, and 1.1 to 1.3 times with one
of width 1,024. Without a C++ compiler `chunked` is used instead.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from functools import lru_cache
from math import isqrt
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titans_kernels.memory.options import Inputs, Layers, Options, Result, distances, whole
from titans_kernels.memory.parts.layout import document_borders
from titans_kernels.native import library, numbers, parallel_for, pointer, pointers

KEEP_BYTES = 24 * 2**20
"""Chunk-start states up to this size are all saved for the backward; beyond it one of every few, and the
backward recomputes the others. That is no slower: allocations above 32 MB get new pages in every call."""
ACTIVATIONS = ("silu", "gelu", "identity")  # in the order of `memory.cpp`


def refusal(inputs: Inputs, weights: Layers, options: Options) -> str | None:
    """Return the reason for which the library does not support a call, or None if it does."""
    if reason := options.refusal(inputs, columns=False):
        return reason
    if inputs.q.device.type != "cpu":
        return "C++ runs on CPUs only"
    return None if library(inputs.state_dtype) else "no C++ compiler, or it failed"


def write_and_read(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    """Write and read every token, as `reference.write_and_read` does."""
    call, depth = Call.of(inputs, weights, options), len(weights)
    tokens, before = inputs.to_state_dtype()[:6], (*weights, *momentum)
    fixed = (*options.base, *options.norm)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*tokens, *before, *fixed)):
        y, *state = _Memory.apply(call, *tokens, *before, *fixed)
    else:
        y, *state = call.forward(tokens, before, fixed)
    return y, tuple(state[:depth]), tuple(state[depth:])


def extend(
    inputs: Inputs, weights: Layers, momentum: Layers, held: Sequence[Tensor], options: Options
) -> tuple[Tensor, Layers, Layers, list[Tensor]]:
    """Write and read tokens that start or end inside a chunk, without a gradient.

    ``held`` is `state.DecodeState.opened` before the call; the last result is the same after the call, empty
    on a chunk boundary. With a base, weights are offsets from it.
    """
    depth, before, held = len(weights), held[0].shape[2], [x.contiguous() for x in held]
    tokens = before + inputs.q.shape[1]
    n = tokens % options.chunk_size
    left = [x.new_empty(*x.shape[:2], *([n] if x.ndim > 2 else []), *x.shape[3:]) for x in held] if n else []
    edges, call = _Edges.of(before, held, left), Call.of(inputs, weights, options)
    state, closes = (*whole(weights, options.base), *momentum), tokens >= options.chunk_size
    fixed = (*options.base, *options.norm)
    y, *after = call.forward(inputs.to_state_dtype()[:6], state, fixed, edges=edges, closes=closes)
    if not closes:
        return y, weights, momentum, left
    return y, distances(tuple(after[:depth]), options.base), tuple(after[depth:]), left


class _Edges(ctypes.Structure):
    """Number of tokens and tensors of the open chunk before and after a call."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("before", "after")),
        *((name, ctypes.c_void_p) for name in ("held", "left")),
    )

    @staticmethod
    def of(before: int, held: Sequence[Tensor], left: Sequence[Tensor]) -> _Edges:
        arrays = pointers(held), pointers(left)
        edges = _Edges(before, bool(left), *map(ctypes.addressof, arrays))
        edges.arrays = arrays  # keeps the memory alive
        return edges


class Spec(ctypes.Structure):
    """Of a call, as in `native/calls.h`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("heads", "depth", "chunk", "activation", "norm")),
        ("bound", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("parts", "every")),
        *((name, ctypes.c_void_p) for name in ("widths", "borders", "kept")),
    )


class Call(NamedTuple):
    """The options of one call and the layout of its documents.

    Tokens are q, k, v [B, T, H, D] and the gates [B, T, H]; a state is L weights and L momenta [N, H, D, F];
    ``fixed`` is a base [H, D, F] per layer, if there is one, and LN's weight and bias [H, D], likewise.
    """

    spec: Spec
    arrays: tuple[ctypes.Array, ...]  # keeps the memory of the spec alive
    documents: int
    cdll: ctypes.CDLL
    kept_numel: int  # of the states that the backward needs

    @staticmethod
    def of(inputs: Inputs, weights: Layers, options: Options) -> Call:
        """Plan a call. Raises ValueError if the library does not compile; `refusal` checks that first."""
        compiled = library(inputs.state_dtype)
        if compiled is None:
            raise ValueError("backend: native needs a C++ compiler")
        lengths, b, heads = _lengths(inputs.q, options.cu_seqlens), options.chunk_size, inputs.q.shape[2]
        widths = (*(W.shape[-2] for W in weights), weights[-1].shape[-1])
        size, chunks = heads * kept_numel(widths), sum(-(-n // b) for n in lengths)
        # with very many chunks: as many states kept as computed again at a time
        most = max(KEEP_BYTES // (size * inputs.state_dtype.itemsize), isqrt(chunks), 1)
        every = max(-(-chunks // most), 1)
        arrays = numbers(widths), *tables(lengths, b * every)
        spec = Spec(
            heads, len(weights), b, ACTIVATIONS.index(options.activation), bool(options.norm),
            options.surprise_bound or 0.0, 3 if options.base else 2, every, *map(ctypes.addressof, arrays),
        )  # fmt: skip
        return Call(spec, arrays, len(lengths), compiled, arrays[2][len(lengths)] * size)

    def forward(
        self,
        tokens: Sequence[Tensor],
        state: Sequence[Tensor],
        fixed: Sequence[Tensor] = (),
        kept: Tensor | None = None,
        edges: _Edges | None = None,
        closes: bool = True,
    ) -> list[Tensor]:
        """y and the state after the last token; with ``edges``, the state on the last chunk boundary.

        If ``closes`` is False, no chunk is completed and the state is returned as given. Chunk-start states
        are written to ``kept``.
        """
        tokens, before = [x.contiguous() for x in tokens], [_rows(x) for x in state]
        fixed = [x.contiguous() for x in fixed]
        y, after = torch.empty_like(tokens[2]), [x.new_empty(x.shape) for x in state if closes]
        strides = numbers(tuple(x.stride(0) for x in before))
        self._run(
            self.cdll.memory_forward, pointers([*tokens, y]), pointers(before), strides,
            pointers(fixed), pointers(after) if closes else None, pointer(kept),
            ctypes.byref(edges or _Edges()),
        )  # fmt: skip
        return [y, *(after or state)]

    def backward(
        self,
        tokens: Sequence[Tensor],
        fixed: Sequence[Tensor],
        kept: Tensor,
        dy: Tensor,
        dafter: Sequence[Tensor | None],
    ) -> list[Tensor]:
        """Gradients of the tokens, of the state before them and of ``fixed``; None in ``dafter`` is zeros."""
        tokens, fixed = [x.contiguous() for x in tokens], [x.contiguous() for x in fixed]
        dafter, dy = [None if x is None else x.contiguous() for x in dafter], dy.contiguous()
        grads, before = [torch.empty_like(x) for x in tokens], self._like_state(dy, fixed)
        self._run(
            self.cdll.memory_backward, pointers([*tokens, None]), pointers(fixed), pointer(kept),
            pointers(dafter), pointers([*grads, dy]), pointers(before),
        )  # fmt: skip
        last = 2 * self.spec.depth
        return [*grads, *before[:last], *(x.sum(0) for x in before[last:])]

    def _like_state(self, x: Tensor, fixed: Sequence[Tensor]) -> list[Tensor]:
        """Allocate tensors of each document and head, for the gradients of the state and of ``fixed``."""
        shapes = [(self.spec.heads, *pair) for pair in itertools.pairwise(self.arrays[0])]
        shapes = [*2 * shapes, *(tuple(part.shape) for part in fixed)]
        return [x.new_empty(self.documents, *shape) for shape in shapes]

    def _run(self, function: ctypes._NamedFuncPointer, *arguments: object) -> None:
        """Run in parallel over documents and heads."""
        spec = ctypes.byref(self.spec)
        parallel_for(self.documents * self.spec.heads, lambda *jobs: function(spec, *arguments, *jobs))


class _Memory(torch.autograd.Function):
    """`Call` as an autograd function."""

    @staticmethod
    def forward(ctx, call, *arguments):
        ctx.set_materialize_grads(False)
        kept = arguments[0].new_empty(call.kept_numel)
        last = 6 + 2 * call.spec.depth
        fixed = arguments[last:]
        outputs = call.forward(arguments[:6], arguments[6:last], fixed, kept)
        ctx.save_for_backward(*arguments[:6], kept, *fixed)
        ctx.call = call
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *doutputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        # read once: under activation checkpointing a second read fails
        saved = ctx.saved_tensors
        tokens, (kept, *fixed) = saved[:6], saved[6:]
        dy = torch.zeros_like(tokens[2]) if doutputs[0] is None else doutputs[0]
        return None, *ctx.call.backward(tokens, fixed, kept, dy, doutputs[1:])


def _lengths(q: Tensor, cu_seqlens: Tensor | None) -> tuple[int, ...]:
    B, T = q.shape[:2]
    if cu_seqlens is None:
        return (T,) * B
    borders = document_borders(cu_seqlens, T)
    return tuple(b - a for a, b in itertools.pairwise(borders))


def kept_numel(widths: Sequence[int]) -> int:
    """Numbers that are kept of a head at the start of a chunk: weights and momenta, their sides padded."""
    rounded = [-(-n // 16) * 16 for n in widths]
    return 2 * sum(D * F for D, F in itertools.pairwise(rounded))


@lru_cache(maxsize=32)
def tables(lengths: tuple[int, ...], every: int) -> tuple[ctypes.Array, ctypes.Array]:
    """Cumulative lengths of the documents, in tokens and in states, one per ``every`` tokens."""
    borders, states = [0], [0]
    for n in lengths:
        borders.append(borders[-1] + n)
        states.append(states[-1] - -n // every)
    return numbers(borders), numbers(states)


def _rows(x: Tensor) -> Tensor:
    """Make a state contiguous per document; documents may share memory."""
    return x if x[0].is_contiguous() else x.contiguous()
