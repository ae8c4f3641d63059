"""The bound on the norm of errors, differentiable where they are zero."""

from __future__ import annotations

import torch
from torch import Tensor


def clip_norm(d: Tensor, bound: float | None) -> Tensor:
    """d min(1, c / |d|), with the norm over the last dimension; unchanged without a bound."""
    if bound is None:
        return d
    squares = d.square().sum(-1, keepdim=True)
    # masked before the square root, whose infinite slope at 0 would give NaN gradients
    over = squares > bound**2
    return d * torch.where(over, bound / torch.where(over, squares, 1).sqrt(), 1)
