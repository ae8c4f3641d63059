"""The state of a sequence between two calls of `decode`, on a chunk boundary or inside a chunk.

Shapes: B batch, H heads, D/F input/output width of a layer, p tokens in the open chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from titans_kernels.memory.activations import ACTIVATIONS
from titans_kernels.memory.forms.autograd import OpenChunk
from titans_kernels.memory.forms.reference import end_chunk
from titans_kernels.memory.options import (
    Inputs,
    Layers,
    MemoryState,
    distances,
    whole,
    without_autocast,
)
from titans_kernels.memory.rules import Rule
from titans_kernels.memory.window import WindowState


class DecodeState(NamedTuple):
    """The state of a sequence, float32 (float64 for float64 input).

    On a chunk boundary it serves every rule; inside a chunk, a linear one (`Rule.linear`) with one alpha per
    head.

    Let W, S be the state at the start of the open chunk and g_i = X_i^T d_i the gradients of its tokens. Then
    the current weights are ``beta W + m S - sum_i c_i g_i`` and the current momentum is
    ``h S - sum_i n_i g_i``. With a base, W and the current weights are offsets from it.
    """

    weights: Layers  # at the start of the open chunk [B, H, D, F]
    momentum: Layers
    inputs: Layers  # X of each layer [B, H, p, D]
    errors: Layers  # d of each layer [B, H, p, F]
    c: Tensor  # [B, H, p]
    n: Tensor
    beta: Tensor  # [B, H]
    m: Tensor
    h: Tensor
    steps: Tensor  # effective steps of the tokens with a write budget [B, H, p], else [B, H, 0]
    etas: Tensor  # eta of the tokens for a rule with `end_chunk` [B, H, p], else [B, H, 0]

    @staticmethod
    def of(state: MemoryState) -> DecodeState:
        """A `DecodeState` on a chunk boundary; the tensors of ``state`` are [B, H, D, F]."""
        first = state.weights[0]
        B, H = first.shape[:2]
        no_rows = first.new_zeros(B, H, 0)
        return DecodeState(
            tuple(state.weights),
            tuple(state.momentum),
            tuple(W.new_zeros(B, H, 0, W.shape[-2]) for W in state.weights),
            tuple(W.new_zeros(B, H, 0, W.shape[-1]) for W in state.weights),
            no_rows, no_rows, first.new_ones(B, H), first.new_zeros(B, H), first.new_ones(B, H), no_rows,
            no_rows,
        )  # fmt: skip

    @property
    def position(self) -> int:
        """Number of tokens in the open chunk; 0 on a chunk boundary."""
        return self.n.shape[-1]

    @property
    def keys(self) -> Tensor:
        """Keys of the open chunk's tokens [B, H, p, D]."""
        return self.inputs[0]

    @property
    def opened(self) -> tuple[Tensor, ...]:
        """Everything but the starting weights and momentum that determines the current weights, flattened."""
        return (*self.inputs, *self.errors, self.c, self.n, self.beta, self.m, self.h)

    def memory(self) -> MemoryState:
        """Weights and momentum after the last token."""
        if not self.position:
            return MemoryState(self.weights, self.momentum)
        beta, m, h = (x[..., None, None] for x in (self.beta, self.m, self.h))
        W, S = [], []
        with without_autocast(self.n):
            for W0, S0, X, d in zip(self.weights, self.momentum, self.inputs, self.errors, strict=True):
                W.append(beta * W0 + m * S0 - (X * self.c[..., None]).mT @ d)
                S.append(h * S0 - (X * self.n[..., None]).mT @ d)
        return MemoryState(tuple(W), tuple(S))

    def ended(self, rule: Rule, base: Layers, activation: str) -> MemoryState:
        """`memory` after `Rule.end_chunk` of a full chunk."""
        now = self.memory()
        if not rule.ends_chunks:
            return now
        beta, m, h = (x[..., None, None] for x in (self.beta, self.m, self.h))
        kept = tuple(beta * W + m * S for W, S in zip(self.weights, self.momentum, strict=True))
        W, S = end_chunk(
            rule, ACTIVATIONS[activation], (whole(now.weights, base), now.momentum),
            (whole(self.weights, base), self.momentum),
            (whole(kept, base), tuple(h * S for S in self.momentum)), [beta] * len(kept), self.etas,
        )  # fmt: skip
        return MemoryState(distances(W, base), S)


AnyState = DecodeState | OpenChunk | WindowState
"""The state of a sequence, on a chunk boundary or inside a chunk."""


def state_numel(
    shapes: Sequence[Sequence[int]],
    position: int,
    rule: Rule,
    groups: int | None = None,
    write_budget: float | None = None,
    before: int = 0,
) -> int:
    """Number of elements in the state of one head, ``position`` tokens into a chunk.

    Args:
        shapes: [D, F] of each layer.
        position: number of tokens in the open chunk.
        rule: the update rule.
        groups: A, for alpha per column; None for one alpha per head.
        write_budget: as in `neural_memory`; a budget needs the tokens' effective steps.
        before: number of tokens before the open chunk, which a rule with a `Rule.window` keeps some of.
    """
    weights, steps = sum(D * F for D, F in shapes), position if write_budget else 0
    if rule.window:
        widths = shapes[0][0] + shapes[-1][-1]
        held = min(rule.window, before) * widths + position * (widths + 3 + rule.extra_gates)
        return (4 if position else 2) * weights + held
    if position and not has_factors(rule, by_column=groups is not None):
        ends = rule.ends_chunks
        layers, gates = 6 if ends else 3, (groups or 1) + ends
        return layers * weights + position * gates + steps * (1 + shapes[0][0])
    gates = (2 + rule.ends_chunks) * position + 3
    return 2 * weights + position * sum(D + F for D, F in shapes) + gates + steps


def has_factors(rule: Rule, by_column: bool) -> bool:
    """Whether the state inside a chunk is a `DecodeState`; ``by_column``: alpha is per group of columns."""
    return rule.linear and not by_column


def after_lag_token(state: MemoryState, token: Inputs, rule: Rule) -> DecodeState | OpenChunk:
    """One token into a chunk whose first token is a part of its own (`Rule.parts`): a token without gradient.

    ``state`` is that after the token, and ``token`` [B, 1, H, ...] its inputs.
    """
    k, alpha, eta = (x.transpose(1, 2) for x in (token.k, token.alpha, token.eta))
    etas = eta.clone() if rule.ends_chunks else eta[..., :0]
    if not has_factors(rule, token.forgets_by_column):
        return OpenChunk.of(state, rule)._replace(alpha=torch.zeros_like(alpha), etas=etas)
    opened, c, n = DecodeState.of(state), torch.zeros_like(eta), torch.zeros_like(eta)
    X, d = (tuple(x.new_zeros(*x.shape[:2], 1, x.shape[-1]) for x in part) for part in opened[2:4])
    return opened._replace(inputs=(k.clone(), *X[1:]), errors=d, c=c, n=n, etas=etas)


def with_steps(state: AnyState, k: Tensor, steps: Tensor) -> AnyState:
    """The open chunk with the keys and steps that the budget of its next tokens depends on."""
    if isinstance(state, DecodeState):  # which has the keys
        return state._replace(steps=steps)
    return state._replace(keys=torch.cat([state.keys, k.transpose(1, 2)], 2), steps=steps)


def as_factors(state: AnyState) -> DecodeState:
    """The state as factors of gradients. Raises ValueError inside a chunk of another kind of rule."""
    if isinstance(state, DecodeState):
        return state
    raise ValueError(
        "state: inside a chunk of another rule or of alpha per column; continue with the same rule and alpha"
    )


def as_open_chunk(state: AnyState, rule: Rule) -> OpenChunk:
    """The state as weights after the last token. Raises ValueError inside a chunk of a linear rule."""
    if isinstance(state, OpenChunk):
        return state
    if state.position:
        raise ValueError(
            "state: inside a chunk of a linear rule; continue with that rule and one alpha per head"
        )
    return OpenChunk.of(state.memory(), rule)
