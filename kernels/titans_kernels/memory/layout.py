"""How tokens are laid out in chunks, so that one step of the recurrence is a contiguous slice.

Steps go through all documents' first chunks, then all second chunks, and so on, whether the input is a batch
of equal rows or packed documents of any lengths: these are ordered by length, so those still running are
always the first ones.
Shapes: M chunks (steps x documents), H heads, b tokens of a chunk; R rows, the chunks of some heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Span(NamedTuple):
    """A run of steps, ``first`` to ``stop`` - 1, of some heads."""

    first: int
    stop: int
    heads: slice


Ends = tuple[slice | Tensor, int | Tensor]
"""Index [R, b] of each row's last valid token."""


@dataclass(frozen=True)
class EqualRows:
    """A batch of rows of one length; the last chunk of each may be short."""

    chunk_size: int
    batch: int
    length: int
    order = None

    @property
    def rows(self) -> tuple[int, ...]:
        """Documents running at each step."""
        return (self.batch,) * -(-self.length // self.chunk_size)

    def split(self, x: Tensor) -> Tensor:
        """x [B, T, H, ...] in chunks [steps, B, H, b, ...], padded with zeros; a view where T is whole."""
        short = -self.length % self.chunk_size
        x = F.pad(x, [0, 0] * (x.ndim - 2) + [0, short]) if short else x
        return x.unflatten(1, (-1, self.chunk_size)).movedim((1, 3), (0, 2))

    def join(self, x: Tensor) -> Tensor:
        """Inverse of `split`."""
        return x.movedim((0, 2), (1, 3)).flatten(1, 2)[:, : self.length]

    def room(self, x: Tensor) -> Tensor:
        """Chunks yet to be filled, as `split` gives of x; laid out so that `join` copies nothing."""
        padded = len(self.rows) * self.chunk_size
        empty = torch.empty(x.shape[0], padded, *x.shape[2:], dtype=x.dtype, device=x.device)
        return empty.unflatten(1, (-1, self.chunk_size)).movedim((1, 3), (0, 2))

    def index(self, span: Span) -> tuple[slice, ...]:
        """Where a span's rows stand in what `split` gives."""
        return slice(span.first, span.stop), slice(None), span.heads

    def ends(self, span: Span, rows: int) -> Ends:
        """Index of each of the ``rows`` rows' last valid token."""
        if span.stop * self.chunk_size <= self.length:
            return slice(None), self.chunk_size - 1
        last = torch.full((rows,), self.chunk_size - 1)
        last[-(rows // (span.stop - span.first)) :] = (self.length - 1) % self.chunk_size
        return torch.arange(rows), last


@dataclass(frozen=True)
class Packed:
    """Documents of any lengths in one row.

    ``rows``: documents running at each step, never increasing. ``order``: documents by falling length.
    ``source``: for each place of [M, b], M chunks, the token it holds, -1 for padding. ``last_M``: index of
    the last valid token in each chunk.
    """

    chunk_size: int
    rows: tuple[int, ...]
    order: Tensor
    source: Tensor
    last_M: Tensor

    @staticmethod
    def of(cu_seqlens: Tensor, chunk_size: int) -> Packed:
        """Document i is tokens cu_seqlens[i] to cu_seqlens[i + 1]."""
        bounds = cu_seqlens.long().cpu()
        lengths, order = torch.sort(bounds.diff(), descending=True, stable=True)
        chunks = (lengths + chunk_size - 1) // chunk_size
        steps = torch.arange(int(chunks[0]))
        rows = (chunks[None] > steps[:, None]).sum(1)
        step_M = torch.repeat_interleave(steps, rows)
        document_M = torch.cat([torch.arange(n) for n in rows.tolist()])
        valid_M = (lengths[document_M] - step_M * chunk_size).clamp(max=chunk_size)
        token = torch.arange(chunk_size)
        first_M = bounds[:-1][order][document_M] + step_M * chunk_size
        source = torch.where(token < valid_M[:, None], first_M[:, None] + token, -1)
        order, source, last = (x.to(cu_seqlens.device) for x in (order, source, valid_M - 1))
        return Packed(chunk_size, tuple(rows.tolist()), order, source, last)

    @property
    def documents(self) -> int:
        """How many there are."""
        return self.rows[0]

    def split(self, x: Tensor) -> Tensor:
        """x [1, T, H, ...] in chunks [M, H, b, ...], padded with zeros; gradients flow."""
        padding = (self.source < 0).view(*self.source.shape, *[1] * (x.ndim - 2))
        return torch.where(padding, 0, x[0, self.source.clamp(min=0)]).transpose(1, 2)

    def join(self, x: Tensor) -> Tensor:
        """Inverse of `split`."""
        source = self.source.flatten()
        valid = torch.nonzero(source >= 0).flatten()
        place = torch.empty_like(valid)
        place[source[valid]] = valid
        return x.transpose(1, 2).flatten(0, 1)[place][None]

    def room(self, x: Tensor) -> Tensor:
        """Chunks yet to be filled, as `split` gives of x."""
        M, b = self.source.shape
        return torch.empty(M, x.shape[2], b, *x.shape[3:], dtype=x.dtype, device=x.device)

    def index(self, span: Span) -> tuple[slice, ...]:
        """Where a span's rows stand in what `split` gives."""
        return self._chunks(span), span.heads

    def _chunks(self, span: Span) -> slice:
        first = sum(self.rows[: span.first])
        return slice(first, first + sum(self.rows[span.first : span.stop]))

    def ends(self, span: Span, rows: int) -> Ends:
        """Index of each of the ``rows`` rows' last valid token."""
        last = self.last_M[self._chunks(span)]
        last = last.repeat_interleave(rows // last.shape[0])
        return torch.arange(rows, device=last.device), last


Layout = EqualRows | Packed
packed = Packed.of
