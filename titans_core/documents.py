"""Packed documents, and rows whose state is reset."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map


def check_not_empty(x: Tensor, name: str = "tokens") -> None:
    """Refuse an empty batch.

    Raises:
        ValueError: ``x`` [B, T, ...] has no row or no token.
    """
    if not x.shape[0] or not x.shape[1]:
        raise ValueError(
            f"{name}: {x.shape[0]} rows of {x.shape[1]} tokens; a call needs at least one of each"
        )


def reset_rows(state: Any, reset_B: Tensor, start: Any = None) -> Any:
    """Replace the rows ``reset_B`` of ``state`` by the rows of ``start``.

    Args:
        state: a pytree of tensors [B, ...].
        reset_B: [B] bool.
        start: a pytree of the same structure whose tensors are [1, ...] or [B, ...]; None for zeros.
    """

    def merge(x: Any, first: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        mask = reset_B.view(-1, *[1] * (x.ndim - 1))
        return torch.where(mask, 0 if first is None else first.to(x.dtype), x)

    if start is None:
        return tree_map(lambda x: merge(x, None), state)
    return tree_map(merge, state, start)


class Documents(NamedTuple):
    """The documents of a packed batch [B, T], flattened to one sequence of B * T tokens.

    Each row starts a document, so no document spans two rows of the batch.
    """

    cu_seqlens: Tensor  # [N + 1] borders in the flattened batch, int32
    position_BT: Tensor  # position of each token within its document
    index_BT: Tensor  # which document a token belongs to

    @property
    def one_per_row(self) -> bool:
        """True if every row of the batch is one document."""
        return self.cu_seqlens.shape[0] - 1 == self.index_BT.shape[0]

    @staticmethod
    def from_starts(starts_BT: Tensor) -> Documents:
        """Read a mask that is True where a document begins; the first token of a row always does."""
        starts = starts_BT.clone()
        starts[:, 0] = True
        flat = starts.flatten()
        # on the meta device there are no values: one document per row
        rows = torch.arange(0, flat.numel(), starts.shape[1], device=flat.device)
        first = rows if flat.is_meta else torch.nonzero(flat).flatten()
        index = flat.cumsum(0) - 1
        position = torch.arange(flat.numel(), device=flat.device) - first[index]
        with torch.inference_mode(False):  # its version counter is the key under which its layout is cached
            borders = F.pad(first, (0, 1), value=flat.numel()).to(torch.int32)
        return Documents(borders, position.view_as(starts_BT), index.view_as(starts_BT))
