"""The parallel form: a few matmuls per chunk, chunks in sequence. Any depth, any device.

Forward and backward proceed block by block. A block is a run of consecutive chunks: their starting states are
computed in sequence, everything else in parallel. The forward saves the starting states of all chunks if they
are small enough, otherwise only each block's, and the backward recomputes the others.

Shapes: N documents, H heads, R = chunks * heads rows of a block, b tokens per chunk, D/F input/output width
of a layer. A layer's weights and momentum are stacked along the input: WS [.., 2 D, F].
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, isqrt
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from titans_kernels.memory.activations import ACTIVATIONS, Activation
from titans_kernels.memory.forms import channels
from titans_kernels.memory.options import Inputs, Layers, Options, Result
from titans_kernels.memory.parts.gates import ChunkGates, coefficients, coefficients_backward
from titans_kernels.memory.parts.layout import Layout, StepRange, layout_of
from titans_kernels.memory.parts.passes import (
    ChunkBackward,
    Keys,
    Last,
    Reads,
    StackedState,
    advance,
    curves,
    cut,
    held,
    keys_pass,
    leaving,
    read_backward,
    read_pass,
    step_backward,
)
from titans_kernels.memory.residual import Norm

KEEP_BYTES = 32 * 2**20
"""Chunk-start states up to this size are all saved for the backward; beyond it, one per block."""
KEEP_WORK_BYTES = 32 * 2**20
"""All other intermediate results up to this size are saved too, instead of being recomputed."""
CACHE_BYTES = 2**20
"""Bytes of states of one step per thread that fit its cache beside the other tensors of a chunk."""
BLOCK_BYTES = 2 * 2**20
"""Bytes of states of a block per thread: larger blocks make fewer calls, but do not stay in the cache."""


def refusal(inputs: Inputs, weights: Layers, options: Options) -> str | None:
    """Return the reason for which the parallel form does not support a call, or None if it does."""
    return options.refusal(inputs)


def write_and_read(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    """Write and read every token, as `reference.write_and_read` does."""
    if inputs.by_column:
        return channels.write_and_read(inputs, weights, momentum, options)
    call = ChunkedCall.of(inputs, options)
    arguments = (*_tokens(inputs), *weights, *momentum, *call.base, *call.norm)
    if torch.is_grad_enabled() and any(x.requires_grad for x in arguments):
        y, *state = _Memory.apply(call, *arguments)
    else:
        (y, *state), _ = call.forward(arguments[:4], (*weights, *momentum), keep=False)
    depth = len(weights)
    return y, tuple(state[:depth]), tuple(state[depth:])


def gradients(
    inputs: Inputs, weights: Layers, momentum: Layers, options: Options, doutputs: Sequence[Tensor]
) -> list[Tensor]:
    """Return gradients of inputs, weights, momenta, base and LN from the gradients of y and the final state.

    Recomputes the forward pass.
    """
    if inputs.by_column:
        return channels.gradients(inputs, weights, momentum, options, doutputs)
    call, tokens = ChunkedCall.of(inputs, options), _tokens(inputs)
    _, kept = call.forward(tokens, (*weights, *momentum), keep=True)
    dq, dk, dv, dgates, *before = call.backward(tokens, kept, doutputs)
    return [dq, dk, dv, *dgates.unbind(-1), *before]


def _tokens(inputs: Inputs) -> tuple[Tensor, ...]:
    """q, k, v and the gates [B, T, H, 3], in the dtype of the state."""
    q, k, v, *gates = inputs.to_state_dtype()[:6]
    return q, k, v, torch.stack(gates, -1)


class Saved(NamedTuple):
    """Tensors that a block saves for its backward.

    The errors and the hidden outputs of the reads are the most expensive to recompute per byte.
    """

    states: list[Tensor]  # of each chunk, or of the first
    errors: list[Tensor]  # of the last layer: d, with a bound scale, where LN follows its output
    outputs: list[Tensor]  # u of `Reads`
    rest: tuple[Keys, ChunkGates, Reads] | tuple[()]  # if there is enough memory


class Plan(NamedTuple):
    """Division of a call into blocks, and the tensors that each block saves for its backward."""

    heads: list[slice]
    """Heads processed together; on a CPU, few enough for their states to fit the caches."""
    steps: list[tuple[int, int]]
    """First and last + 1 of each block."""
    keep_states: bool

    @staticmethod
    def of(layout: Layout, state: Sequence[Tensor]) -> Plan:
        """Plan a call for a state of L weights and L momenta [N, H, D, F]."""
        N, H = state[0].shape[:2]
        row_bytes = sum(x[0, 0].nbytes for x in state)
        steps, step_bytes = len(layout.rows), N * H * row_bytes
        total = sum(layout.rows) * H * row_bytes
        # with very many steps: as many blocks as states per block
        stride = ceil(total / max(KEEP_BYTES, isqrt(total * step_bytes)))
        on_cpu, threads = state[0].device.type == "cpu", torch.get_num_threads()
        at_once = max(1, min(H, CACHE_BYTES * threads // (N * row_bytes))) if on_cpu else H
        size = max(stride, BLOCK_BYTES * threads // (N * at_once * row_bytes), 1)
        return Plan(
            [slice(i, min(i + at_once, H)) for i in range(0, H, at_once)],
            [(i, min(i + size, steps)) for i in range(0, steps, size)],
            stride == 1,
        )

    def save(self, states: list[Tensor], keys: Keys, gates: ChunkGates, reads: Reads, first: int) -> Saved:
        """Select the tensors that a block saves; ``first`` is the number of rows of its first chunks."""
        errors, outputs = [keys.d[-1], *keys.scale[-1:], *keys.top], reads.u
        if not self.keep_states:
            return Saved([x[:first].clone() for x in states], errors, outputs, ())
        rest = (keys, gates, reads)
        fits = _nbytes(rest) * len(self.steps) * len(self.heads) <= KEEP_WORK_BYTES
        return Saved(states, errors, outputs, rest if fits else ())


class SavedCall(NamedTuple):
    """Tensors that a call saves for its backward."""

    plan: Plan
    blocks: list[Saved]


class ChunkedCall(NamedTuple):
    """The options of one call and the layout of its tokens.

    Tokens are q, k, v [B, T, H, D] and the gates [B, T, H, 3]; a state is L weights and L momenta
    [N, H, D, F].
    """

    layout: Layout
    f: Activation
    bound: float | None
    norm: tuple[Tensor, ...] = ()
    """LN's weight and bias [H, D]; empty without LN."""
    base: Layers = ()
    """Base of the decay, [H, D, F] per layer; empty for zero."""

    @staticmethod
    def of(inputs: Inputs, options: Options) -> ChunkedCall:
        """Set up a call from its arguments; the layout is cached per cu_seqlens."""
        layout = layout_of(inputs.q, options.chunk_size, options.cu_seqlens)
        f = ACTIVATIONS[options.activation]
        return ChunkedCall(layout, f, options.surprise_bound, options.norm, options.base)

    def forward(
        self, tokens: Sequence[Tensor], state: Sequence[Tensor], keep: bool
    ) -> tuple[list[Tensor], SavedCall]:
        """y, the state after the last token and, with ``keep``, what the backward needs."""
        layout, inputs = self.layout, [self.layout.split(x) for x in tokens]
        state = _ordered(state, layout.order)
        plan, after = Plan.of(layout, state), [torch.empty_like(x) for x in state]
        y, saved = layout.empty_like(tokens[2]), []
        for heads in plan.heads:
            base = [B[heads].repeat(len(after[0]), 1, 1) for B in self.base]
            current, norm = StackedState.of(_stack(state, heads), base), Norm.of(self.norm, heads)
            for steps in plan.steps:
                block = _Block(StepRange(steps[0], steps[1], heads), layout, inputs, self.f, self.bound, norm)
                states, keys = block.run(current)
                reads_y, reads = read_pass(block.q, keys, states.WS, block.gates, self.f, norm=norm)
                _put(y, block.index, reads_y)
                if keep:
                    saved.append(plan.save(states.WS, keys, block.gates, reads, block.sizes[0]))
            _unstack(current.WS, heads, after)
        return [layout.join(y), *_ordered(after, layout.back)], SavedCall(plan, saved)

    def backward(self, tokens: Sequence[Tensor], kept: SavedCall, doutputs: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the tokens, of the state before them, of the base and of LN."""
        layout, plan = self.layout, kept.plan
        inputs, dy = [layout.split(x) for x in tokens], layout.split(doutputs[0])
        dstate = _ordered(doutputs[1:], layout.order)
        grads, before = [layout.empty_like(x) for x in tokens], [torch.empty_like(x) for x in dstate]
        saved, dnorm = reversed(kept.blocks), tuple(torch.zeros_like(x) for x in self.norm)
        dbase = [torch.empty_like(B) for B in self.base]
        for heads in reversed(plan.heads):
            stacks = _stack(dstate, heads)
            carry = StackedState.of(
                stacks, [torch.zeros_like(x.chunk(2, 1)[0]) for x in stacks[: len(dbase)]]
            )
            norm = Norm.of(self.norm, heads, dnorm)
            for steps in reversed(plan.steps):
                own = next(saved)
                span = StepRange(steps[0], steps[1], heads)
                block = _Block(span, layout, inputs, self.f, self.bound, norm, own.rest)
                recalled = block.recall(own, plan.keep_states)
                results = block.backward(_take(dy, block.index), *recalled, carry)
                for whole, rows in zip(grads, results, strict=True):
                    _put(whole, block.index, rows)
            _unstack(carry.WS, heads, before)
            for whole, rows in zip(dbase, carry.B, strict=True):
                whole[heads] = rows.unflatten(0, (len(before[0]), -1)).sum(0)
        return [*(layout.join(x) for x in grads), *_ordered(before, layout.back), *dbase, *dnorm]


class _Memory(torch.autograd.Function):
    """`ChunkedCall` as an autograd function that saves intermediate results for the backward."""

    @staticmethod
    def forward(ctx, call, *arguments):
        fixed = *call.base, *call.norm
        state = arguments[4 : len(arguments) - len(fixed)]
        outputs, kept = call.forward(arguments[:4], state, keep=True)
        # all through save_for_backward, which frees it as soon as the backward is done
        leaves, ctx.kept_as = tree_flatten(kept.blocks)
        ctx.save_for_backward(*arguments[:4], *fixed, *leaves)
        ctx.call, ctx.plan = call._replace(norm=(), base=()), kept.plan
        ctx.sizes = len(call.base), len(call.norm)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *doutputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.autocast(doutputs[0].device.type, enabled=False):
            norm, leaves = 4 + ctx.sizes[0], 4 + sum(ctx.sizes)
            saved = ctx.saved_tensors  # read once: under activation checkpointing a second read fails
            tokens, base = saved[:4], saved[4:norm]
            kept = SavedCall(ctx.plan, tree_unflatten(saved[leaves:], ctx.kept_as))
            call = ctx.call._replace(base=base, norm=saved[norm:leaves])
            return None, *call.backward(tokens, kept, doutputs)


class _Block:
    """Consecutive steps of some heads: their slice of the inputs [R, b, ...] and their coefficients.

    The states passed to it have a row per document and head; a step updates the first rows, whose documents
    are still active.
    """

    def __init__(
        self, span: StepRange, layout: Layout, inputs: Sequence[Tensor], f: Activation, bound: float | None,
        norm: Norm | None = None, rest: tuple[Keys, ChunkGates, Reads] | tuple[()] = (),
    ):  # fmt: skip
        self.index, self.f, self.bound, self.norm = layout.index(span), f, bound, norm
        self.q, self.k, self.v, gates = (_take(x, self.index) for x in inputs)
        alpha, eta, self.theta = gates.unbind(-1)
        self.heads = span.heads.stop - span.heads.start
        self.sizes = [n * self.heads for n in layout.rows[span.first : span.stop]]
        self.gates = g = rest[1] if rest else coefficients(alpha, eta, self.theta)
        self.end = layout.ends(span, sum(self.sizes))
        self.last = Last(
            *(x[self.end][:, :, None] for x in (g.C, g.N)),
            *(x[self.end][:, None, None] for x in (g.beta, g.m, g.h)),
        )

    def run(self, current: StackedState, saved: Saved | None = None) -> tuple[StackedState, Keys]:
        """Run the chunks in sequence: starting states (for reads) and keys; updates ``current`` in place.

        When recomputing from ``saved``, the state after the last chunk is skipped.
        """
        parts, rows = 3 if current.B else 2, sum(self.sizes)
        empty = [W.new_empty(rows, parts * W.shape[1], W.shape[2]) for W in current.W]
        states = StackedState.for_reads(empty, parts)
        for whole, B in zip(states.B, current.B, strict=True):
            whole.unflatten(0, (-1, self.heads)).copy_(B[: self.heads])  # shared by all documents
        keys = self._keys(states, saved)
        pieces = cut((*keys, [self.v], self.last, states.WS, states.W), self.sizes)
        for i, (*parts, (v,), last, start, W) in enumerate(pieces):
            now = current.first(self.sizes[i])
            for slot, x in zip(start, now.WS, strict=True):
                slot.narrow(1, 0, x.shape[1]).copy_(x)
            here = Keys(*parts)
            keys_pass(here, v, W, self.f, self.bound, saved is not None, self.norm)
            if saved is None or i < len(pieces) - 1:
                advance(now, here, Last(*last))
        return states, keys

    def _keys(self, states: StackedState, saved: Saved | None) -> Keys:
        keys = Keys.empty(self.k, states.W, self.bound, self.norm)
        if saved is not None:
            scales = len(keys.scale[-1:])
            keys.d[-1], keys.scale[-1:] = saved.errors[0], saved.errors[1 : 1 + scales]
            keys.top[:] = saved.errors[1 + scales :]
        return keys

    def recall(self, saved: Saved, keep_states: bool) -> tuple[StackedState, Keys, Reads]:
        """States, keys and reads as they were in the forward pass."""
        states = StackedState.for_reads(saved.states, saved.states[0].shape[1] // self.q.shape[-1])
        if saved.rest:
            return states, saved.rest[0], saved.rest[2]
        if keep_states:
            keys = self._keys(states, saved)
            keys_pass(keys, self.v, states.W, self.f, self.bound, True, self.norm)
        else:
            both = [torch.cat(pair, 1) for pair in zip(states.W, states.S, strict=True)]
            states, keys = self.run(StackedState.of(both, states.B), saved)
        return (
            states,
            keys,
            read_pass(self.q, keys, states.WS, self.gates, self.f, saved.outputs, self.norm)[1],
        )

    def backward(
        self, dy: Tensor, states: StackedState, keys: Keys, reads: Reads, carry: StackedState
    ) -> tuple[Tensor, ...]:
        """Gradients of q, k, v and the gates; updates ``carry`` to the gradient of the first state."""
        grad = read_backward(dy, states.WS, keys, reads, self.gates, self.f, self.norm)
        parts = grad.starts.shape[-1]
        dlast = [dy.new_zeros(*dy.shape[:2], 2), dy.new_zeros(dy.shape[0], 2, parts)]
        whole = ChunkBackward(
            states.WS, states.W, keys.X, keys.d, keys.scale, held(keys, self.bound), *curves(keys, self.f),
            leaving(keys, self.last), reads.scaled, grad.z, [*keys.top, self.v] if self.norm else [],
            list(self.last), grad.X, grad.d, dlast,
        )  # fmt: skip
        for size, pieces in zip(reversed(self.sizes), reversed(cut(whole, self.sizes)), strict=True):
            step_backward(ChunkBackward(*pieces), carry.first(size), self.norm)
        dgates = self._gates_backward(grad.C, grad.starts, *dlast)
        return grad.q, grad.X[0], grad.d[-1] * -2, torch.stack(dgates, -1)

    def _gates_backward(self, dC: Tensor, dstarts: Tensor, dcn: Tensor, inner: Tensor) -> tuple[Tensor, ...]:
        """``dcn`` and ``inner``: gradients of C, N, beta, m and h in the row of the last token."""
        dbeta, dm, *drest = dstarts.unbind(-1)
        dN, dh = torch.zeros_like(dC), torch.zeros_like(dm)
        dC[self.end] += dcn[..., 0]
        dN[self.end] = dcn[..., 1]
        dbeta[self.end] += inner[:, 0, 0]
        dm[self.end] += inner[:, 0, 1]
        dh[self.end] = inner[:, 1, 1]
        for of_base in drest:  # the base has the factor 1 - beta
            dbeta -= of_base
            dbeta[self.end] -= inner[:, 0, 2]
        return coefficients_backward(self.theta, self.gates, dC, dN, dbeta, dm, dh)


def _take(x: Tensor, index: tuple[slice, ...]) -> Tensor:
    """Chunks at ``index``, which ends with the heads, as rows [R, b, ...]."""
    return x[index].flatten(0, len(index) - 1).contiguous()


def _put(x: Tensor, index: tuple[slice, ...], rows: Tensor) -> None:
    """Inverse of `_take`, into ``x``."""
    place = x[index]
    place.copy_(rows.view(place.shape))


def _ordered(state: Sequence[Tensor], order: Tensor | None) -> Sequence[Tensor]:
    """Reorder the documents; unchanged if ``order`` is None."""
    return state if order is None else [x[order] for x in state]


def _stack(state: Sequence[Tensor], heads: slice) -> list[Tensor]:
    """L weights and L momenta [N, H, D, F] to L new stacks [N * heads, 2 D, F]."""
    depth = len(state) // 2
    pairs = zip(state[:depth], state[depth:], strict=True)
    return [torch.cat([W[:, heads], S[:, heads]], -2).flatten(0, 1) for W, S in pairs]


def _unstack(stacks: Sequence[Tensor], heads: slice, out: Sequence[Tensor]) -> None:
    """Inverse of `_stack`, into ``out``."""
    for l, x in enumerate(stacks):
        W, S = x.unflatten(0, (out[0].shape[0], -1)).chunk(2, -2)
        out[l][:, heads], out[l + len(stacks)][:, heads] = W, S


def _nbytes(parts: Sequence[Sequence[Tensor | Sequence[Tensor]]]) -> int:
    return sum(x.nbytes if isinstance(x, Tensor) else _nbytes([x]) for part in parts for x in part)
