"""Layout of tokens in chunks, such that one step of the recurrence is a contiguous slice.

Step i processes chunk i of all documents, whether the input is a batch of equal rows or packed documents.
Packed documents are sorted by length, so the ones still active come first.

Shapes: M chunks (steps x documents), H heads, b tokens per chunk, R rows (chunks x heads).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary


class StepRange(NamedTuple):
    """Consecutive steps, ``first`` to ``stop`` - 1, of some heads."""

    first: int
    stop: int
    heads: slice


Ends = tuple[slice | Tensor, int | Tensor]
"""Index [R, b] of each row's last valid token."""


@dataclass(frozen=True)
class EqualRows:
    """A batch of rows of equal length; the last chunk of each may be partial."""

    chunk_size: int
    batch: int
    length: int
    device: torch.device
    order = None
    back = None

    @property
    def rows(self) -> tuple[int, ...]:
        """Number of documents that have a chunk at each step."""
        return (self.batch,) * -(-self.length // self.chunk_size)

    def split(self, x: Tensor) -> Tensor:
        """x [B, T, H, ...] in chunks [steps, B, H, b, ...], padded with zeros; a view if chunks divide T."""
        short = -self.length % self.chunk_size
        x = F.pad(x, [0, 0] * (x.ndim - 2) + [0, short]) if short else x
        return x.unflatten(1, (-1, self.chunk_size)).movedim((1, 3), (0, 2))

    def join(self, x: Tensor) -> Tensor:
        """Inverse of `split`."""
        return x.movedim((0, 2), (1, 3)).flatten(1, 2)[:, : self.length]

    def empty_like(self, x: Tensor) -> Tensor:
        """Uninitialised chunks with the shape of `split` of x; `join` of them makes no copy."""
        padded = len(self.rows) * self.chunk_size
        empty = torch.empty(x.shape[0], padded, *x.shape[2:], dtype=x.dtype, device=x.device)
        return empty.unflatten(1, (-1, self.chunk_size)).movedim((1, 3), (0, 2))

    def index(self, span: StepRange) -> tuple[slice, ...]:
        """Index of a span's rows in the output of `split`."""
        return slice(span.first, span.stop), slice(None), span.heads

    def ends(self, span: StepRange, rows: int) -> Ends:
        """Index of each of the ``rows`` rows' last valid token."""
        if span.stop * self.chunk_size <= self.length:
            return slice(None), self.chunk_size - 1
        last = torch.full((rows,), self.chunk_size - 1, device=self.device)
        last[-(rows // (span.stop - span.first)) :] = (self.length - 1) % self.chunk_size
        return torch.arange(rows, device=self.device), last


@dataclass(frozen=True)
class Packed:
    """Documents of different lengths packed into one row.

    ``rows``: number of documents with a chunk at each step, non-increasing; empty documents have none.
    ``ragged``: per step, whether any of its chunks is partial.
    ``order``: documents by decreasing length; ``back`` is its inverse.
    ``source``: for each slot of [M, b] the index of its token, -1 for padding; ``place`` is its inverse, the
    slot of each token.
    ``last_M``: index of the last valid token in each chunk.
    """

    chunk_size: int
    rows: tuple[int, ...]
    ragged: tuple[bool, ...]
    order: Tensor
    back: Tensor
    source: Tensor
    place: Tensor
    last_M: Tensor

    @staticmethod
    def of(borders: tuple[int, ...], chunk_size: int, device: torch.device) -> Packed:
        """Document i is tokens borders[i] to borders[i + 1]; computed on the CPU."""
        if borders[0] == borders[-1]:
            raise ValueError("cu_seqlens: all documents are empty")
        bounds = torch.tensor(borders)
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
        ragged = [bool((part < chunk_size).any()) for part in valid_M.split(rows.tolist())]
        parts = (order, order.argsort(), source, _places(source), valid_M - 1)
        return Packed(chunk_size, tuple(rows.tolist()), tuple(ragged), *(x.to(device) for x in parts))

    @property
    def documents(self) -> int:
        """Number of documents, including empty ones."""
        return self.order.shape[0]

    def split(self, x: Tensor) -> Tensor:
        """x [1, T, H, ...] in chunks [M, H, b, ...], padded with zeros; gradients flow."""
        padding = (self.source < 0).view(*self.source.shape, *[1] * (x.ndim - 2))
        return torch.where(padding, 0, x[0, self.source.clamp(min=0)]).transpose(1, 2)

    def join(self, x: Tensor) -> Tensor:
        """Inverse of `split`."""
        return x.transpose(1, 2).flatten(0, 1)[self.place][None]

    def empty_like(self, x: Tensor) -> Tensor:
        """Uninitialised chunks with the shape of `split` of x."""
        M, b = self.source.shape
        return torch.empty(M, x.shape[2], b, *x.shape[3:], dtype=x.dtype, device=x.device)

    def index(self, span: StepRange) -> tuple[slice, ...]:
        """Index of a span's rows in the output of `split`."""
        return self._chunks(span), span.heads

    def _chunks(self, span: StepRange) -> slice:
        first = sum(self.rows[: span.first])
        return slice(first, first + sum(self.rows[span.first : span.stop]))

    def ends(self, span: StepRange, rows: int) -> Ends:
        """Index of each of the ``rows`` rows' last valid token."""
        last = self.last_M[self._chunks(span)]
        last = last.repeat_interleave(rows // last.shape[0])
        return torch.arange(rows, device=last.device), last


Layout = EqualRows | Packed


def _places(source: Tensor) -> Tensor:
    """Slot of each token in the flattened [M, b]."""
    flat = source.flatten()
    valid = torch.nonzero(flat >= 0).flatten()
    place = torch.empty_like(valid)
    place[flat[valid]] = valid
    return place


@dataclass
class _Known:
    """Cached borders and layouts of one cu_seqlens, since reading it from every layer would stall the GPU."""

    seen: Tensor | int
    """Detects changes: on a CPU a copy of the values, elsewhere torch's version counter."""
    borders: tuple[int, ...]
    layouts: dict[tuple[int, torch.device], Packed] = field(default_factory=dict)

    def is_current(self, cu_seqlens: Tensor) -> bool:
        if isinstance(self.seen, Tensor):
            return torch.equal(self.seen, cu_seqlens)
        return self.seen == cu_seqlens._version


_KNOWN: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _known(cu_seqlens: Tensor) -> _Known:
    # a CPU tensor may share memory with numpy, whose writes do not increase the version counter
    on_cpu = cu_seqlens.device.type == "cpu"
    if not on_cpu and cu_seqlens.is_inference():  # inference tensors have no version counter
        return _Known(0, tuple(cu_seqlens.tolist()))
    known = _KNOWN.get(cu_seqlens)
    if known is None or not known.is_current(cu_seqlens):
        seen = cu_seqlens.clone() if on_cpu else cu_seqlens._version
        known = _KNOWN[cu_seqlens] = _Known(seen, tuple(cu_seqlens.tolist()))
    return known


def document_borders(cu_seqlens: Tensor, length: int) -> tuple[int, ...]:
    """Read and validate the values of ``cu_seqlens``.

    A GPU tensor is read once, and again after an in-place operation of torch; other writes to its memory
    (dlpack, ``.data``) are not detected.

    Args:
        cu_seqlens: [N + 1] cumulative lengths of N packed documents.
        length: total number of tokens.

    Raises:
        ValueError: the values do not rise from 0 to ``length``.
    """
    borders = _known(cu_seqlens).borders
    rising = all(a <= b for a, b in pairwise(borders))
    if len(borders) < 2 or borders[0] != 0 or borders[-1] != length or not rising:
        raise ValueError(f"cu_seqlens: must rise from 0 to T = {length}; documents may be empty")
    return borders


def packed_layout(cu_seqlens: Tensor, chunk_size: int, device: torch.device) -> Packed:
    """Return the layout of packed documents for tokens on ``device``, cached per tensor."""
    known, key = _known(cu_seqlens), (chunk_size, device)
    if key not in known.layouts:
        with torch.inference_mode(False):  # so that later training steps can use it
            known.layouts[key] = Packed.of(known.borders, chunk_size, device)
    return known.layouts[key]


def layout_of(tokens: Tensor, chunk_size: int, cu_seqlens: Tensor | None) -> Layout:
    """Return the layout of ``tokens`` [B, T, ...], or of the documents packed into them."""
    if cu_seqlens is None:
        return EqualRows(chunk_size, tokens.shape[0], tokens.shape[1], tokens.device)
    return packed_layout(cu_seqlens, chunk_size, tokens.device)
