"""Packed documents, and rows whose state is reset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from titans_kernels import document_borders


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
    segments: Segments | None = None  # for MAC; see `Segments.of`
    part: int = 0
    """If not 0, documents are cut into parts of at most this many tokens, each with its own state."""

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

    @staticmethod
    def between(borders: Tensor) -> Documents:
        """Read the borders [N + 1] of documents in one row."""
        lengths = borders.diff()
        index = torch.repeat_interleave(torch.arange(len(lengths), device=borders.device), lengths)
        position = torch.arange(len(index), device=borders.device) - borders[:-1][index]
        return Documents(borders, position[None], index[None])

    def rows(self, x: Tensor) -> Tensor:
        """N parts in one row [1, T, ...] to a row each, [N, part, ...], padded with zeros."""
        return moved(x[0], *self._places()).unflatten(0, (-1, self.part))

    def row(self, x: Tensor) -> Tensor:
        """Inverse of `rows`."""
        return moved(x.flatten(0, 1), *reversed(self._places()))[None]

    def _places(self) -> tuple[Tensor, Tensor]:
        first, end = self.cu_seqlens[:-1, None].long(), self.cu_seqlens[1:, None]
        index = first + torch.arange(self.part, device=first.device)
        index = torch.where(index < end, index, -1)
        return index.flatten(), (self.index_BT * self.part + self.position_BT)[0]


class Segments(NamedTuple):
    """Packed documents cut into segments: all first ones, then all second ones and so on, without padding.

    Documents are sorted by length, so that those with a further segment come first.
    """

    steps: tuple[Documents, ...]
    """For each step the segments as documents [1, N] that continue earlier ones."""
    order: Tensor
    """[M] token of the flattened batch in each place; beyond the batch, a spare token."""
    place: Tensor
    """[M] the inverse of ``order``."""

    @staticmethod
    def of(documents: Documents, size: int, spare: bool = False) -> Segments:
        """Cut documents into segments of at most ``size`` tokens.

        With ``spare`` the number of steps depends on the batch's shape alone, and each has some documents of
        one token beside: a compiler would take sizes of 0 or 1 as constants.
        """
        tokens, device = documents.index_BT.numel(), documents.index_BT.device
        bounds = torch.tensor(document_borders(documents.cu_seqlens, tokens))
        lengths, sorted_N = torch.sort(bounds.diff(), descending=True, stable=True)
        first_N = bounds[:-1][sorted_N]
        count = -(-(documents.index_BT.shape[1] if spare else int(lengths[0])) // size)
        order, borders, used = [], [], tokens
        for step in range(count):
            parts = (lengths - step * size).clamp(0, size)
            parts = parts[: int((parts > 0).sum())]
            starts = first_N[: len(parts)] + step * size
            if spare:  # fewer from step to step, as for the others
                extra = count + 1 - max(step, 1)
                starts = torch.cat([starts, used + torch.arange(extra)])
                parts, used = F.pad(parts, (0, extra), value=1), used + extra
            ends = parts.cumsum(0)
            order.append(torch.arange(int(ends[-1])) + torch.repeat_interleave(starts - ends + parts, parts))
            borders.append(F.pad(ends, (1, 0)).int())
        whole = torch.cat(order)
        steps = tuple(Documents.between(x.to(device))._replace(part=size) for x in borders)
        return Segments(steps, whole.to(device), whole.argsort().to(device))

    @property
    def following(self) -> list[Tensor]:
        """For each step the borders of the next one; for the last its own, as a tensor of its own."""
        borders = [step.cu_seqlens for step in self.steps]
        return [*borders[1:], borders[-1][:]]

    def split(self, x_BTD: Tensor) -> Sequence[Tensor]:
        """[B, T, D] to the tokens of each step, [1, N, D]."""
        x = F.pad(x_BTD.flatten(0, 1), (0, 0, 0, self.order.shape[0] - x_BTD.shape[:2].numel()))
        lengths = [step.index_BT.shape[1] for step in self.steps]
        return torch.split(moved(x, self.order, self.place)[None], lengths, 1)

    def join(self, x_1ND: Sequence[Tensor], like_BTD: Tensor) -> Tensor:
        """Inverse of `split`."""
        x = moved(torch.cat(tuple(x_1ND), 1)[0], self.place, self.order)
        return x[: like_BTD.shape[:2].numel()].view_as(like_BTD)


class _Moved(torch.autograd.Function):
    """``x[index]``, 0 where the index is -1; its gradient is ``dy[back]``, autograd's would accumulate."""

    @staticmethod
    def forward(ctx, x, index, back):
        ctx.save_for_backward(index, back)
        return _taken(x, index)

    @staticmethod
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        index, back = ctx.saved_tensors
        return _Moved.apply(dy, back, index), None, None


def moved(x: Tensor, index: Tensor, back: Tensor) -> Tensor:
    """Return x [N, ...] at ``index`` [M], zeros where it is -1; ``back`` [N] is the index's inverse."""
    y = _Moved.apply(x, index, back)
    assert isinstance(y, Tensor)
    return y


def _taken(x: Tensor, index: Tensor) -> Tensor:
    taken = x[index.clamp(min=0)]
    return torch.where((index >= 0).view(-1, *[1] * (x.ndim - 1)), taken, 0)
