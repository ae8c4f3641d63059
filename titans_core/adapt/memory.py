"""The memory beside one attention layer: written with the tokens that leave the window, read by every query.

The keys, values and queries are the attention's own, before rotary positions. Full attention is
``(1 - p) window + p far``, where p is the share of the far tokens in the softmax. A read of the memory stands
for ``far`` and a gate for p, whose logit is the difference of two log sums of exponentials: the window's is
known, that over the far tokens is estimated from the query, the token and the number of far tokens.

Shapes: B rows, T tokens, D model width, H query heads, G heads of keys and values, M memories, E head width.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor, nn
from torch.nn import functional as F

from titans_core.adapt.kept import AROUND, extend_matrix
from titans_core.config import Frozen, PositiveInt
from titans_core.memory import zero_momentum
from titans_kernels import (
    AnyState,
    DecodeState,
    Extension,
    MemoryState,
    extend_memory,
    without_autocast,
)
from titans_kernels.memory.budget import effective_steps

FORGETS, CLOSED, WRITES = -7.0, -4.0, 0.0
"""Initial biases, before the sigmoid: of forgetting (0.1% a token), of the gate of the read, of a write."""
GATE_RATE = 10.0
"""Scale of the gate's two coefficients a head, which a few hundred steps take from 0 towards 1."""
SURPRISE_BOUND, WRITE_BUDGET, MAX_THETA = 0.3, 2.0, 0.1
"""Of the deep memory, as in `titans init` (`MemoryConfig`)."""


class MemoryOptions(Frozen):
    """The window and the memory of every attention layer of an adapted model."""

    kind: Literal["delta", "titans"] = "delta"
    """delta: a matrix a head under the exact gated delta rule. titans: the paper's memory, with depth,
    momentum and decay towards its initial weights."""
    window: PositiveInt = 256
    """Tokens that attention sees, the query included."""
    sinks: Annotated[int, Field(ge=0, le=64)] = 4
    """First tokens of the text, which attention sees for ever (StreamingLLM, arXiv 2309.17453)."""
    layers: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Layers with a memory; None: all."""
    heads: PositiveInt = 1
    """Memories of each query head, whose reads are added."""
    depth: PositiveInt = 2
    """titans: layers of the memory."""
    chunk: PositiveInt = 64
    """titans: tokens whose gradients are taken at the same weights."""
    kept: Annotated[int, Field(ge=0, le=4096)] = 0
    """Tokens that each layer of the upper half keeps whole: the most attended to and the most surprising."""

    @field_validator("kept")
    @classmethod
    def _scores_are_known(cls, kept: int, info: ValidationInfo) -> int:
        if kept and info.data.get("window", AROUND) < AROUND:
            raise ValueError(f"needs a window of at least {AROUND} tokens; 0 keeps none")
        return kept


class MemoryCarry(NamedTuple):
    """A memory after any token."""

    state: AnyState
    far_B: Tensor
    """Tokens that have left the window, by row."""
    steps: tuple[Tensor, ...] = ()
    """titans: effective steps of the open chunk's tokens, [B, M, p]."""


class AttentionMemory(nn.Module):
    """The memories of an attention layer's heads, and the gate that mixes their reads in.

    Args:
        width: D.
        heads: H.
        groups: G, a divisor of H.
        head_dim: E.
        options: the memory's kind and sizes.
    """

    query_MEE: nn.Parameter
    key_MEE: nn.Parameter

    def __init__(self, width: int, heads: int, groups: int, head_dim: int, options: MemoryOptions):
        super().__init__()
        count, self.deep = heads * options.heads, options.kind == "titans"
        self.heads, self.groups, self.count, self.options = heads, groups, count, options
        maps = torch.stack([torch.eye(head_dim), *(_turn(head_dim) for _ in range(options.heads - 1))])
        for name in ("query_MEE", "key_MEE"):
            setattr(self, name, nn.Parameter(maps.repeat(heads, 1, 1)))
        self.out_MEE = nn.Parameter(torch.eye(head_dim).repeat(count, 1, 1) / options.heads)
        gates = {"alpha": FORGETS, "theta": WRITES} | ({"eta": 0.0} if self.deep else {})
        self.write = nn.Linear(width, count * len(gates))
        self.mix = nn.Linear(width, heads)
        self.mix_query_HE = nn.Parameter(torch.zeros(heads, head_dim))
        self.level_H, self.count_H = nn.Parameter(torch.zeros(heads)), nn.Parameter(torch.zeros(heads))
        with torch.no_grad():
            self.write.weight.zero_()
            self.write.bias.copy_(torch.tensor(list(gates.values())).repeat_interleave(count))
            self.mix.weight.zero_()
            self.mix.bias.fill_(CLOSED)
        self.widths = [head_dim] * (1 + options.depth) if self.deep else [head_dim] * 2
        # M_0 as in `titans_core.init`
        self.initial = nn.ParameterList(
            torch.randn(count, *pair) * pair[0] ** -0.5 * (0.1 if i == options.depth - 1 else 1.0)
            for i, pair in enumerate(pairwise(self.widths if self.deep else []))
        )

    def freeze_maps(self) -> None:
        """Leave the gates alone to be trained."""
        for fixed in (self.query_MEE, self.key_MEE, self.out_MEE, *self.initial):
            fixed.requires_grad_(False)

    def start(self, rows: int, like: Tensor) -> MemoryCarry:
        """Return the memory before the first token: M_0, or zero."""
        # offsets from M_0, towards which the deep memory forgets
        weights = tuple(
            like.new_zeros(rows, self.count, *pair, dtype=torch.float32) for pair in pairwise(self.widths)
        )
        momentum = tuple(torch.zeros_like(W) for W in weights) if self.deep else zero_momentum(weights)
        far_B = like.new_zeros(rows, dtype=torch.long)
        return MemoryCarry(DecodeState.of(MemoryState(weights, momentum)), far_B)

    def gates(self, x_BTD: Tensor) -> Tensor:
        """Logits of the writing gates of tokens, [B, T, A]."""
        return _float(self.write, x_BTD)

    def extend(
        self, q_BTHE: Tensor, k_BTGE: Tensor, v_BTGE: Tensor, gates_BTA: Tensor, carry: MemoryCarry
    ) -> tuple[Tensor, MemoryCarry]:
        """Write a token that has left the window, then read with the query that it leaves: [B, T, H, E]."""
        each = lambda x: x.float().repeat_interleave(self.count // x.shape[2], 2)  # noqa: E731
        q = F.normalize(_mapped(each(q_BTHE), self.query_MEE), dim=-1)
        k, v = F.normalize(_mapped(each(k_BTGE), self.key_MEE), dim=-1), each(v_BTGE)
        alpha, theta, *eta = gates_BTA.sigmoid().split(self.count, -1)
        if self.deep:
            v = F.normalize(v, dim=-1)
            y, carry = self._extend_deep(q, k, v, alpha, eta[0], MAX_THETA * theta, carry)
        else:
            y, state = extend_matrix(q, k, v, alpha, theta, carry.state)
            carry = MemoryCarry(state, carry.far_B + k.shape[1])
        y = _mapped(y.float(), self.out_MEE).unflatten(2, (self.heads, -1)).sum(3)
        return y, carry

    def _extend_deep(
        self, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, eta: Tensor, theta: Tensor, carry: MemoryCarry
    ) -> tuple[Tensor, MemoryCarry]:
        size = self.options.chunk
        held = (carry.state.keys, carry.steps[0]) if carry.steps else None
        theta, new = effective_steps(k, eta, theta, size, held=held, budget=WRITE_BUDGET)
        y, after = extend_memory(
            q, k, v, alpha, eta, theta, carry.state, chunk_size=size, surprise_bound=SURPRISE_BOUND,
            extension=Extension(base=tuple(W.float() for W in self.initial)),
        )  # fmt: skip
        steps = torch.cat([*carry.steps, new.transpose(1, 2)], 2)
        # a copy: a view would keep the steps of all tokens
        kept = (steps[..., steps.shape[-1] - after.position :].clone(),) if after.position else ()
        return y, MemoryCarry(after, carry.far_B + k.shape[1], kept)

    def share(self, x_BTD: Tensor, q_BTHE: Tensor, level_BTH: Tensor, far_BT: Tensor) -> Tensor:
        """[B, T, H, 1], the share of the far tokens in the softmax.

        Args:
            x_BTD: the layer's normalised input.
            q_BTHE: queries before positions.
            level_BTH: log of the sum of exponentials of all scores that are seen, less log(W + S).
            far_BT: far tokens before each query, at least 1.
        """
        # of n far tokens to 4 windows more: grows with n at first, and ends at 0
        growth_BT = (far_BT / (far_BT + 4 * self.options.window)).log()
        logit = _float(self.mix, x_BTD) + (q_BTHE.float() * self.mix_query_HE.float()).sum(-1)
        far_BTH = self.count_H.float() * growth_BT[..., None] - self.level_H.float() * level_BTH
        return (logit + GATE_RATE * far_BTH).sigmoid()[..., None]


def _float(layer: nn.Linear, x: Tensor) -> Tensor:
    with without_autocast(x):
        return F.linear(x.float(), layer.weight.float(), layer.bias.float())


def _mapped(x_BTME: Tensor, maps_MEF: Tensor) -> Tensor:
    with without_autocast(x_BTME):
        return torch.einsum("btme,mef->btmf", x_BTME, maps_MEF.float())


def _turn(width: int) -> Tensor:
    return nn.init.orthogonal_(torch.empty(width, width))
