"""HGRN2, a gated linear recurrence with an expanded state (Qin et al. 2024, arXiv 2404.07904, Section 3)."""

from __future__ import annotations

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from titans_core.blocks.base import Positions
from titans_core.blocks.baselines.linear import ConvOptions, LinearAttention
from titans_core.config import ModelConfig
from titans_core.layers import RMSNorm
from titans_kernels import state_dtype


class HGRN2Options(ConvOptions):
    """Options of HGRN2."""

    heads: PositiveInt = 8
    """d_model / heads is the paper's expansion ratio: 128 at a width of 1024."""


class HGRN2(LinearAttention):
    """The forget gate is the decay, and what it leaves the key: ``k_t = 1 - a_t``.

    ``a_t = l + (1 - l) sigmoid(x W_f)``. In the paper the lower bounds l of a model's layers rise with depth;
    here each layer learns its own, ``l = sigmoid(b)``, from a half. Queries are ``silu(x W_q)``, values
    ``x W_v``, and the heads are normalised together.
    """

    Options = HGRN2Options
    projections = ("w_q", "w_f", "w_v")
    conv_silu = False  # as in flash-linear-attention: f has a sigmoid, v stays linear

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        D = config.d_model
        self.w_q, self.w_f, self.w_v, self.w_o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.lower_bound_C = nn.Parameter(torch.zeros(D))
        self.value_norm = RMSNorm(D)

    def tokens(
        self, projected: list[Tensor], z_BTD: Tensor, positions: Positions
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, f, v = projected
        logit = f.to(state_dtype(z_BTD))
        k = torch.sigmoid(-self.lower_bound_C) * torch.sigmoid(-logit)  # 1 - a, without a difference
        q, k, v, log_decay = (self.split(x) for x in (F.silu(q), k, v, torch.log1p(-k)))
        return q, k, v, log_decay

    def output(self, y_BTHF: Tensor, z_BTD: Tensor) -> Tensor:
        return self.w_o(self.value_norm(y_BTHF.flatten(2).to(z_BTD.dtype)))
