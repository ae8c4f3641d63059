"""MAG, memory as gate: attention and memory in parallel."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from titans_core.attention import Attention, AttentionState
from titans_core.blocks.base import Block, Positions
from titans_core.config import Frozen, ModelConfig
from titans_core.layers import Gate, Gating
from titans_core.memory import MemoryCache, NeuralMemory


class MAGState(NamedTuple):
    """The states of a block's attention and memory."""

    attention: AttentionState | None
    memory: MemoryCache | None


class GateOptions(Frozen):
    """Options of MAC and MAG."""

    gating: Gating = "sigmoid"
    """The gating of the memory's output by the attention's, which the paper leaves open: see `Gate`."""


class MAG(Block):
    """y = x + SW-Attn*([p] || norm x), o = y + gate(y, M([p] || norm x)) (eqs. 26-28)."""

    Options = GateOptions
    preset_expansion = 4 / 3

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.attention = Attention(config.d_model, config.attention, config.pointwise_conv)
        self.memory = NeuralMemory(
            config.d_model, config.memory, initialized=False, pointwise=config.pointwise_conv
        )
        self.gate = Gate(config.d_model, self.options.gating)

    def mix(self, x_BTD: Tensor, state: MAGState | None, positions: Positions) -> tuple[Tensor, MAGState]:
        memory = self.memory.start(x_BTD.shape[0], self.persistent_PD) if state is None else state.memory
        before = None if state is None else state.attention
        at, documents, z = positions.position_BT, positions.documents, self.norm(x_BTD)
        y, after = self.attention(z, at, before, self.persistent_PD, documents)
        m, memory = self.memory(z, memory, documents)
        y = x_BTD + y
        return y + self.gate(y, m), MAGState(after, memory)

    def reset(self, state: MAGState, reset_B: Tensor) -> MAGState:
        attention, memory = state
        assert attention is not None
        assert memory is not None
        return MAGState(
            self.attention.reset(attention, reset_B, self.persistent_PD),
            self.memory.reset(memory, reset_B, self.persistent_PD),
        )

    def state_bytes(self, length: int) -> int:
        return self.memory.state_bytes(length) + self.attention.state_bytes(length)
