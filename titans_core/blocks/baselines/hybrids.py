"""Samba and Gated DeltaNet-H2: hybrids of recurrent layers and sliding-window attention."""

from __future__ import annotations

from typing import Any, ClassVar, cast

from torch import Tensor, nn

from titans_core.blocks.base import Block, Positions
from titans_core.blocks.baselines.delta import GatedDeltaNet
from titans_core.blocks.baselines.mamba import Mamba, MambaOptions
from titans_core.blocks.baselines.mamba2 import Mamba2, Mamba2Options
from titans_core.blocks.transformer import Transformer
from titans_core.config import ModelConfig


class Hybrid(Block):
    """A block of several layers of other variants, each with its own norms and feed-forward layer.

    ``model.options`` apply to the first layer. Presets have the depth of their size in layers, so fewer
    blocks.
    """

    kinds: ClassVar[tuple[type[Block], ...]]
    uses_persistent = False

    def __init__(self, config: ModelConfig):
        super().__init__(config.model_copy(update={"mlp_expansion": 0.0}))
        self.norm = nn.Identity()  # each layer has its own
        self.stack = nn.ModuleList(kind(part) for kind, part in self._parts(config))

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        for kind, part in cls._parts(config):
            kind.check(part)

    @classmethod
    def _parts(cls, config: ModelConfig) -> list[tuple[type[Block], ModelConfig]]:
        """Return the block class and config of each layer; options go to the first."""
        first, *others = cls.kinds
        plain = config.model_copy(update={"options": {}})
        return [(first, config), *((kind, plain) for kind in others)]

    def mix(
        self, x_BTD: Tensor, state: tuple[Any, ...] | None, positions: Positions
    ) -> tuple[Tensor, tuple[Any, ...] | None]:
        after = []
        for layer, before in zip(self.stack, state or [None] * len(self.stack), strict=True):
            x_BTD, left = layer(x_BTD, before, positions)
            after.append(left)
        return x_BTD, None if positions.documents else tuple(after)

    def reset(self, state: tuple[Any, ...], reset_B: Tensor) -> tuple[Any, ...]:
        """Unchanged: each layer resets its own state."""
        return state

    def state_bytes(self, length: int) -> int:
        return sum(cast(Block, layer).state_bytes(length) for layer in self.stack)


class Samba(Hybrid):
    """Mamba, then attention over a window (Ren et al. 2024, arXiv 2406.07522)."""

    Options = MambaOptions
    kinds = (Mamba, Transformer)
    layers = 2


class GatedDeltaNetH2(Hybrid):
    """Mamba2, Gated DeltaNet, then attention over a window (Yang et al. 2024, arXiv 2412.06464)."""

    Options = Mamba2Options
    kinds = (Mamba2, GatedDeltaNet, Transformer)
    layers = 3
    preset_memory = GatedDeltaNet.preset_memory
