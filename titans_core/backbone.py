"""What models share: the stack of blocks, the state it carries between calls, what weight decay may touch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from titans_core.blocks import Block, Positions, resolve
from titans_core.config import ModelConfig
from titans_core.documents import Documents, check_not_empty
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

    def take(self, rows: Sequence[int]) -> ModelState:
        """A copy of the state of these rows of the batch, in this order; a row may come several times."""
        copies: dict[int, Tensor] = {}  # what two parts of a state share they go on sharing
        places: dict[torch.device, Tensor] = {}

        def taken(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if x.device not in places:
                places[x.device] = torch.tensor(rows, device=x.device, dtype=torch.long)
            if id(x) not in copies:
                copies[id(x)] = x.index_select(0, places[x.device])
            return copies[id(x)]

        return ModelState(self.position, tree_map(taken, self.blocks))

    def split(self, sizes: Sequence[int]) -> list[ModelState]:
        """The state of so many neighbouring rows of the batch each, as views."""
        leaves, spec = tree_flatten(self.blocks)
        parts = [x.split(list(sizes)) if isinstance(x, Tensor) else [x] * len(sizes) for x in leaves]
        return [ModelState(self.position, tree_unflatten(part, spec)) for part in zip(*parts, strict=True)]

    @staticmethod
    def cat(states: Sequence[ModelState]) -> ModelState:
        """The state of a batch from those of its parts, which all stand at one position."""
        join = lambda *parts: torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0]  # noqa: E731
        first, *others = (state.blocks for state in states)
        return ModelState(states[0].position, tree_map(join, first, *others) if others else first)


class Model(nn.Module):
    """What a run trains: a module that knows its size, what a sequence costs it, and which weights decay."""

    added: ClassVar[tuple[str, ...]] = ()
    """How names of weights begin that a checkpoint to start from need not have: they keep their values."""

    def num_parameters(self) -> int:
        """Trained numbers, a tied embedding counted once."""
        return sum(p.numel() for p in self.parameters())

    def state_bytes(self, length: int) -> int:
        """Bytes one sequence carries after ``length`` positions; 0 for a model without a state."""
        return 0

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Optimiser groups: decay pulls on the matrices of linear layers and on nothing else.

        Norms, biases, convolutions, gates' biases, persistent tokens, the embedding of tokens (and a head
        tied to it) and M_0 keep their scale: it means something in each of them.
        """
        decayed = {id(m.weight) for m in self.modules() if isinstance(m, nn.Linear)}
        decayed -= {id(m.weight) for m in self.modules() if isinstance(m, nn.Embedding)}
        split: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
        for p in self.parameters():
            split[id(p) not in decayed].append(p)
        return [{"params": split[0], "weight_decay": weight_decay}, {"params": split[1], "weight_decay": 0.0}]


class Backbone(Model):
    """Blocks of one variant and a final norm, between an embedding and a head that the data decide.

    A subclass gives both, calls `encode` between them in its ``forward``, and inherits the rest.

    Raises:
        ValueError: for an unknown variant, or what its `Block.check` refuses.
    """

    def __init__(self, config: ModelConfig, embedding: nn.Module, head: nn.Module):
        super().__init__()
        block = resolve(config)
        self.config = config
        self.embedding = embedding
        self.blocks = nn.ModuleList(block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.d_model)
        self.head = head
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
            x_BTD: what the embedding gave.
            state: from an earlier call: the sequence goes on, cut anywhere.
            document_starts: [B, T] bool, True where a packed document begins; memory, convolutions,
                attention and positions start afresh there. Cannot be combined with ``state``, and leaves
                none. A compiled model takes `Documents.from_starts` of it, made outside: how many there
                are is data.
            reset_B: [B] bool, rows that begin a new sequence at this call in spite of ``state``; positions
                run on, and are seen only relative to each other. The state must stand on a border of chunks
                and segments.

        Raises:
            ValueError: there is no row or no token, ``document_starts`` and ``state`` are both given, or rows
                cannot be reset here.
        """
        check_not_empty(x_BTD)
        if document_starts is not None and state is not None:
            raise ValueError("document_starts: packed documents cannot continue a state")
        positions, start = _positions(x_BTD, state, document_starts)
        positions = positions._replace(reset_B=reset_B)
        before = [None] * len(self.blocks) if state is None else state.blocks
        after = []
        for block, block_state in zip(self.blocks, before, strict=True):
            x_BTD, block_state = block(x_BTD, block_state, positions)
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
        if documents.one_a_row:  # a plain batch, which needs no packing
            return Positions(documents.position_BT[:1]), 0
        return Positions(documents.position_BT, documents), 0
    start = 0 if state is None else state.position
    return Positions(torch.arange(start, start + x_BTD.shape[1], device=x_BTD.device)[None]), start
