"""Gated Linear Attention (Yang et al. 2023, arXiv 2312.06635, Section 4)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from titans_core.blocks.base import Positions
from titans_core.blocks.baselines.linear import ConvOptions, LinearAttention
from titans_core.config import ModelConfig
from titans_core.layers import RMSNorm
from titans_kernels import state_dtype


class GLA(LinearAttention):
    """A decay of each key channel, ``a_t = sigmoid(x W_1 W_2 + b)^(1/16)``, with W_1 of width 16.

    Keys are half as wide as values. Each head is normalised, then gated by ``silu(x W_g)``.
    """

    Options = ConvOptions
    key_expansion: ClassVar[float] = 0.5
    RANK, TEMPERATURE = 16, 16.0

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        D = config.d_model
        self.w_q, self.w_k = (nn.Linear(D, self.keys, bias=False) for _ in range(2))
        self.w_v, self.w_g = (nn.Linear(D, self.values, bias=False) for _ in range(2))
        self.decay = nn.Sequential(nn.Linear(D, self.RANK, bias=False), nn.Linear(self.RANK, self.keys))
        self.head_norm = RMSNorm(self.values // self.heads)
        self.w_o = nn.Linear(self.values, D, bias=False)

    def tokens(
        self, projected: list[Tensor], z_BTD: Tensor, positions: Positions
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v = map(self.split, projected)
        logit = self.split(self.decay(z_BTD)).to(state_dtype(z_BTD))
        return q * q.shape[-1] ** -0.5, k, v, F.logsigmoid(logit) / self.TEMPERATURE

    def output(self, y_BTHF: Tensor, z_BTD: Tensor) -> Tensor:
        y = self.head_norm(y_BTHF, self.split(self.w_g(z_BTD)))
        return self.w_o(y.flatten(2))
