"""What RetNet, GLA and HGRN2 share: linear attention with decay, whose state is one matrix a head.

Shapes: B batch, T tokens, D model width, H heads, E key width, F value width; G is E or 1.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from pydantic import PositiveInt
from torch import Tensor

from titans_core.blocks.base import Block, Positions
from titans_core.config import Frozen, ModelConfig
from titans_kernels import linear_attention, state_dtype


class HeadOptions(Frozen):
    """What a baseline with heads takes beyond `ModelConfig`."""

    heads: PositiveInt = 4
    """Number of heads; each has a state of key width times value width."""


class LinearAttention(Block):
    """``S_t = diag(a_t) S_{t-1} + k_t^T v_t`` and ``y_t = q_t S_t``; a subclass gives q, k, v and a."""

    Options: ClassVar[type[Frozen]] = HeadOptions
    uses_persistent = False
    key_expansion: ClassVar[float] = 1.0
    """Keys of all heads together over d_model."""
    value_expansion: ClassVar[float] = 1.0
    even: ClassVar[bool] = False
    """Whether the key width must be even, for rotary positions."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.heads: int = self.options.heads
        self.keys = int(self.key_expansion * config.d_model)
        self.values = int(self.value_expansion * config.d_model)

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        heads, widths = cls.read_options(config).heads, (cls.key_expansion, cls.value_expansion)
        keys, values = (int(width * config.d_model) for width in widths)
        if keys % heads or values % heads or (cls.even and keys // heads % 2):
            even = ", the first into an even width" if cls.even else ""
            raise ValueError(f"options.heads: {heads} does not divide {keys} keys and {values} values{even}")

    def mix(self, x_BTD: Tensor, state: Tensor | None, positions: Positions) -> tuple[Tensor, Any]:
        z, documents = self.norm(x_BTD), positions.documents
        q, k, v, log_decay = self.tokens(z, positions)
        before = self.start(x_BTD.shape[0]) if state is None else state
        y, after = linear_attention(q, k, v, log_decay, before, documents and documents.index_BT)
        return x_BTD + self.output(y, z), None if documents else after

    @abstractmethod
    def tokens(self, z_BTD: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q and k [B, T, H, E], v [B, T, H, F] and the logarithms of the decays [B, T, H, G]."""

    @abstractmethod
    def output(self, y_BTHF: Tensor, z_BTD: Tensor) -> Tensor:
        """What the block adds to the stream, [B, T, D], of what was read and of its input."""

    def split(self, x_BTC: Tensor) -> Tensor:
        """[B, T, H * E] in heads."""
        return x_BTC.unflatten(-1, (self.heads, -1))

    def start(self, batch: int) -> Tensor:
        """The state before the first token: zeros [B, H, E, F]."""
        weight, heads = self.norm.weight, self.heads
        zeros = weight.new_zeros(batch, heads, self.keys // heads, self.values // heads)
        return zeros.to(state_dtype(weight))

    def state_bytes(self, length: int) -> int:
        return self.start(1).nbytes
