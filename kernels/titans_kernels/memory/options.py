"""What every form of the operator takes and gives; shapes as in `op.neural_memory`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

Layers = tuple[Tensor, ...]
"""Weights or momentum of each layer, [N, H, D_in, D_out]: one for each row or packed document."""

Result = tuple[Tensor, Layers, Layers]
"""y [B, T, H, D], weights and momentum after the last token."""


class Inputs(NamedTuple):
    """What the tokens bring."""

    q: Tensor  # [B, T, H, D]
    k: Tensor
    v: Tensor
    alpha: Tensor  # [B, T, H]
    eta: Tensor
    theta: Tensor

    @property
    def state_dtype(self) -> torch.dtype:
        """Of the weights and the momentum: float32, or float64 where the input is."""
        return state_dtype(self.q)

    def wide(self) -> Inputs:
        """In the state's precision."""
        return Inputs(*(x.to(self.state_dtype) for x in self))


class Options(NamedTuple):
    """What is the same for all tokens."""

    chunk_size: int
    activation: str
    surprise_bound: float | None
    cu_seqlens: Tensor | None


def state_dtype(x: Tensor) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def without_autocast(x: Tensor) -> AbstractContextManager:
    """Products in the precision of what is multiplied; meta tensors know no autocast."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
