"""Coefficients of a chunk: what momentum and forgetting make of each token's gradient (method: A, H, C).

Exact where alpha is 1 or eta is 0: running products, no logarithm and no division.
Shapes: M chunks, H heads, b tokens of a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Gates(NamedTuple):
    """The linear part of a chunk's recurrence.

    With W, S the state before the chunk and g_i the gradients of its tokens, after token t
    ``W_t = beta_t W + m_t S - sum_i C[t, i] g_i`` and ``S_t = h_t S - sum_i N[t, i] g_i``.
    """

    A: Tensor  # [M, H, b, b] products of 1 - alpha
    E: Tensor  # [M, H, b, b] products of eta
    N: Tensor  # [M, H, b, b] E diag(theta)
    C: Tensor  # [M, H, b, b] A N
    beta: Tensor  # [M, H, b]
    m: Tensor  # [M, H, b]
    h: Tensor  # [M, H, b]


def decay_products(r: Tensor) -> Tensor:
    """P[t, s] = r_{s+1} ... r_t for t >= s, else 0; r [..., b] gives [..., b, b]."""
    b = r.shape[-1]
    later = torch.ones(b, b, dtype=torch.bool, device=r.device).triu(1)
    # transposed, [s, t]: the running product is then over contiguous memory
    return torch.where(later, r[..., None, :], 1).cumprod(-1).triu().mT


def coefficients(alpha: Tensor, eta: Tensor, theta: Tensor) -> Gates:
    """Gates of each chunk from alpha, eta, theta [M, H, b]."""
    A = decay_products(1 - alpha)
    E = decay_products(eta)
    N = E * theta[..., None, :]
    h = eta.cumprod(-1)
    return Gates(A, E, N, A @ N, (1 - alpha).cumprod(-1), (A @ h[..., None])[..., 0], h)


def coefficients_backward(
    alpha: Tensor, eta: Tensor, theta: Tensor, gates: Gates, dC: Tensor, dN: Tensor, dbeta: Tensor,
    dm: Tensor, dh: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of alpha, eta, theta [M, H, b] from those of C, N, beta, m and h."""
    A, E, N = gates.A, gates.E, gates.N
    dN = dN + (A.mT @ dC).tril()
    dh = dh + (A.mT @ dm[..., None])[..., 0]
    dA = (dC @ N.mT + dm[..., None] * gates.h[..., None, :]).tril()
    dtheta = (dN * E).sum(-2)
    dE = dN * theta[..., None, :]
    dalpha = -_products_backward(A, gates.beta, dA, dbeta)
    return dalpha, _products_backward(E, gates.h, dE, dh), dtheta


def _products_backward(P: Tensor, from_start: Tensor, dP: Tensor, dfrom_start: Tensor) -> Tensor:
    """Gradient of r from those of P = decay_products(r) and from_start = cumprod(r).

    r_j stands in P[t, s] for s < j <= t as P[t, j] r_j P[j-1, s], which needs no division by r_j.
    """
    before = torch.cat([torch.zeros_like(P[..., :1, :]), P[..., :-1, :]], -2)  # P[j-1, :]
    start = torch.cat([torch.ones_like(from_start[..., :1]), from_start[..., :-1]], -1)
    through = (P.mT @ dfrom_start[..., None])[..., 0]
    return ((P.mT @ dP) * before).sum(-1) + through * start
