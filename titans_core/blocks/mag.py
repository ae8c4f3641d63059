"""MAG, memory as gate: attention and memory side by side."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from titans_core.attention import Attention, KeyCache
from titans_core.blocks.base import Block, Positions
from titans_core.config import ModelConfig
from titans_core.layers import Gate
from titans_core.memory import MemoryCache, NeuralMemory


class MAGState(NamedTuple):
    """Keys and values of the attention branch, and the cache of the memory branch."""

    keys: KeyCache | None
    memory: MemoryCache | None


class MAG(Block):
    """o = SW-Attn*([p] || x) gated by M([p] || x) (eqs. 26-28)."""

    preset_expansion = 4 / 3

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.attention = Attention(config.d_model, config.attention)
        self.memory = NeuralMemory(config.d_model, config.memory, initialized=False)
        self.gate = Gate(config.d_model)

    def mix(self, x_BTD: Tensor, state: MAGState | None, positions: Positions) -> tuple[Tensor, MAGState]:
        memory = self.memory.start(x_BTD.shape[0], self.persistent_PD) if state is None else state.memory
        keys = None if state is None else state.keys
        y, keys = self.attention(x_BTD, positions.position_BT, keys, self.persistent_PD, positions.documents)
        m, memory = self.memory(x_BTD, memory, positions.documents)
        return self.gate(y, m), MAGState(keys, memory)

    def state_bytes(self, length: int) -> int:
        return self.memory.state_bytes(length) + self.attention.state_bytes(length)
