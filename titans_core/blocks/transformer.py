"""Transformer++, the baseline of every table: attention alone (rotary positions, RMSNorm, SwiGLU)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from titans_core.attention import Attention, AttentionState
from titans_core.blocks.base import Block, Positions
from titans_core.config import Frozen, ModelConfig


class TransformerOptions(Frozen):
    """Options of the Transformer."""

    projections: Literal["plain", "titans"] = "plain"
    """plain: the published baseline's. titans: SiLU, convolution and normalisation as in the hybrids."""


class Transformer(Block):
    """Causal attention over ``attention.window`` tokens, all of them where it is None."""

    Options = TransformerOptions
    uses_persistent = False
    preset_window = False  # the baseline attends to everything; the window belongs to the hybrids
    preset_expansion = 3.0

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        attention = config.attention
        if self.options.projections == "plain":
            plain = {"silu": False, "conv": False, "qk_norm": False, "output": ()}
            attention = attention.model_copy(update=plain)
        self.attention = Attention(config.d_model, attention, config.pointwise_conv)

    def mix(
        self, x_BTD: Tensor, state: AttentionState | None, positions: Positions
    ) -> tuple[Tensor, AttentionState | None]:
        y, state = self.attention(
            self.norm(x_BTD), positions.position_BT, state, documents=positions.documents
        )
        return x_BTD + y, state

    def reset(self, state: AttentionState, reset_B: Tensor) -> AttentionState:
        return self.attention.reset(state, reset_B)

    def state_bytes(self, length: int) -> int:
        return self.attention.state_bytes(length)
