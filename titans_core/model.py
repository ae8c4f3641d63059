"""The language model: an embedding, blocks of one variant, a head."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from titans_core.blocks import Block, Positions, resolve
from titans_core.config import ModelConfig
from titans_core.documents import Documents
from titans_core.init import initialize
from titans_core.layers import RMSNorm


class ModelState(NamedTuple):
    """What a sequence leaves behind: tokens seen so far, and the state of each block."""

    position: int
    blocks: tuple[Any, ...]

    def detach(self) -> ModelState:
        """This state without the graph that made it."""
        cut = lambda x: x.detach() if isinstance(x, Tensor) else x  # noqa: E731
        return ModelState(self.position, tree_map(cut, self.blocks))


class ModelOutput(NamedTuple):
    """Logits [B, T, V] and the state after the last token (None when packed)."""

    logits: Tensor
    state: ModelState | None


class LanguageModel(nn.Module):
    """Next-token logits from tokens.

    Raises:
        ValueError: the config's variant is unknown, or refuses the config.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        block = resolve(config)
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.d_model)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        initialize(self, config.n_layers)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        tokens_BT: Tensor,
        state: ModelState | None = None,
        *,
        document_starts: Tensor | Documents | None = None,
    ) -> ModelOutput:
        """Logits of the token after each.

        Args:
            tokens_BT: [B, T] int64.
            state: from an earlier call: the sequence goes on, cut anywhere.
            document_starts: [B, T] bool, True where a packed document begins; memory, convolutions,
                attention and positions start afresh there. Cannot be combined with ``state``. A compiled
                model takes `Documents.from_starts` of it, made outside: how many there are is data.
        """
        if document_starts is not None and state is not None:
            raise ValueError("document_starts: packed documents cannot continue a state")
        positions, start = self._positions(tokens_BT, state, document_starts)
        # as large as the normalised stream the blocks add to; the tied head keeps logits of order 1
        x = self.embedding(tokens_BT) * self.config.d_model**0.5
        before = [None] * len(self.blocks) if state is None else state.blocks
        after = []
        for block, block_state in zip(self.blocks, before, strict=True):
            x, block_state = block(x, block_state, positions)
            after.append(block_state)
        end = None if positions.documents else ModelState(start + tokens_BT.shape[1], tuple(after))
        return ModelOutput(self.head(self.norm(x)), end)

    def num_parameters(self) -> int:
        """Trained numbers, a tied embedding counted once."""
        return sum(p.numel() for p in self.parameters())

    def state_bytes(self, length: int) -> int:
        """Bytes one sequence carries after ``length`` tokens."""
        return sum(cast(Block, block).state_bytes(length) for block in self.blocks)

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Optimiser groups: decay pulls on the matrices of linear layers and on nothing else.

        Norms, biases, convolutions, gates' biases, persistent tokens, the embedding and M_0 keep their
        scale: it means something in each of them.
        """
        decayed = {id(m.weight) for m in self.modules() if isinstance(m, nn.Linear)}
        decayed.discard(id(self.embedding.weight))
        split: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
        for p in self.parameters():
            split[id(p) not in decayed].append(p)
        return [{"params": split[0], "weight_decay": weight_decay}, {"params": split[1], "weight_decay": 0.0}]

    def _positions(
        self, tokens: Tensor, state: ModelState | None, starts: Tensor | Documents | None
    ) -> tuple[Positions, int]:
        if starts is not None:
            documents = starts if isinstance(starts, Documents) else Documents.from_starts(starts)
            return Positions(documents.position_BT, documents), 0
        start = 0 if state is None else state.position
        return Positions(torch.arange(start, start + tokens.shape[1], device=tokens.device)[None]), start
