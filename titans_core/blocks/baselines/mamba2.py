"""Mamba2, state space duality (Dao and Gu 2024, arXiv 2405.21060, Sections 5 to 7).

Shapes: B batch, T tokens, D model width, H heads, P head width, C = H * P channels, N state size,
K convolution width.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from titans_core.blocks.base import Block, Positions
from titans_core.config import Frozen, ModelConfig
from titans_core.layers import CausalConv, RMSNorm
from titans_kernels import linear_attention, state_dtype

LOG_STEPS = math.log(1e-3), math.log(1e-1)
"""Range of the logarithm of the initial step dt of Mamba and Mamba2."""


class Mamba2Options(Frozen):
    """Options of Mamba2."""

    expansion: PositiveInt = 2
    """Channels over d_model."""
    head_dim: PositiveInt = 64
    """Channels per head; at most all of them."""
    state: PositiveInt = 128
    """N: each channel has a state of this size."""
    conv_kernel: PositiveInt = 4


class SSMState(NamedTuple):
    """The state of a recurrence with a short convolution: the convolution's inputs, and its own state."""

    conv_BKC: Tensor
    ssm: Tensor


class Mamba2(Block):
    """Linear attention with one decay a head: queries C, keys B, values ``dt x``, ``a = exp(-dt exp(A))``.

    ``z, x, B, C, dt`` are one projection; x, B and C go through a convolution and SiLU; B and C are one for
    all heads. ``y = norm((SSD(x) + D x) * silu(z))``. Published stacks have no feed-forward layers.
    """

    Options = Mamba2Options
    uses_persistent = False

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        o, self.channels = self.options, self.options.expansion * config.d_model
        self.head_dim = min(o.head_dim, self.channels)
        self.heads, mixed = self.channels // self.head_dim, self.channels + 2 * o.state
        self.widths = [self.channels, mixed, self.heads]
        self.w_in = nn.Linear(config.d_model, sum(self.widths), bias=False)
        self.conv, self.conv_bias = CausalConv(mixed, o.conv_kernel), nn.Parameter(torch.zeros(mixed))
        # drawn independently of each other, as published: were both sorted by head, one head would write a
        # thousandth of a token and another forget most of what it holds at each
        self.dt_bias_H = nn.Parameter(step_bias(torch.empty(self.heads).uniform_(*LOG_STEPS)))
        self.log_a_H = nn.Parameter(torch.empty(self.heads).uniform_(1, 16).log())
        self.skip_H = nn.Parameter(torch.ones(self.heads))
        self.output_norm = RMSNorm(self.channels)
        self.w_o = nn.Linear(self.channels, config.d_model, bias=False)

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        options = cls.read_options(config)
        channels = options.expansion * config.d_model
        if channels % min(options.head_dim, channels):
            raise ValueError(f"options.head_dim: {options.head_dim} does not divide {channels} channels")

    def mix(
        self, x_BTD: Tensor, state: SSMState | None, positions: Positions
    ) -> tuple[Tensor, SSMState | None]:
        documents = positions.documents
        state = state or self.start(1 if documents else x_BTD.shape[0])
        gate, mixed, dt = self.w_in(self.norm(x_BTD)).split(self.widths, -1)
        mixed, conv = self.conv(mixed, state.conv_BKC, documents)
        x, k, q = F.silu(mixed + self.conv_bias).split([self.channels, *[self.options.state] * 2], -1)
        x = x.unflatten(-1, (self.heads, self.head_dim))
        dt = F.softplus(dt.to(state.ssm.dtype) + self.dt_bias_H)[..., None]  # [B, T, H, 1]
        q, k = (y[:, :, None].expand(-1, -1, self.heads, -1) for y in (q, k))
        log_decay = -dt * self.log_a_H.to(dt.dtype).exp()[:, None]
        ssm = state.ssm.expand(x.shape[0], -1, -1, -1)
        y, ssm = linear_attention(q, k, dt * x, log_decay, ssm, documents and documents.index_BT)
        y = (y + self.skip_H[:, None] * x).flatten(2) * F.silu(gate)
        out = x_BTD + self.w_o(self.output_norm(y).to(x_BTD.dtype))
        return out, None if documents else SSMState(conv, ssm)

    def start(self, batch: int) -> SSMState:
        """Return the state before the first token."""
        zeros = self.log_a_H.new_zeros(batch, self.heads, self.options.state, self.head_dim)
        return SSMState(self.conv.zero_state(batch), zeros.to(state_dtype(zeros)))

    def state_bytes(self, length: int) -> int:
        return sum(part.nbytes for part in self.start(1))


def step_bias(log_steps: Tensor) -> Tensor:
    """Return the bias b with softplus(b) = dt, from log dt."""
    steps = log_steps.exp()
    return steps + torch.log(-torch.expm1(-steps))
