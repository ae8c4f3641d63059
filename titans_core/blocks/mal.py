"""MAL, memory as layer: attention over what the memory made of the sequence."""

from __future__ import annotations

from torch import Tensor

from titans_core.attention import Attention
from titans_core.blocks.base import Block, Positions
from titans_core.blocks.mag import MAGState
from titans_core.config import ModelConfig
from titans_core.layers import RMSNorm
from titans_core.memory import NeuralMemory


class MAL(Block):
    """y = x + M([p] || norm x), o = y + SW-Attn(norm y) (eqs. 29-31)."""

    preset_expansion = 4 / 3

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.memory = NeuralMemory(
            config.d_model, config.memory, initialized=False, pointwise=config.pointwise_conv
        )
        self.attention_norm = RMSNorm(config.d_model)
        self.attention = Attention(config.d_model, config.attention, config.pointwise_conv)

    def mix(self, x_BTD: Tensor, state: MAGState | None, positions: Positions) -> tuple[Tensor, MAGState]:
        memory = self.memory.start(x_BTD.shape[0], self.persistent_PD) if state is None else state.memory
        m, memory = self.memory(self.norm(x_BTD), memory, positions.documents)
        y_BTD = x_BTD + m
        before = None if state is None else state.attention
        o, after = self.attention(
            self.attention_norm(y_BTD), positions.position_BT, before, documents=positions.documents
        )
        return y_BTD + o, MAGState(after, memory)

    def reset(self, state: MAGState, reset_B: Tensor) -> MAGState:
        attention, memory = state
        assert attention is not None
        assert memory is not None
        return MAGState(
            self.attention.reset(attention, reset_B),
            self.memory.reset(memory, reset_B, self.persistent_PD),
        )

    def state_bytes(self, length: int) -> int:
        return self.memory.state_bytes(length) + self.attention.state_bytes(length)
