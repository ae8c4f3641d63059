"""Transformer++, the baseline of every table: attention alone (rotary positions, RMSNorm, SwiGLU)."""

from __future__ import annotations

from torch import Tensor

from titans_core.attention import Attention, KeyCache
from titans_core.blocks.base import Block, Positions
from titans_core.config import ModelConfig


class Transformer(Block):
    """Causal attention over ``attention.window`` tokens, all of them where it is None."""

    uses_persistent = False
    preset_window = False  # the baseline attends to everything; the window belongs to the hybrids
    preset_expansion = 3.0

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.attention = Attention(config.d_model, config.attention)

    def mix(
        self, x_BTD: Tensor, state: KeyCache | None, positions: Positions
    ) -> tuple[Tensor, KeyCache | None]:
        return self.attention(x_BTD, positions.position_BT, state, documents=positions.documents)

    def state_bytes(self, length: int) -> int:
        return self.attention.state_bytes(length)
