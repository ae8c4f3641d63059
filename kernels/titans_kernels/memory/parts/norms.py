"""Norms of errors and weights, differentiable where they are zero."""

from __future__ import annotations

import torch
from torch import Tensor

TINY = 1e-20


def clip_norm(d: Tensor, bound: float | None) -> Tensor:
    """d min(1, c / |d|), with the norm over the last dimension; unchanged without a bound."""
    if bound is None:
        return d
    squares = d.square().sum(-1, keepdim=True)
    # masked before the square root, whose infinite slope at 0 would give NaN gradients
    over = squares > bound**2
    return d * torch.where(over, bound / torch.where(over, squares, 1).sqrt(), 1)


def clip_matrix(W: Tensor, bound: float) -> Tensor:
    """Matrices [..., D, F] clipped to a Frobenius norm."""
    return clip_norm(W.flatten(-2), bound).view_as(W)


def with_row_norms_of(W: Tensor, start: Tensor) -> Tensor:
    """W [..., D, F] with the weights of each output scaled to their norm in ``start``.

    Those are the columns of our ``x W``; published code has them as rows.
    """
    before, after = (x.square().sum(-2, keepdim=True) + TINY for x in (start, W))
    return W * (before / after).sqrt()
