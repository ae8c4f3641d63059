"""The base of RetNet, GLA and HGRN2: linear attention with decay, whose state is one matrix per head.

With the option ``conv_kernel`` queries, keys and values go through a short convolution, as the layers of
flash-linear-attention do with ``use_short_conv``. The papers have none.

Shapes: B batch, T tokens, D model width, H heads, E key width, F value width, C channels, K convolution
width; G is E or 1.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from pydantic import PositiveInt
from torch import Tensor
from torch.nn import functional as F

from titans_core.blocks.base import Block, Positions
from titans_core.blocks.baselines.mamba2 import SSMState
from titans_core.config import Frozen, ModelConfig
from titans_core.layers import CausalConv
from titans_kernels import linear_attention, state_dtype


class HeadOptions(Frozen):
    """Options of a baseline with heads."""

    heads: PositiveInt = 4
    """Number of heads; each has a state of key width x value width."""


class ConvOptions(HeadOptions):
    """The options of a baseline that may have a short convolution."""

    conv_kernel: PositiveInt | None = None
    """Width of a causal depthwise convolution after the projections of q, k and v, followed by SiLU (in HGRN2
    by its own activations). None leaves it out, as published; flash-linear-attention takes 4."""


class LinearAttention(Block):
    """``S_t = diag(a_t) S_{t-1} + k_t^T v_t`` and ``y_t = q_t S_t``.

    A subclass makes the linear layers named by ``projections``, and q, k, v and a of what they give.
    """

    Options: ClassVar[type[Frozen]] = HeadOptions
    projections: ClassVar[tuple[str, ...]] = ("w_q", "w_k", "w_v")
    """Linear layers of the tokens, which the short convolution follows."""
    conv_silu: ClassVar[bool] = True
    """True if SiLU follows the short convolution."""
    uses_persistent = False
    key_expansion: ClassVar[float] = 1.0
    """Keys of all heads together over d_model."""
    value_expansion: ClassVar[float] = 1.0
    even: ClassVar[bool] = False
    """True if rotary positions require an even key width per head."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.heads: int = self.options.heads
        self.keys = int(self.key_expansion * config.d_model)
        self.values = int(self.value_expansion * config.d_model)
        kernel, channels = getattr(self.options, "conv_kernel", None), 2 * self.keys + self.values
        self.conv = CausalConv(channels, kernel) if kernel else None

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        heads, widths = cls.read_options(config).heads, (cls.key_expansion, cls.value_expansion)
        keys, values = (int(width * config.d_model) for width in widths)
        if keys % heads or values % heads or (cls.even and keys // heads % 2):
            even = ", the first into an even width" if cls.even else ""
            raise ValueError(f"options.heads: {heads} does not divide {keys} keys and {values} values{even}")

    def mix(
        self, x_BTD: Tensor, state: Tensor | SSMState | None, positions: Positions
    ) -> tuple[Tensor, Tensor | SSMState | None]:
        z, documents, rows = self.norm(x_BTD), positions.documents, x_BTD.shape[0]
        projected = [getattr(self, name)(z) for name in self.projections]
        conv, before = state if isinstance(state, SSMState) else (None, state)
        if self.conv is not None:
            inputs = self.conv.zero_state(1 if documents else rows) if conv is None else conv
            y, conv = self.conv(torch.cat(projected, -1), inputs, documents)
            y = F.silu(y) if self.conv_silu else y
            projected = list(y.split([x.shape[-1] for x in projected], -1))
        q, k, v, log_decay = self.tokens(projected, z, positions)
        before = self.start(rows) if before is None else before
        y, after = linear_attention(q, k, v, log_decay, before, documents and documents.index_BT)
        out = x_BTD + self.output(y, z)
        if documents is not None:
            return out, None
        return out, after if conv is None else SSMState(conv, after)

    @abstractmethod
    def tokens(
        self, projected: list[Tensor], z_BTD: Tensor, positions: Positions
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute the recurrence's inputs from the outputs [B, T, C] of `projections` and the block's input.

        Returns:
            q and k [B, T, H, E], v [B, T, H, F] and the logarithms of the decays [B, T, H, G].
        """

    @abstractmethod
    def output(self, y_BTHF: Tensor, z_BTD: Tensor) -> Tensor:
        """Return the block's output [B, T, D], to add to the stream, from reads and the block's input."""

    def split(self, x_BTC: Tensor) -> Tensor:
        """[B, T, H * E] to [B, T, H, E]."""
        return x_BTC.unflatten(-1, (self.heads, -1))

    def start(self, batch: int) -> Tensor:
        """S before the first token: zeros [B, H, E, F]."""
        weight, heads = self.norm.weight, self.heads
        zeros = weight.new_zeros(batch, heads, self.keys // heads, self.values // heads)
        return zeros.to(state_dtype(weight))

    def state_bytes(self, length: int) -> int:
        return self.start(1).nbytes + (self.conv.zero_state(1).nbytes if self.conv is not None else 0)
