"""What every form of the operator takes and gives; shapes as in `op.neural_memory`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from titans_kernels.memory.residual import Residual
from titans_kernels.memory.rules import PAPER, Rule

Layers = tuple[Tensor, ...]
"""Weights or momentum of each layer, [N, H, D_in, D_out]: one for each row or packed document."""

Result = tuple[Tensor, Layers, Layers]
"""y [B, T, H, D], weights and momentum after the last token."""


class Inputs(NamedTuple):
    """The inputs of a call that have an entry for each token."""

    q: Tensor  # [B, T, H, D]
    k: Tensor
    v: Tensor
    alpha: Tensor  # [B, T, H], or [B, T, H, A] where A groups of columns forget apart
    eta: Tensor  # [B, T, H]
    theta: Tensor

    @property
    def state_dtype(self) -> torch.dtype:
        """Precision of the weights and the momentum: float32, or float64 where the input is."""
        return state_dtype(self.q)

    @property
    def forgets_by_column(self) -> bool:
        """Whether alpha has a number for each of some groups of columns, not one for a head."""
        return self.alpha.ndim > self.eta.ndim

    def to_state_dtype(self) -> Inputs:
        """All in the precision of the state."""
        return Inputs(*(x.to(self.state_dtype) for x in self))


class MemoryState(NamedTuple):
    """The memory after some tokens: per layer its weights and momentum, [B, H, D_in, D_out], float32."""

    weights: Layers
    momentum: Layers

    def detach(self) -> MemoryState:
        """This state, cut from the graph."""
        return MemoryState(*(tuple(x.detach() for x in part) for part in self))


class Options(NamedTuple):
    """What is the same for all tokens."""

    chunk_size: int
    activation: str
    surprise_bound: float | None
    cu_seqlens: Tensor | None
    rule: Rule = PAPER
    keep_bytes: int | None = None
    final: bool = True
    """whether the state after the last token is wanted"""
    shared_start: tuple[Layers, Layers] | None = None
    """weights and momentum [1, H, D_in, D_out] where all documents begin alike"""
    residual: Residual | None = None
    base: Layers = ()
    """what forgetting leads to, [H, D_in, D_out] of each layer; empty for zero. The weights that a form takes
    and returns are the whole ones: `op.neural_memory` adds the base before and takes it off after"""
    operands: torch.dtype | None = None
    """in which the kernels take q, k and v: autocast's where it is on"""

    @property
    def norm(self) -> tuple[Tensor, ...]:
        """Weight and bias of the residual's LN, or nothing."""
        return self.residual.norm if self.residual is not None else ()


def whole(distances: Layers, base: Layers) -> Layers:
    """Weights from their distances from a base; without one they are the same."""
    return tuple(B + V for V, B in zip(distances, base, strict=True)) if base else distances


def distances(weights: Layers, base: Layers) -> Layers:
    """The inverse of `whole`."""
    return tuple(W - B for W, B in zip(weights, base, strict=True)) if base else weights


def state_dtype(x: Tensor) -> torch.dtype:
    """Precision of the state for tokens x: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def operand_dtype(x: Tensor) -> torch.dtype:
    """The type in which products take operands like x: autocast's where it is on."""
    kind = x.device.type
    if x.dtype == torch.float64 or x.is_meta:  # which autocast leaves alone
        return x.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def broadcast_gate(gate: Tensor, width: int, by_column: bool) -> Tensor:
    """A gate [...], or [..., A] by column, as what multiplies weights [..., D, width]."""
    gate = gate if by_column else gate[..., None]
    groups = gate.shape[-1]
    return (gate if groups in (1, width) else gate.repeat_interleave(width // groups, -1))[..., None, :]


def without_autocast(x: Tensor) -> AbstractContextManager:
    """A context in which products keep the precision of their operands; meta tensors have no autocast."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
