"""Rows of prepared sources, in an order that is a function of the seed and one counter.

Shapes: B rows of a batch, T predicted tokens per row (`sequence_length`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from titans_platform.data.encode import interleave
from titans_platform.data.order import Integers, SourceOrder, shuffled, spread
from titans_platform.data.reading import SourceRows, Span
from titans_platform.errors import UsageError


class Batch(NamedTuple):
    """Rows of tokens with their document starts and loss mask."""

    tokens: Tensor
    """int64 [B, T+1]"""
    starts: Tensor
    """bool [B, T+1]: a document starts at this token; True for the first of every row."""
    loss: Tensor
    """bool [B, T]: predicting tokens[b, t+1] counts."""


def gather(sources: Sequence[SourceRows], validation: bool, which: Integers, rows: Integers) -> Batch:
    """The rows of a batch: source, and row number in that source."""
    shape = len(rows), sources[0].length + 1
    out = Span(np.empty(shape, np.int64), np.empty(shape, np.bool_), np.empty(shape, np.bool_))
    for s in np.unique(which).tolist():
        mine = np.flatnonzero(which == s)
        sources[s].fill(sources[s].validation if validation else sources[s].train, rows[mine], mine, out)
    out.starts[:, 0] = True
    return Batch(*map(torch.from_numpy, (out.tokens, out.starts, np.ascontiguousarray(out.loss[:, 1:]))))


class RowStream:
    """Training batches: `batch(step)` is a function of the seed and the step, for any world size.

    Sources are interleaved in a fixed cycle that gives each exactly its weight; the rows of each source are
    reshuffled every epoch.
    """

    def __init__(
        self, sources: Sequence[SourceRows], batch_size: int, seed: int, rank: int = 0, world_size: int = 1
    ):
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size} workers")
        if batch_size < world_size:
            raise UsageError(
                f"optim.global_batch_size: {batch_size} rows cannot be shared by {world_size} workers"
            )
        self.sources, self.batch_size, self.seed = sources, batch_size, seed
        self.rank, self.world_size = rank, world_size
        if not any(source.weight for source in sources):
            raise UsageError("data.sources: every weight is 0; give one a weight above 0 to train on it")
        self._orders = [
            SourceOrder(source.train.counts, f"{seed}/{i}", source.train.by_shard)
            for i, source in enumerate(sources)
        ]
        self._cycle, self._turn, self._per_cycle = spread(
            interleave([source.weight for source in sources]), len(sources)
        )
        self._prefetched: dict[int, tuple[int, int]] = {}

    @property
    def rows(self) -> list[int]:
        """Number of training rows of each source."""
        drawn_from = zip(self.sources, self._orders, strict=True)
        return [order.rows if source.weight else 0 for source, order in drawn_from]

    def batch(self, step: int) -> Batch:
        """This worker's rows of the global batch of ``step`` (0-based)."""
        which, rows = self._drawn(step)
        mine = slice(self.rank, None, self.world_size)
        return gather(self.sources, False, which[mine], rows[mine])

    def global_rows(self, step: int) -> list[tuple[int, int]]:
        """(source, row) of every row of the global batch, over all workers."""
        which, rows = self._drawn(step)
        return list(zip(which.tolist(), rows.tolist(), strict=True))

    def _drawn(self, step: int) -> tuple[Integers, Integers]:
        """The source and the row of each of a step's samples; prefetches the next window."""
        samples = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        # otherwise a worker, or a micro-batch, could see only one source
        samples = samples[shuffled(self.batch_size, f"{self.seed}/batch/{step}")]
        cycle, place = np.divmod(samples, len(self._cycle))
        which = self._cycle[place]
        drawn = cycle * self._per_cycle[which] + self._turn[place]
        rows = np.empty_like(drawn)
        for s in np.unique(which).tolist():
            mine = which == s
            self._prefetch(s, int(drawn[mine].min()))
            rows[mine] = self._orders[s].at(drawn[mine])
        return which, rows

    def _prefetch(self, s: int, drawn: int) -> None:
        """Prefetch the shards of a source's window and of the next one, when a window starts."""
        order = self._orders[s]
        at = order.window_at(drawn)
        if self._prefetched.get(s) != at:
            self._prefetched[s] = at
            self.sources[s].train.prefetch([*order.shards(*at), *order.shards(*order.next_window(*at))])


def validation_batches(sources: Sequence[SourceRows], batch_size: int) -> Iterator[Batch]:
    """All validation rows once, ``batch_size`` at a time, in a fixed order that mixes the sources.

    Any prefix is a representative sample; the last batch may be smaller.
    """
    counts = np.array([len(source.validation) for source in sources])
    order, ends = shuffled(int(counts.sum()), "validation"), counts.cumsum()
    which = np.searchsorted(ends, order, side="right")
    rows = order - (ends - counts)[which]
    for first in range(0, len(rows), batch_size):
        part = slice(first, first + batch_size)
        yield gather(sources, True, which[part], rows[part])
