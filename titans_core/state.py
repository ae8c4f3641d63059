"""The recurrent state of a model, carried from one call to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten


def check_rows(state: Any, rows: int, name: str) -> None:
    """Refuse a carried state, the argument ``name``, that has another number of rows than the input.

    Raises:
        ValueError: the tensors of ``state`` are not of ``rows`` rows.
    """
    sizes = [len(x) for x in tree_leaves(state) if isinstance(x, Tensor) and x.ndim]
    if sizes and sizes[0] != rows:
        cause = f"has {sizes[0]} rows, the input has {rows}"
        raise ValueError(f"{name}: {cause}; pass the state of the same sequences")


class ModelState(NamedTuple):
    """The recurrent state of a batch: tokens read so far, and the state of each block."""

    position: int
    blocks: tuple[Any, ...]

    def detach(self) -> ModelState:
        """Return the state without its autograd graph, for truncated backpropagation."""
        cut = lambda x: x.detach() if isinstance(x, Tensor) else x  # noqa: E731
        return ModelState(self.position, tree_map(cut, self.blocks))

    def take(self, rows: Sequence[int]) -> ModelState:
        """Copy the state of these rows of the batch, in this order; rows may repeat."""
        copies: dict[int, Tensor] = {}  # tensors that two parts share stay shared
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
        """Split along the batch into ``sizes`` rows each, as views."""
        leaves, spec = tree_flatten(self.blocks)
        parts = [x.split(list(sizes)) if isinstance(x, Tensor) else [x] * len(sizes) for x in leaves]
        return [ModelState(self.position, tree_unflatten(part, spec)) for part in zip(*parts, strict=True)]

    @staticmethod
    def cat(states: Sequence[ModelState]) -> ModelState:
        """Concatenate states along the batch that one call can continue; the position is the first one's."""
        join = lambda *parts: torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0]  # noqa: E731
        first, *others = (state.blocks for state in states)
        return ModelState(states[0].position, tree_map(join, first, *others) if others else first)
