"""What every block shares: residual connections, norms, the feed-forward layer, persistent tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titans_core.config import ModelConfig
from titans_core.documents import Documents
from titans_core.layers import RMSNorm, SwiGLU


class Place(NamedTuple):
    """Where the tokens of a call stand: positions [B, T] or [1, T], and borders of packed documents."""

    position_BT: Tensor
    documents: Documents | None = None


class Block(nn.Module):
    """x + mix(norm(x)), then x + mlp(norm(x)); a variant defines `mix`.

    ``state`` is whatever `mix` returned for the tokens before, None at the start of a sequence.
    """

    uses_persistent = True

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm = RMSNorm(config.d_model)
        self.persistent_PD: nn.Parameter | None = None
        if self.uses_persistent and config.persistent_tokens:
            self.persistent_PD = nn.Parameter(torch.empty(config.persistent_tokens, config.d_model))
        self.mlp: nn.Module | None = None
        if config.mlp_expansion:
            self.mlp_norm = RMSNorm(config.d_model)
            self.mlp = SwiGLU(config.d_model, config.mlp_expansion)

    def forward(self, x_BTD: Tensor, state: Any, place: Place) -> tuple[Tensor, Any]:
        """[B, T, D] to [B, T, D] and the state after the last token (None when packed)."""
        mixed, state = self.mix(self.norm(x_BTD), state, place)
        x_BTD = x_BTD + mixed
        if self.mlp is not None:
            x_BTD = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return x_BTD, state

    def mix(self, x_BTD: Tensor, state: Any, place: Place) -> tuple[Tensor, Any]:
        """The sequence mixer of the variant, on normalised input."""
        raise NotImplementedError

    def state_bytes(self, length: int) -> int:
        """Bytes one sequence carries after ``length`` tokens."""
        raise NotImplementedError
