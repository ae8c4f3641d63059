"""Norms of errors and weights, differentiable where they are zero."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

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
    flat = X.reshape(-1, *X.shape[-2:])
    # on a CPU in parts that stay in the cache
    parts = flat.split(32) if flat.device.type == "cpu" else (flat,)
    X = torch.cat([_NewtonSchulz.apply(part) for part in parts]).view(X.shape)  # pyright: ignore
    return X.mT if tall else X


class _NewtonSchulz(torch.autograd.Function):
    """Of matrices [R, D, F]; saves G alone, since a rule may take it of every token (`Atlas`).

    With ``P = b A + c A^2``, an iteration is ``X' = a X + P X``, and ``dX = a dX' + P dX' + (dA + dA^T) X``,
    where ``dA + dA^T = b D + c (D A + A D)`` and ``D = dX' X^T + X dX'^T``.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, G: Tensor) -> Tensor:
        ctx.save_for_backward(G)
        X = G / (_norm(G) + NS_EPS)
        for a, b, c in NEWTON_SCHULZ:
            X, *_ = _iterated(X, a, b, c)
        return X

    @staticmethod
    @once_differentiable
    def backward(ctx, dX):  # pyright: ignore[reportIncompatibleMethodOverride]
        (G,) = ctx.saved_tensors
        norm, kept = _norm(G), []
        X = G / (norm + NS_EPS)
        for a, b, c in NEWTON_SCHULZ:
            after, A, P = _iterated(X, a, b, c)
            kept.append((X, A, P))
            X = after
        for (a, b, c), (X, A, P) in zip(reversed(NEWTON_SCHULZ), reversed(kept), strict=True):
            D = dX @ X.mT
            D = D + D.mT
            DA = D @ A
            dA = (DA + DA.mT).mul_(c).add_(D, alpha=b)
            dX = torch.baddbmm(torch.baddbmm(dX, P, dX, beta=a), dA, X)
        along = (dX * G).sum((-2, -1), keepdim=True) / ((norm + NS_EPS) * norm)
        return (dX - along * G) / (norm + NS_EPS)


def _iterated(X: Tensor, a: float, b: float, c: float) -> tuple[Tensor, Tensor, Tensor]:
    """X', A and P of an iteration."""
    A = X @ X.mT
    P = torch.baddbmm(A, A, A, beta=b, alpha=c)
    return torch.baddbmm(X, P, X, beta=a), A, P


def _norm(G: Tensor) -> Tensor:
    """Frobenius norm [R, 1, 1]."""
    return (G.square().sum((-2, -1), keepdim=True) + TINY).sqrt()
