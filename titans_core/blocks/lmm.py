"""LMM: the neural memory alone is the sequence mixer."""

from __future__ import annotations

from torch import Tensor

from titans_core.blocks.base import Block, Positions
from titans_core.config import ModelConfig
from titans_core.memory import MemoryCache, NeuralMemory


class LMM(Block):
    """o = x + M([p] || norm x), the prefix's outputs dropped (eq. 19)."""

    preset_expansion = 8 / 3

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.memory = NeuralMemory(
            config.d_model, config.memory, initialized=False, pointwise=config.pointwise_conv
        )

    def mix(
        self, x_BTD: Tensor, state: MemoryCache | None, positions: Positions
    ) -> tuple[Tensor, MemoryCache | None]:
        state = state or self.memory.start(x_BTD.shape[0], self.persistent_PD)
        y, state = self.memory(self.norm(x_BTD), state, positions.documents)
        return x_BTD + y, state

    def reset(self, state: MemoryCache, reset_B: Tensor) -> MemoryCache:
        return self.memory.reset(state, reset_B, self.persistent_PD)

    def state_bytes(self, length: int) -> int:
        return self.memory.state_bytes(length)
