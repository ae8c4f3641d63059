"""Norms of errors and weights, differentiable where they are zero."""

from __future__ import annotations

import torch
from torch import Tensor

TINY = 1e-20
NS_EPS = 1e-7


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


NEWTON_SCHULZ = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""a, b, c of each iteration, as in LaCT's code (`zeropower_via_newtonschulz5`)."""


def newton_schulz(G: Tensor) -> Tensor:
    """G [..., D, F] with its singular values brought near 1: Muon's orthogonalisation.

    ``X = G / (|G| + 1e-7)``, then five times ``X = a X + (b A + c A^2) X`` with ``A = X X^T``, on the smaller
    side.
    """
    tall = G.shape[-2] > G.shape[-1]
    X = G.mT if tall else G
    X = X / ((X.square().sum((-2, -1), keepdim=True) + TINY).sqrt() + NS_EPS)
    for a, b, c in NEWTON_SCHULZ:
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X.mT if tall else X
