"""Decoding with a rule that writes a token together with earlier ones (`Rule.window`).

Shapes: B batch, T new tokens, H heads, D/F input/output width of a layer, p tokens in the open chunk, w at
most `Rule.window` tokens before it, E gates of the rule's own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from titans_kernels.memory.forms.factored import Window, write_rows
from titans_kernels.memory.options import Inputs, Layers, MemoryState, Options, distances, whole


class WindowState(NamedTuple):
    """The state of a sequence: the start of the open chunk, its tokens, those before it."""

    weights: Layers  # at the start of the open chunk [B, H, D, F]; with a base, the offset from it
    momentum: Layers
    now: MemoryState  # after the last token; empty on a chunk boundary
    before: Window  # k, v of the tokens before the chunk [B, H, w, D]
    keys: Tensor  # [B, H, p, D]
    values: Tensor
    gates: Tensor  # alpha, eta, theta and the rule's own [B, H, p, 3 + E]
    steps: Tensor  # [B, H, 0]: there is no write budget

    @property
    def position(self) -> int:
        """Number of tokens in the open chunk; 0 on a chunk boundary."""
        return self.keys.shape[2]

    def memory(self) -> MemoryState:
        """Weights and momentum after the last token."""
        return self.now if self.position else MemoryState(self.weights, self.momentum)


def extend(
    tokens: Inputs, start: MemoryState, state: WindowState | None, options: Options
) -> tuple[Tensor, WindowState]:
    """y [B, T, H, F] of new tokens, in the state's dtype, and the state after them.

    The open chunk is computed again from its start. ``start`` is the state of a sequence without tokens,
    where ``state`` is None.
    """
    T, b, base = tokens.q.shape[1], options.chunk_size, options.base
    new = Inputs(*(x.transpose(1, 2) for x in tokens))
    q, k, v = new[:3]
    gates = torch.cat([torch.stack([new.alpha, new.eta, new.theta], -1), new.extra], -1)
    before, W, S = Window.none(k, v), start.weights, start.momentum
    if state is not None:
        before, W, S, p = state.before, state.weights, state.momentum, state.position
        q = torch.cat([q.new_zeros(*q.shape[:2], p, q.shape[-1]), q], 2)
        held = zip((state.keys, state.values, state.gates), (k, v, gates), strict=True)
        k, v, gates = (torch.cat(pair, 2) for pair in held)
    n, W = q.shape[2], whole(W, base)
    full, outputs, after = n - n % b, [], (W, S)
    now, last = Inputs._make((q, k, v, *gates[..., :3].unbind(-1), gates[..., 3:])), before
    for part in (slice(0, full), slice(full, n)):
        if part.start == part.stop:
            continue
        (W, S), last = after, before
        y, *after, before = write_rows(Inputs(*(x[:, :, part] for x in now)), W, S, options, last)
        outputs.append(y)
    y = torch.cat(outputs, 2)[:, :, n - T :].transpose(1, 2)
    ended = MemoryState(distances(after[0], base), after[1])
    # copies, since a view would keep all tokens of the call alive
    k, v, gates = (x[:, :, full:].clone() for x in (k, v, gates))
    if full == n:
        return y, WindowState(*ended, MemoryState((), ()), before, k, v, gates, gates[..., 0])
    return y, WindowState(distances(W, base), S, ended, last, k, v, gates, gates[:, :, :0, 0])
