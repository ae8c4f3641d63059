"""Parts that models share: the stack of blocks, and the optimiser's groups."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from titans_core.blocks import Block, Positions, resolve
from titans_core.config import ModelConfig
from titans_core.documents import Documents, check_not_empty
from titans_core.init import initialize
from titans_core.layers import RMSNorm
from titans_core.relay import Relay
from titans_core.state import ModelState, check_rows


class Model(nn.Module):
    """A trainable module with its parameter count, state size and optimiser groups."""

    added: ClassVar[tuple[str, ...]] = ()
    """Prefixes of weights that a checkpoint to start from may lack: they keep their initial values."""

    def num_parameters(self) -> int:
        """Return the number of trainable parameters, a tied embedding counted once."""
        return sum(p.numel() for p in self.parameters())

    def state_bytes(self, length: int) -> int:
        """Bytes one sequence carries after ``length`` positions; 0 for a model without a state."""
        return 0

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Optimiser groups: weight decay applies to the matrices of linear layers only.

        Norms, biases, convolutions, persistent tokens, the token embedding (and a head tied to it) and M_0
        are excluded, since their scale matters.
        """
        decayed = {id(m.weight) for m in self.modules() if isinstance(m, nn.Linear)}
        decayed -= {id(m.weight) for m in self.modules() if isinstance(m, nn.Embedding)}
        split: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
        for p in self.parameters():
            split[id(p) not in decayed].append(p)
        return [{"params": split[0], "weight_decay": weight_decay}, {"params": split[1], "weight_decay": 0.0}]


class Backbone(Model):
    """Blocks of one variant and a final norm, between an embedding and a head.

    A subclass provides both and calls `encode` between them in its ``forward``.

    Raises:
        ValueError: the variant is unknown, or its `Block.check` refuses the config.
    """

    def __init__(self, config: ModelConfig, embedding: nn.Module, head: nn.Module):
        super().__init__()
        block = resolve(config)
        self.config = config
        self.embedding = embedding
        self.blocks = nn.ModuleList(block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.d_model)
        self.head = head
        self.relay: Relay | None = None
        """Source and destination of the blocks' states; see `titans_core.sequence_parallel`."""
        initialize(self, config.n_layers * block.layers)

    def encode(
        self,
        x_BTD: Tensor,
        state: ModelState | None,
        document_starts: Tensor | Documents | None,
        reset_B: Tensor | None = None,
    ) -> tuple[Tensor, ModelState | None]:
        """[B, T, D] embedded tokens to [B, T, D] normalised features, and the state after the last token.

        Args:
            x_BTD: embedded tokens.
            state: from an earlier call, to continue its sequences; a sequence may be split anywhere.
            document_starts: [B, T] bool, True where a packed document begins; memory, convolutions,
                attention and positions are reset there. Not with ``state``, and no state is returned. A
                compiled model takes ``Documents.from_starts(document_starts)``, computed outside, since the
                number of documents depends on the data.
            reset_B: [B] bool, rows that start a new sequence at this call although a state is given. Their
                positions run on, since attention sees relative positions only. The state must be on a border
                of chunks and segments.

        Raises:
            ValueError: there is no row or no token, ``document_starts`` and ``state`` are both given, the
                state is of another number of rows or blocks, or rows cannot be reset here.
        """
        check_not_empty(x_BTD)
        # of one block, since this runs for each generated token
        check_rows(state and state.blocks[:1], len(x_BTD), "state")
        if document_starts is not None and state is not None:
            raise ValueError("document_starts: packed documents cannot continue a state")
        positions, start = _positions(x_BTD, state, document_starts)
        documents = positions.documents and cast(Block, self.blocks[0]).layout(positions.documents)
        positions = positions._replace(documents=documents, reset_B=reset_B)
        before = [None] * len(self.blocks) if state is None else state.blocks
        if len(before) != len(self.blocks):
            raise ValueError(f"state: has {len(before)} blocks, the model has {len(self.blocks)}")
        after = []
        for block, block_state in zip(self.blocks, before, strict=True):
            if self.relay is not None:
                block_state = self.relay.receive(block_state, x_BTD)
            x_BTD, block_state = block(x_BTD, block_state, positions)
            if self.relay is not None:
                self.relay.send(block_state)
            after.append(block_state)
        end = None if document_starts is not None else ModelState(start + x_BTD.shape[1], tuple(after))
        return self.norm(x_BTD), end

    def state_bytes(self, length: int) -> int:
        """Bytes one sequence carries after ``length`` tokens."""
        return sum(cast(Block, block).state_bytes(length) for block in self.blocks)


def _positions(
    x_BTD: Tensor, state: ModelState | None, starts: Tensor | Documents | None
) -> tuple[Positions, int]:
    if starts is not None:
        documents = starts if isinstance(starts, Documents) else Documents.from_starts(starts)
        if documents.index_BT.shape != x_BTD.shape[:2]:
            expected = f"the tokens have {list(x_BTD.shape[:2])}"
            raise ValueError(f"document_starts: {list(documents.index_BT.shape)}, but {expected}")
        if documents.one_per_row:  # a plain batch, which needs no packing
            return Positions(documents.position_BT[:1]), 0
        return Positions(documents.position_BT, documents), 0
    start = 0 if state is None else state.position
    return Positions(torch.arange(start, start + x_BTD.shape[1], device=x_BTD.device)[None]), start
