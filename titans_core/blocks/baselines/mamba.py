"""Mamba, a selective state space model (Gu and Dao 2023, arXiv 2312.00752, Sections 3 and 4).

Shapes: B batch, T tokens, D model width, C channels, N state size, R rank of the step, K convolution width.
"""

from __future__ import annotations

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from titans_core.blocks.base import Block, Positions
from titans_core.blocks.baselines.mamba2 import LOG_STEPS, SSMState, step_bias
from titans_core.config import Frozen, ModelConfig
from titans_core.layers import CausalConv
from titans_kernels import selective_scan, state_dtype, without_autocast


class MambaOptions(Frozen):
    """Options of Mamba."""

    expansion: PositiveInt = 2
    """Channels over d_model."""
    state: PositiveInt = 16
    """N: each channel has a state of this size."""
    conv_kernel: PositiveInt = 4


class Mamba(Block):
    """For each channel ``h_t = exp(-dt_t exp(A)) h_{t-1} + dt_t x_t B_t`` and ``y_t = C_t h_t + D x_t``.

    The output is ``y silu(z)``. x goes through a convolution and SiLU; from it come B and C, one for all
    channels, and the steps ``dt = softplus(x W_1 W_2 + b)``, W_1 of width d_model / 16. Published stacks have
    no feed-forward layers.
    """

    Options = MambaOptions
    uses_persistent = False

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        D, N, C = config.d_model, self.options.state, self.options.expansion * config.d_model
        self.widths = [-(-D // 16), N, N]
        self.w_in = nn.Linear(D, 2 * C, bias=False)
        self.conv, self.conv_bias = CausalConv(C, self.options.conv_kernel), nn.Parameter(torch.zeros(C))
        self.w_x = nn.Linear(C, sum(self.widths), bias=False)
        self.w_dt = nn.Linear(self.widths[0], C, bias=False)
        # in order: each channel has all of A's values, so there is nothing that it could be sorted with
        self.dt_bias_C = nn.Parameter(step_bias(torch.linspace(*LOG_STEPS, C)))
        self.log_a_CN = nn.Parameter(torch.arange(1.0, N + 1).log().repeat(C, 1))
        self.skip_C = nn.Parameter(torch.ones(C))
        self.w_o = nn.Linear(C, D, bias=False)

    def mix(
        self, x_BTD: Tensor, state: SSMState | None, positions: Positions
    ) -> tuple[Tensor, SSMState | None]:
        documents = positions.documents
        state = state or self.start(1 if documents else x_BTD.shape[0])
        x, gate = self.w_in(self.norm(x_BTD)).chunk(2, -1)
        x, conv = self.conv(x, state.conv_BKC, documents)
        x = F.silu(x + self.conv_bias)
        y, ssm = self._scan(x, state.ssm, documents and documents.index_BT)
        out = x_BTD + self.w_o((y * F.silu(gate)).to(x_BTD.dtype))
        return out, None if documents else SSMState(conv, ssm)

    def _scan(self, x: Tensor, start: Tensor, index_BT: Tensor | None) -> tuple[Tensor, Tensor]:
        """y [B, T, C] and the state after the last token [B, C, N]."""
        dt, b, c = self.w_x(x).split(self.widths, -1)
        with without_autocast(x):
            dt, b, c, x = (y.to(start.dtype) for y in (self.w_dt(dt.to(self.w_dt.weight.dtype)), b, c, x))
            dt = F.softplus(dt + self.dt_bias_C)
            rate_CN = self.log_a_CN.to(dt.dtype).exp()
            y, h = selective_scan(dt, x, b, c, rate_CN, start.expand(x.shape[0], -1, -1), index_BT)
            return y + self.skip_C * x, h

    def start(self, batch: int) -> SSMState:
        """Return the state before the first token."""
        zeros = self.log_a_CN.new_zeros(batch, *self.log_a_CN.shape)
        return SSMState(self.conv.zero_state(batch), zeros.to(state_dtype(zeros)))

    def state_bytes(self, length: int) -> int:
        return sum(part.nbytes for part in self.start(1))
