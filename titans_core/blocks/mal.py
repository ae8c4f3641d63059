"""MAL, memory as layer: attention over what the memory made of the sequence."""

from __future__ import annotations

from torch import Tensor

from titans_core.attention import Attention
from titans_core.blocks.base import Block, Positions
from titans_core.blocks.mag import MAGState
from titans_core.config import ModelConfig
from titans_core.memory import NeuralMemory


class MAL(Block):
    """o = SW-Attn(M([p] || x)) (eqs. 29-31)."""

    preset_expansion = 4 / 3

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.memory = NeuralMemory(config.d_model, config.memory, initialized=False)
        self.attention = Attention(config.d_model, config.attention)

    def mix(self, x_BTD: Tensor, state: MAGState | None, positions: Positions) -> tuple[Tensor, MAGState]:
        memory = self.memory.start(x_BTD.shape[0], self.persistent_PD) if state is None else state.memory
        y, memory = self.memory(x_BTD, memory, positions.documents)
        keys = None if state is None else state.keys
        o, keys = self.attention(y, positions.position_BT, keys, documents=positions.documents)
        return o, MAGState(keys, memory)

    def state_bytes(self, length: int) -> int:
        return self.memory.state_bytes(length) + self.attention.state_bytes(length)
