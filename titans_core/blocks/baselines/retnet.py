"""RetNet, multi-scale retention (Sun et al. 2023, arXiv 2307.08621, Section 2)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from titans_core.blocks.base import Positions
from titans_core.blocks.baselines.linear import ConvOptions, LinearAttention
from titans_core.config import ModelConfig
from titans_core.layers import RMSNorm, RotaryEmbedding, rotate
from titans_kernels import state_dtype


class RetNet(LinearAttention):
    """A fixed decay a head, ``a = 1 - 2^(-5 - h)``, and queries and keys turned by their positions.

    Values are twice as wide as keys. Each head is normalised (a root mean square, as in the authors' code,
    with a learned weight), then gated by ``silu(x W_g)``.
    """

    Options = ConvOptions
    value_expansion: ClassVar[float] = 2.0
    even: ClassVar[bool] = True

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        D = config.d_model
        self.rope_base = config.attention.rope_base
        self.w_q, self.w_k = (nn.Linear(D, self.keys, bias=False) for _ in range(2))
        self.w_v, self.w_g = (nn.Linear(D, self.values, bias=False) for _ in range(2))
        self.head_norm = RMSNorm(self.values // self.heads)
        self.w_o = nn.Linear(self.values, D, bias=False)

    def tokens(
        self, projected: list[Tensor], z_BTD: Tensor, positions: Positions
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v = map(self.split, projected)
        width, dtype = q.shape[-1], state_dtype(z_BTD)
        rotary = RotaryEmbedding.at(positions.position_BT, width, self.rope_base, dtype)
        q, k = (rotate(x.transpose(1, 2).to(dtype), rotary).transpose(1, 2) for x in (q, k))
        head = torch.arange(self.heads, device=q.device, dtype=torch.float64)
        log_decay = torch.log1p(-(2.0 ** (-5 - head))).to(dtype)
        return q, k * width**-0.5, v, log_decay[:, None].expand(*q.shape[:3], 1)

    def output(self, y_BTHF: Tensor, z_BTD: Tensor) -> Tensor:
        y = self.head_norm(y_BTHF, self.split(self.w_g(z_BTD)))
        return self.w_o(y.flatten(2))
