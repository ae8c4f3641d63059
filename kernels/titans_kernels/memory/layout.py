"""Chunk-major layout: all documents' first chunks, then all second chunks, and so on.

A step of the recurrence is then a contiguous slice, whether the input is a batch of equal rows or packed
documents of any lengths: documents are ordered by length, so those still running are always the first ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Layout:
    """How tokens map to chunks of one size.

    ``rows``: documents running at each step, never increasing. ``last_M``: index of the last valid token
    in each chunk. ``order``: documents by falling length, or None where all have one length.
    ``source``: for each place of [M * chunk_size] the packed token it holds, -1 for padding (varlen only).
    """

    chunk_size: int
    rows: tuple[int, ...]
    last_M: Tensor
    batch: int
    length: int
    order: Tensor | None = None
    source: Tensor | None = None
    place: Tensor | None = None

    @property
    def documents(self) -> int:
        """Documents in the batch."""
        return self.rows[0]

    def split(self, x: Tensor) -> Tensor:
        """[B, T, H, ...] to chunks [M, H, chunk_size, ...], padded with zeros."""
        if self.source is None:
            steps = len(self.rows)
            pad = steps * self.chunk_size - self.length
            x = F.pad(x, [0, 0] * (x.ndim - 2) + [0, pad]) if pad else x
            x = x.unflatten(1, (steps, self.chunk_size)).transpose(0, 1)  # [steps, B, chunk, H, ...]
            return x.flatten(0, 1).transpose(1, 2).contiguous()
        x = F.pad(x.flatten(0, 1), [0, 0] * (x.ndim - 2) + [0, 1])  # source -1 reads this row of zeros
        return x[self.source].unflatten(0, (-1, self.chunk_size)).transpose(1, 2).contiguous()

    def join(self, x: Tensor) -> Tensor:
        """Inverse of `split`: chunks [M, H, chunk_size, ...] to [B, T, H, ...]."""
        x = x.transpose(1, 2)
        if self.place is None:
            x = x.unflatten(0, (len(self.rows), self.batch)).transpose(0, 1)
            return x.flatten(1, 2)[:, : self.length]
        return x.flatten(0, 1)[self.place][None]


@lru_cache(maxsize=64)
def equal_rows(batch: int, length: int, chunk_size: int, device: torch.device) -> Layout:
    """Layout of a batch of equal rows."""
    steps = -(-length // chunk_size)
    last = torch.full((steps * batch,), chunk_size - 1, dtype=torch.long, device=device)
    last[(steps - 1) * batch :] = (length - 1) % chunk_size
    return Layout(chunk_size, (batch,) * steps, last, batch, length)


def packed(cu_seqlens: Tensor, chunk_size: int) -> Layout:
    """Layout of documents packed into one row; document i is tokens cu_seqlens[i] to cu_seqlens[i + 1]."""
    device = cu_seqlens.device
    bounds = cu_seqlens.long().cpu()
    lengths, order = torch.sort(bounds.diff(), descending=True, stable=True)
    chunks = (lengths + chunk_size - 1) // chunk_size
    steps = torch.arange(int(chunks[0]))
    rows = (chunks[None] > steps[:, None]).sum(1)
    step_M = torch.repeat_interleave(steps, rows)
    document_M = torch.cat([torch.arange(int(n)) for n in rows])
    valid_M = (lengths[document_M] - step_M * chunk_size).clamp(max=chunk_size)
    first_M = bounds[:-1][order][document_M] + step_M * chunk_size
    token = first_M[:, None] + torch.arange(chunk_size)
    source = torch.where(torch.arange(chunk_size) < valid_M[:, None], token, -1).flatten()
    place = torch.empty(int(bounds[-1]), dtype=torch.long)
    used = source >= 0
    place[source[used]] = torch.nonzero(used).flatten()
    return Layout(
        chunk_size,
        tuple(rows.tolist()),
        (valid_M - 1).to(device),
        1,
        int(bounds[-1]),
        order.to(device),
        source.to(device),
        place.to(device),
    )
