"""The parallel form: a chunk is a handful of matmuls, chunks follow one another. Any depth, any device.

Forward and backward go block by block. A block is a run of consecutive chunks: their states are found in
sequence, everything else about them is computed at once. Saved for the backward pass are chunk-start
states: all of them while they are few, else the first of each block, the others being found again.

Shapes: N documents, H heads, R = chunks * heads rows of a block, b tokens of a chunk, D/F widths of a
layer's input and output. A layer's weights and momentum are stacked over the input: WS [.., 2 D, F].
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, isqrt
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titans_kernels.memory.activations import ACTIVATIONS, Activation
from titans_kernels.memory.backward import Step, curves, leaving, read_backward, step_backward
from titans_kernels.memory.gates import Gates, coefficients, coefficients_backward
from titans_kernels.memory.layout import Layout, equal_rows, packed
from titans_kernels.memory.options import Inputs, Layers, Options, Result
from titans_kernels.memory.passes import Keys, Last, Reads, advance, cut, halves, keys_pass, read_pass

KEEP_BYTES = 64 * 2**20
"""Chunk-start states up to this size are all kept for the backward pass; of more, every G-th."""
KEEP_WORK_BYTES = 32 * 2**20
"""Everything else a call computes is kept too, rather than found again, while it is no more than this."""
CACHE_BYTES = 512 * 2**10
"""States that a core's cache holds beside the rest of a chunk's work."""
BLOCK_BYTES = 2 * 2**20
"""States of a block, where all are kept: small enough to stay in cache from one phase to the next."""


def forget_and_learn(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    """The same function as `reference.forget_and_learn`."""
    q = inputs.q
    if options.cu_seqlens is None:
        layout = equal_rows(q.shape[0], q.shape[1], options.chunk_size, q.device)
    else:
        layout = packed(options.cu_seqlens, options.chunk_size)
    state = [*weights, *momentum]
    if layout.order is not None:
        state = [x[layout.order] for x in state]
    f, bound = ACTIVATIONS[options.activation], options.surprise_bound
    at_once = _heads_at_once(state)
    tokens = zip(*(x.split(at_once, 2) for x in inputs), strict=True)
    heads = zip(*(x.split(at_once, 1) for x in state), strict=True)
    done = [_Memory.apply(layout, f, bound, *map(layout.split, x), *s) for x, s in zip(tokens, heads, strict=True)]
    y, *state = (torch.cat(parts, 1) for parts in zip(*done, strict=True)) if len(done) > 1 else done[0]
    if layout.order is not None:
        back = layout.order.argsort()
        state = [x[back] for x in state]
    depth = len(weights)
    return layout.join(y), tuple(state[:depth]), tuple(state[depth:])


def _heads_at_once(state: Sequence[Tensor]) -> int:
    """Heads are independent: on a CPU, as many at a time as its caches hold states of."""
    if state[0].device.type != "cpu":
        return state[0].shape[1]
    per_head = sum(x[:, 0].numel() * x.element_size() for x in state)
    return max(1, CACHE_BYTES * torch.get_num_threads() // per_head)


class Saved(NamedTuple):
    """What a block leaves for its backward: each chunk's state, or the first's; the rest where it is kept."""

    states: list[Tensor]
    rest: tuple[Keys, Gates, Reads] | None


class Plan(NamedTuple):
    """How the steps of a call are grouped into blocks, and what these keep for their backward."""

    blocks: list[tuple[int, int]]  # first and last + 1 step
    keep_states: bool

    @staticmethod
    def of(rows: tuple[int, ...], row_bytes: int) -> Plan:
        """For steps of ``rows`` documents whose state takes ``row_bytes`` each."""
        total, step_bytes = sum(rows) * row_bytes, rows[0] * row_bytes
        # with very many steps, as many block starts are kept as a block has states
        stride = ceil(total / max(KEEP_BYTES, isqrt(total * step_bytes)))
        size = max(stride, BLOCK_BYTES // step_bytes, 1)
        blocks = [(i, min(i + size, len(rows))) for i in range(0, len(rows), size)]
        return Plan(blocks, stride == 1)

    def save(self, states: list[Tensor], keys: Keys, gates: Gates, reads: Reads, first: int) -> Saved:
        """What a block keeps; ``first`` is how many rows its first chunks take."""
        if not self.keep_states:
            return Saved([x[:first].clone() for x in states], None)
        rest = (keys, gates, reads)
        return Saved(states, rest if _nbytes(rest) * len(self.blocks) <= KEEP_WORK_BYTES else None)


class _Memory(torch.autograd.Function):
    """Chunks [M, H, b, ...] and states [N, H, D, F] in the layout's order, to y and the states after."""

    @staticmethod
    def forward(ctx, layout, f, bound, q, k, v, alpha, eta, theta, *state):
        heads = q.shape[1]
        inputs = [x.flatten(0, 1) for x in (q, k, v, alpha, eta, theta)]
        current = _stack(state)
        plan = Plan.of(layout.rows, sum(WS[0].nbytes for WS in current) * heads)
        y, saved = torch.empty_like(inputs[2]), []
        for span in plan.blocks:
            block = _Block(span, heads, layout, inputs, f, bound)
            states, keys = block.run(current)
            y[block.rows], reads = read_pass(block.q, keys, states, block.gates, f)
            if any(ctx.needs_input_grad):
                saved.append(plan.save(states, keys, block.gates, reads, block.sizes[0]))
        ctx.save_for_backward(*inputs)
        ctx.plan, ctx.saved = plan, saved
        ctx.layout, ctx.f, ctx.bound, ctx.heads = layout, f, bound, heads
        return y.view_as(v), *_unstack(current, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, *dstate):  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.autocast(dy.device.type, enabled=False):
            inputs = ctx.saved_tensors
            carry, dy = _stack(dstate), dy.flatten(0, 1)
            grads = [torch.empty_like(x) for x in inputs]
            for span, saved in zip(reversed(ctx.plan.blocks), reversed(ctx.saved), strict=True):
                block = _Block(span, ctx.heads, ctx.layout, inputs, ctx.f, ctx.bound, saved.rest)
                results = block.backward(dy[block.rows], *block.recall(saved, ctx.plan.keep_states), carry)
                for whole, piece in zip(grads, results, strict=True):
                    whole[block.rows] = piece
        dinputs = (g.unflatten(0, (-1, ctx.heads)) for g in grads)
        return None, None, None, *dinputs, *_unstack(carry, ctx.heads)


class _Block:
    """One run of steps: its share of the inputs [R, b, ...] and its coefficients.

    The states handed to it hold a row for each document and head, of which a step touches the first ones,
    those still running.
    """

    def __init__(
        self, span: tuple[int, int], heads: int, layout: Layout, inputs: Sequence[Tensor], f: Activation,
        bound: float | None, rest: tuple[Keys, Gates, Reads] | None = None,
    ):  # fmt: skip
        self.f, self.bound = f, bound
        first, here = sum(layout.rows[: span[0]]), layout.rows[span[0] : span[1]]
        self.sizes = [n * heads for n in here]
        self.rows = slice(first * heads, first * heads + sum(self.sizes))
        self.q, self.k, self.v, alpha, eta, self.theta = (x[self.rows] for x in inputs)
        self.gates = rest[1] if rest else coefficients(alpha, eta, self.theta)
        end = layout.last_M[first : first + sum(here)].repeat_interleave(heads)
        self.end = (torch.arange(end.shape[0], device=end.device), end)
        g = self.gates
        self.last = Last(
            *(x[self.end][:, :, None] for x in (g.C, g.N)),
            *(x[self.end][:, None, None] for x in (g.beta, g.m, g.h)),
        )

    def run(self, current: list[Tensor], to_the_end: bool = True) -> tuple[list[Tensor], Keys]:
        """Chunk after chunk: the states they start from [R, 2 D, F] and their keys; ``current`` moves on.

        Not ``to_the_end``, the state after the last chunk is left out.
        """
        states = [x.new_empty(sum(self.sizes), *x.shape[1:]) for x in current]
        keys = Keys.room(self.k, states, self.bound)
        pieces = cut((*keys, [self.v], self.last, states), self.sizes)
        for i, (*parts, (v,), last, start) in enumerate(pieces):
            now = [x[: self.sizes[i]] for x in current]
            for slot, x in zip(start, now, strict=True):
                slot.copy_(x)
            here = Keys(*parts)
            keys_pass(here, v, start, self.f, self.bound)
            if to_the_end or i < len(pieces) - 1:
                advance(now, here, Last(*last))
        return states, keys

    def recall(self, saved: Saved, keep_states: bool) -> tuple[list[Tensor], Keys, Reads]:
        """States, keys and reads as they were in the forward pass."""
        if saved.rest:
            return saved.states, saved.rest[0], saved.rest[2]
        if keep_states:
            states, keys = saved.states, Keys.room(self.k, saved.states, self.bound)
            keys_pass(keys, self.v, states, self.f, self.bound)
        else:
            states, keys = self.run([x.clone() for x in saved.states], to_the_end=False)
        return states, keys, read_pass(self.q, keys, states, self.gates, self.f, top=False)[1]

    def backward(
        self, dy: Tensor, states: list[Tensor], keys: Keys, reads: Reads, carry: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Gradients of q, k, v, alpha, eta, theta; ``carry`` moves to the gradient of the first state."""
        grad = read_backward(dy, states, keys, reads, self.gates, self.f)
        dlast = [torch.zeros_like(grad.starts), dy.new_zeros(dy.shape[0], 2, 2)]
        whole = Step(
            states, keys.X, keys.d, keys.scale, *curves(keys, self.f), leaving(keys, self.last),
            reads.scaled, grad.z, list(self.last), grad.X, grad.d, dlast,
        )  # fmt: skip
        for size, pieces in zip(reversed(self.sizes), reversed(cut(whole, self.sizes)), strict=True):
            step_backward(Step(*pieces), [x[:size] for x in carry], self.bound)
        return grad.q, grad.X[0], grad.d[-1] * -2, *self._gates_backward(grad.C, grad.starts, *dlast)

    def _gates_backward(self, dC: Tensor, dstarts: Tensor, dcn: Tensor, inner: Tensor) -> tuple[Tensor, ...]:
        """``dcn`` and ``inner``: gradients that reach C, N, beta, m and h in the row of the last token."""
        dbeta, dm = dstarts.unbind(-1)
        dN, dh = torch.zeros_like(dC), torch.zeros_like(dm)
        dC[self.end] += dcn[..., 0]
        dN[self.end] = dcn[..., 1]
        dbeta[self.end] += inner[:, 0, 0]
        dm[self.end] += inner[:, 0, 1]
        dh[self.end] = inner[:, 1, 1]
        return coefficients_backward(self.theta, self.gates, dC, dN, dbeta, dm, dh)


def _stack(state: Sequence[Tensor]) -> list[Tensor]:
    """L weights and L momenta [N, H, D, F] to L stacks [N * H, 2 D, F], newly made."""
    depth = len(state) // 2
    return [torch.cat(pair, -2).flatten(0, 1) for pair in zip(state[:depth], state[depth:], strict=True)]


def _unstack(stacks: Sequence[Tensor], heads: int) -> list[Tensor]:
    """Inverse of `_stack`."""
    pairs = [halves(x.unflatten(0, (-1, heads)), -2) for x in stacks]
    return [pair[i].contiguous() for i in (0, 1) for pair in pairs]


def _nbytes(parts: Sequence[Sequence[Tensor | Sequence[Tensor]]]) -> int:
    return sum(x.nbytes if isinstance(x, Tensor) else _nbytes([x]) for part in parts for x in part)
