"""What every form of the operator takes and gives; shapes as in `op.neural_memory`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

Layers = tuple[Tensor, ...]
"""Weights or momentum of each layer, [N, H, D_in, D_out]: one for each row or packed document."""

Result = tuple[Tensor, Layers, Layers]
"""y [B, T, H, D], weights and momentum after the last token."""


class Inputs(NamedTuple):
    """What the tokens bring, all of one dtype."""

    q: Tensor  # [B, T, H, D]
    k: Tensor
    v: Tensor
    alpha: Tensor  # [B, T, H]
    eta: Tensor
    theta: Tensor


class Options(NamedTuple):
    """What is the same for all tokens."""

    chunk_size: int
    activation: str
    surprise_bound: float | None
    cu_seqlens: Tensor | None
