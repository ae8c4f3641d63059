"""The base class of blocks: residual connections, norms, the feed-forward layer, persistent tokens."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titans_core.config import Frozen, ModelConfig
from titans_core.documents import Documents, reset_rows
from titans_core.layers import RMSNorm, SwiGLU

Recompute = bool | Literal["selective"]
"""Recomputed in the backward pass: nothing (False), a block's forward pass (True), or (selective) its norms,
convolutions, gates and activations, but no matrix product, attention or kernel of the memory. A block that is
not compiled takes ``selective`` as True."""


def _policy(ctx: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    namespace, name = [*str(operator).split("."), ""][:2]
    save = namespace in ("titans", "torch_attn") or name in SAVED
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


SAVED = (
    "mm", "addmm", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
)  # fmt: skip
"""ATen operators that ``selective`` saves, beside ours and varlen attention. Products of heads are cheap."""
SELECTIVE = partial(create_selective_checkpoint_contexts, _policy)
# it warns of operators that work in place, at every compilation; blocks have none
logging.getLogger("torch._higher_order_ops.wrap").addFilter(
    lambda line: "context_fn" not in line.getMessage()
)


class Positions(NamedTuple):
    """Positions of the tokens of a call, [B, T] or [1, T], and the borders of packed documents."""

    position_BT: Tensor
    documents: Documents | None = None
    reset_B: Tensor | None = None
    """[B] bool: rows that start a new sequence at this call although a state is given."""


class NoOptions(Frozen):
    """The options of a block that has none."""


class Block(nn.Module, ABC):
    """A sequence mixer, then x + mlp(norm(x)); a variant defines `mix` and `state_bytes`.

    ``state`` is what `mix` returned for the previous tokens, None at the start of a sequence. A custom
    block is a subclass named in a config by its import path (``variant: my_lab.blocks:MyBlock``); it may
    override `check` and the class attributes below. Linear layers, norms, convolutions and memories are
    initialised by `titans_core.init`; an `nn.Parameter` of your own keeps its value from the constructor.
    """

    Options: ClassVar[type[Frozen]] = NoOptions
    """The schema of `ModelConfig.options`; the values are in ``self.options``."""
    uses_persistent: ClassVar[bool] = True
    """True if it learns persistent tokens, in ``self.persistent_PD``."""
    layers: ClassVar[int] = 1
    """Number of layers in a block, each with a feed-forward layer: presets have accordingly fewer blocks."""
    preset_window: ClassVar[bool] = True
    """True if presets use the size's attention window; otherwise attention is unlimited."""
    preset_memory: ClassVar[Mapping[str, Any]] = {}
    """Fields of `MemoryConfig` that presets override."""
    preset_expansion: ClassVar[float | None] = None
    """The feed-forward expansion of presets. None matches the Transformer's number of parameters; a subclass
    that adds weights to a variant should set None."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.recompute: Recompute = False
        """Activation checkpointing; see `Recompute`."""
        self.checkpoint: Callable[..., Any] = partial(
            checkpoint, use_reentrant=False, preserve_rng_state=False
        )
        """Function that does so."""
        self.options: Any = self.read_options(config)
        self.norm = RMSNorm(config.d_model)
        self.persistent_PD: nn.Parameter | None = None
        if self.uses_persistent and config.persistent_tokens:
            self.persistent_PD = nn.Parameter(torch.empty(config.persistent_tokens, config.d_model))
        self.mlp: SwiGLU | None = None
        if config.mlp_expansion:
            self.mlp_norm = RMSNorm(config.d_model)
            self.mlp = SwiGLU(config.d_model, config.mlp_expansion)

    @classmethod
    def read_options(cls, config: ModelConfig) -> Any:
        """Validate the config's options. Raises pydantic's ValidationError."""
        # as JSON, in which a list is accepted for a tuple, as in the rest of a config
        return cls.Options.model_validate_json(json.dumps(config.options))

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        """Check that the variant supports the config, before it is built.

        Raises:
            ValueError: one line that begins with the offending field of `ModelConfig`.
        """

    def forward(self, x_BTD: Tensor, state: Any, positions: Positions) -> tuple[Tensor, Any]:
        """[B, T, D] to [B, T, D] and the state after the last token (None when packed)."""
        return self.recomputed(self._forward, x_BTD, state, positions)

    def recomputed(self, call: Callable[..., Any], *inputs: Any) -> Any:
        """Call a part of the block, and recompute of it in the backward pass what `recompute` says."""
        if not self.recompute or not torch.is_grad_enabled():
            return call(*inputs)
        # eagerly its policies need the same operators twice, and layouts of documents are cached
        compiled = self.is_compiled or torch.compiler.is_compiling()
        options = {"context_fn": SELECTIVE} if compiled and self.recompute == "selective" else {}
        return self.checkpoint(call, *inputs, **options)

    def _forward(self, x_BTD: Tensor, state: Any, positions: Positions) -> tuple[Tensor, Any]:
        if state is not None and positions.reset_B is not None:
            state = self.reset(state, positions.reset_B)
        x_BTD, state = self.mix(x_BTD, state, positions)
        return self.feed(x_BTD), state

    def feed(self, x_BTD: Tensor) -> Tensor:
        """Apply the feed-forward layer, if there is one."""
        if self.mlp is None:
            return x_BTD
        return self.mlp(x_BTD, self.mlp_norm)

    @abstractmethod
    def mix(self, x_BTD: Tensor, state: Any, positions: Positions) -> tuple[Tensor, Any]:
        """Apply the causal sequence mixer of the variant, each of its parts with a residual connection.

        The first part is ``x + part(self.norm(x))``; further parts need norms of their own.

        Args:
            x_BTD: [B, T, D], the residual stream.
            state: from the call for the previous tokens; None at the start of a sequence.
            positions: of the tokens. With ``positions.documents``, documents must not affect each other.

        Returns:
            The stream after the mixer, [B, T, D], and the state after the last token, None when packed. A
            state holds tensors with the batch dimension first, in tuples, NamedTuples and dicts, and is never
            modified in place.
        """

    def layout(self, documents: Documents) -> Documents:
        """Return documents with what `mix` needs beside their borders; called outside of a compiled block."""
        return documents

    @property
    def is_compiled(self) -> bool:
        """Return True after `compile`."""
        return self._compiled_call_impl is not None

    def reset(self, state: Any, reset_B: Tensor) -> Any:
        """Return the state with rows ``reset_B`` [B] as at the start of a sequence, differentiable.

        By default zeros; a variant whose initial state is learned must override it.

        Raises:
            ValueError: single rows cannot be reset at this position, such as inside a chunk.
        """
        return reset_rows(state, reset_B)

    @abstractmethod
    def state_bytes(self, length: int) -> int:
        """Bytes one sequence carries after ``length`` tokens."""
