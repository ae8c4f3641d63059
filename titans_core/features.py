"""Polynomial features of queries and keys (ATLAS, arXiv 2505.23735, Section 3.1, eq. 5).

Shapes: B batch, T tokens, H heads, E head width, P width of the features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from titans_kernels import state_dtype, without_autocast


class PolynomialFeatures(nn.Module):
    """``phi(x) = [a_0, a_1 x, a_2 x (x) x]`` with coefficients a_i of each head, which start at 1 / i!.

    Of ``x (x) x`` each product is taken once, with a factor sqrt(2) where it occurs twice: the inner products
    are those of all E^2, ``phi(q) . phi(k) = a_0^2 + a_1^2 q . k + a_2^2 (q . k)^2``, at a width
    ``P = 1 + E + E (E + 1) / 2``, the paper's binom(E + 2, 2).
    """

    def __init__(self, heads: int, head_dim: int):
        super().__init__()
        self.coefficients_HI = nn.Parameter(torch.empty(heads, 3))
        self.width = 1 + head_dim + head_dim * (head_dim + 1) // 2

    def forward(self, x_BTHE: Tensor) -> Tensor:
        """[B, T, H, E] to [B, T, H, P], in the precision of the state."""
        dtype = state_dtype(x_BTHE)
        with without_autocast(x_BTHE):
            x, (a_0, a_1, a_2) = x_BTHE.to(dtype), self.coefficients_HI.to(dtype)[..., None].unbind(1)
            rows, columns = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device).unbind()
            occurs = 1 + (rows != columns).to(dtype)
            products = x.index_select(-1, rows) * x.index_select(-1, columns) * occurs.sqrt()
            return torch.cat([a_0.expand(*x.shape[:-1], 1), a_1 * x, a_2 * products], -1)
