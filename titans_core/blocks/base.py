"""What every block shares: residual connections, norms, the feed-forward layer, persistent tokens."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from titans_core.config import Frozen, ModelConfig
from titans_core.documents import Documents, reset_rows
from titans_core.layers import RMSNorm, SwiGLU


class Positions(NamedTuple):
    """Positions of the tokens of a call, [B, T] or [1, T], and the borders of packed documents."""

    position_BT: Tensor
    documents: Documents | None = None
    reset_B: Tensor | None = None
    """[B] bool: rows that begin a new sequence at this call, although a state is given."""


class NoOptions(Frozen):
    """The options of a block that has none."""


class Block(nn.Module, ABC):
    """A sequence mixer, then x + mlp(norm(x)); a variant defines `mix` and `state_bytes`.

    ``state`` is whatever `mix` returned for the tokens before, None at the start of a sequence. A block of
    your own is a subclass in a file of yours, named in a config by its import path
    (``variant: my_lab.blocks:MyBlock``); `check` and the class attributes below may be overridden. Linear
    layers, norms, convolutions and memories get their initial values from `titans_core.init`; parameters
    that you make of `nn.Parameter` keep the values your constructor gives them.
    """

    Options: ClassVar[type[Frozen]] = NoOptions
    """What `ModelConfig.options` may hold; a block finds the values in ``self.options``."""
    uses_persistent: ClassVar[bool] = True
    """Whether it learns persistent tokens, in ``self.persistent_PD``."""
    layers: ClassVar[int] = 1
    """Layers of the published stack that a block is, each with a feed-forward layer: its presets have as many
    blocks fewer."""
    preset_window: ClassVar[bool] = True
    """Whether a preset gives its attention the window of the size; else it attends to everything before."""
    preset_memory: ClassVar[Mapping[str, Any]] = {}
    """Fields of `MemoryConfig` that its presets have in place of the size's."""
    preset_expansion: ClassVar[float | None] = None
    """The feed-forward width of its presets over d_model. None: whatever gives a block as many parameters
    as the Transformer's. A subclass of a variant that adds weights to it should set None."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.recompute = False
        """Keep only a pass's input and compute it again for the backward pass: less memory, more time."""
        self.options: Any = self.read_options(config)
        self.norm = RMSNorm(config.d_model)
        self.persistent_PD: nn.Parameter | None = None
        if self.uses_persistent and config.persistent_tokens:
            self.persistent_PD = nn.Parameter(torch.empty(config.persistent_tokens, config.d_model))
        self.mlp: nn.Module | None = None
        if config.mlp_expansion:
            self.mlp_norm = RMSNorm(config.d_model)
            self.mlp = SwiGLU(config.d_model, config.mlp_expansion)

    @classmethod
    def read_options(cls, config: ModelConfig) -> Any:
        """The config's options as an object of ``Options``. Raises pydantic's ValidationError."""
        # as JSON, where a list is taken for a tuple, like every other part of a config
        return cls.Options.model_validate_json(json.dumps(config.options))

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        """Refuse what the variant cannot be built of, before it is built.

        Raises:
            ValueError: one line that begins with the field of `ModelConfig` that is wrong.
        """

    def forward(self, x_BTD: Tensor, state: Any, positions: Positions) -> tuple[Tensor, Any]:
        """[B, T, D] to [B, T, D] and the state after the last token (None when packed)."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(
                self._forward, x_BTD, state, positions, use_reentrant=False, preserve_rng_state=False
            )
        return self._forward(x_BTD, state, positions)

    def _forward(self, x_BTD: Tensor, state: Any, positions: Positions) -> tuple[Tensor, Any]:
        if state is not None and positions.reset_B is not None:
            state = self.reset(state, positions.reset_B)
        x_BTD, state = self.mix(x_BTD, state, positions)
        if self.mlp is not None:
            x_BTD = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return x_BTD, state

    @abstractmethod
    def mix(self, x_BTD: Tensor, state: Any, positions: Positions) -> tuple[Tensor, Any]:
        """The causal sequence mixer of the variant, with a residual connection around each of its parts.

        One part is ``x + part(self.norm(x))``; a block of several makes a norm for each of the others.

        Args:
            x_BTD: [B, T, D], the residual stream.
            state: what the call for the tokens before returned; None at the start of a sequence.
            positions: of the tokens. With ``positions.documents`` no token may see another document.

        Returns:
            The stream after the mixer, [B, T, D], and the state after the last token, None when packed. A
            state is tensors with the batch first, in tuples, NamedTuples and dicts; no call changes one.
        """

    def reset(self, state: Any, reset_B: Tensor) -> Any:
        """The state with rows ``reset_B`` [B] as at the start of a sequence, differentiable.

        Zeros unless a variant says otherwise; one that starts from learned weights must.

        Raises:
            ValueError: the rows stand where they cannot be reset one by one, such as inside a chunk.
        """
        return reset_rows(state, reset_B)

    @abstractmethod
    def state_bytes(self, length: int) -> int:
        """Bytes one sequence carries after ``length`` tokens."""
