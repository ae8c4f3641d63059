"""Gate coefficients of a chunk: the weight of each token's gradient after momentum and decay.

Computed by running products, without logarithms or divisions, so they are exact for alpha = 1 and eta = 0.

Shapes: R rows (chunks x heads), b tokens per chunk.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class ChunkGates(NamedTuple):
    """The linear part of a chunk's recurrence.

    With W, S the state before the chunk and g_i the gradients of its tokens, the state after token t is
    ``W_t = beta_t W + m_t S - sum_i C[t, i] g_i`` and ``S_t = h_t S - sum_i N[t, i] g_i``.
    """

    products: Tensor  # [2, R, b, b]: A, products of 1 - alpha, and E, products of eta
    starts: Tensor  # [2, R, b]: beta and h, the same products from the chunk's start
    N: Tensor  # [R, b, b] E diag(theta)
    C: Tensor  # [R, b, b] A N
    m: Tensor  # [R, b] A h

    @property
    def beta(self) -> Tensor:
        """Fraction of the chunk's starting weights left after each token, [R, b]."""
        return self.starts[0]

    @property
    def h(self) -> Tensor:
        """Fraction of the chunk's starting momentum left after each token, [R, b]."""
        return self.starts[1]


def decay_products(r: Tensor) -> Tensor:
    """P[t, s] = r_{s+1} ... r_t for t >= s, else 0; r [..., b] gives [..., b, b]."""
    b = r.shape[-1]
    # torch.compile ignores the cache and warns
    not_later = (_not_later if torch.compiler.is_compiling() else _kept_not_later)(b, r.device)
    # transposed, [s, t], so that the running product is over contiguous memory
    P = r[..., None, :].expand(*r.shape, b).masked_fill(not_later, 1)
    if P.requires_grad:
        return P.cumprod(-1).triu().mT
    return P.cumprod_(-1).triu_().mT


def _not_later(b: int, device: torch.device) -> Tensor:
    """t <= s, at [s, t]."""
    return torch.ones(b, b, dtype=torch.bool, device=device).tril_()


@lru_cache(maxsize=32)
def _kept_not_later(b: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # cached tensors must be usable in training
        return _not_later(b, device)


def coefficients(alpha: Tensor, eta: Tensor, theta: Tensor) -> ChunkGates:
    """Gates of each chunk from alpha, eta, theta [R, b]."""
    r = torch.stack([1 - alpha, eta])
    products, starts = decay_products(r), r.cumprod(-1)
    A, E = products
    N = E * theta[:, None]
    return ChunkGates(products, starts, N, torch.bmm(A, N), _times(A, starts[1]))


def coefficients_backward(
    theta: Tensor, gates: ChunkGates, dC: Tensor, dN: Tensor, dbeta: Tensor, dm: Tensor, dh: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of alpha, eta, theta [R, b] from C's, N's, beta's, m's and h's; overwrites dN."""
    A, E = gates.products
    dN.add_(torch.bmm(A.mT, dC).tril_())
    dtheta = (dN * E).sum(-2)
    dA = torch.bmm(dC, gates.N.mT).addcmul_(dm[..., None], gates.h[:, None])
    dproducts = torch.stack([dA, dN.mul_(theta[:, None])]).tril_()
    dstarts = torch.stack([dbeta, dh + _times(A.mT, dm)])
    dr = _products_backward(gates.products, gates.starts, dproducts, dstarts)
    return -dr[0], dr[1], dtheta


def _products_backward(P: Tensor, starts: Tensor, dP: Tensor, dstarts: Tensor) -> Tensor:
    """Return the gradient of r from the gradients of P = decay_products(r) and starts = cumprod(r).

    r_j enters P[t, s] for s < j <= t as P[t, j] r_j P[j-1, s], so no division by r_j is needed.
    """
    through = (P.mT @ dP)[..., 1:, :].mul_(P[..., :-1, :]).sum(-1)  # the sum over s, for j >= 1
    before = torch.cat([torch.ones_like(starts[..., :1]), starts[..., :-1]], -1)
    dr = (P.mT @ dstarts[..., None])[..., 0].mul_(before)
    dr[..., 1:] += through
    return dr


def _times(P: Tensor, x: Tensor) -> Tensor:
    """[R, b, b] times [R, b]."""
    return torch.bmm(P, x[..., None])[..., 0]
