"""Continuous streams: each row of a batch continues the same row of the previous step.

The state of a model can then be carried from step to step (truncated backpropagation through time). Which
tokens a step reads, and which streams are reset, is a function of the seed and the step only.

Shapes: B streams, W predicted tokens per row (`sequence_length` times `optim.bptt_rows`), R rows of a source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titans_platform.data.encode import interleave
from titans_platform.data.order import Integers, uniform
from titans_platform.data.reading import OPEN_SHARDS, SourceRows, Split
from titans_platform.errors import UsageError


class StreamBatch(NamedTuple):
    """The next rows of some streams, their loss mask, and which streams are reset."""

    tokens: Tensor
    """int64 [B, W+1]"""
    loss: Tensor
    """bool [B, W]: predicting tokens[b, t+1] counts."""
    reset: Tensor
    """bool [B]: the state is not carried into this row."""


@dataclass(frozen=True)
class RowTable:
    """The rows of a source in reading order: a document starts on a new row, and its last row is padded."""

    first: Integers
    """[R] the first token of each row in the split."""
    length: Integers
    """[R] number of predicted tokens, at most W."""
    begins: NDArray[np.bool_]
    """[R] whether a document starts there."""
    unit: int
    """Rows per task item, which is not divided between two streams; 1 for text."""

    @staticmethod
    def of(source: SourceRows, width: int) -> RowTable:
        """Rows of ``width`` tokens: of each document, or of the whole text where ``packing`` is plain."""
        tokens = int(source.train.held.sum())
        item = source.manifest.item_tokens
        if item is not None:
            starts = np.arange(0, tokens, item)
        elif source.borders:
            starts = document_starts(source.train)
        else:
            starts = np.zeros(1, np.int64)
        ends = np.append(starts[1:], tokens)
        # the last token of a document predicts nothing
        rows = -(-(ends - starts - 1) // width)
        before = np.cumsum(rows) - rows
        inside = np.arange(int(rows.sum())) - np.repeat(before, rows)
        first = np.repeat(starts, rows) + width * inside
        length = np.minimum(width, np.repeat(ends, rows) - 1 - first)
        return RowTable(first, length, inside == 0, int(rows[0]) if item and len(rows) else 1)

    def __len__(self) -> int:
        return len(self.first)


def document_starts(split: Split) -> Integers:
    """Offset of each document in the split; reads one bit per token."""
    found = [np.zeros(1, np.int64)]
    for number, (begin, held) in enumerate(zip(split.begins.tolist(), split.held.tolist(), strict=True)):
        bits = np.unpackbits(split.shard(number).starts, count=held, bitorder="little")
        found.append(np.flatnonzero(bits) + begin)
    return np.unique(np.concatenate(found))


class Streams:
    """Training batches of continuous streams: `batch(step)` for any number of workers.

    The B streams are assigned to the sources by weight. The n streams of a source start at equal distances,
    at an offset drawn from the seed, and wrap around at its end: in R // n steps they read every row once,
    except for a remainder of fewer than n rows (for a task, n items).

    Args:
        sources: prepared sources.
        batch_size: B, over all workers.
        width: W.
        seed: determines where streams start, and which are reset.
        rank, world_size: this worker has the streams rank, rank + world_size, ...
        reset_probability: probability of a random reset of a stream at a step.
        carry_after: all streams are reset at every step before this one.
        state_passing: probability that the begin of a document does not reset its stream.

    Raises:
        UsageError: there are fewer streams than workers or sources, or a source has too few rows.
    """

    def __init__(
        self,
        sources: Sequence[SourceRows],
        batch_size: int,
        width: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        reset_probability: float = 0.0,
        carry_after: int = 0,
        state_passing: float = 0.0,
    ):
        if batch_size < world_size:
            raise UsageError(
                f"optim.global_batch_size: {batch_size} streams cannot be shared by {world_size} workers"
            )
        self.sources, self.batch_size, self.width, self.seed = sources, batch_size, width, seed
        self.mine = slice(rank, None, world_size)
        self.reset_probability, self.carry_after = reset_probability, carry_after
        self.state_passing = state_passing
        self.source = np.resize(interleave([source.weight for source in sources]), batch_size)
        """[B] the source of each stream."""
        self.tables: dict[int, RowTable] = {}
        self.begin = np.zeros(batch_size, np.int64)
        """[B] the row of its source at which each stream starts."""
        for i, source in enumerate(sources):
            if source.weight:
                self._place(i, source)
        self._prefetched: dict[int, int] = {}

    def _place(self, i: int, source: SourceRows) -> None:
        """The rows at which the streams of source ``i`` start."""
        streams = np.flatnonzero(self.source == i)
        if not len(streams):
            raise UsageError(
                f"data.sources.{i}.weight: {source.weight:g} gives the source none of the {self.batch_size} "
                "streams; raise it, or optim.global_batch_size"
            )
        table = self.tables[i] = RowTable.of(source, self.width)
        each = len(table) // len(streams) // table.unit * table.unit
        if not each:
            raise UsageError(
                f"data.sources.{i}: {len(table)} rows of {self.width} tokens cannot be divided among "
                f"{len(streams)} streams; give it more text, or lower optim.global_batch_size"
            )
        base = int(uniform(1, f"{self.seed}/{i}/streams")[0] * len(table)) // table.unit * table.unit
        self.begin[streams] = base + each * np.arange(len(streams))
        # each stream reads a shard of its own
        source.train.max_open = max(OPEN_SHARDS, 2 * len(streams))

    def rows(self, step: int) -> Integers:
        """[B] the row of its source that each stream is at."""
        ends = np.array([len(self.tables[s]) if s in self.tables else 1 for s in range(len(self.sources))])
        return (self.begin + step) % ends[self.source]

    def resets(self, step: int) -> NDArray[np.bool_]:
        """[B] which streams are reset at ``step``."""
        if step == 0 or step < self.carry_after:
            return np.ones(self.batch_size, np.bool_)
        found = uniform(self.batch_size, f"{self.seed}/reset/{step}") < self.reset_probability
        rows, begins = self.rows(step), np.zeros(self.batch_size, np.bool_)
        for s, table in self.tables.items():
            here = self.source == s
            begins[here] = table.begins[rows[here]]
        if self.state_passing:
            begins &= uniform(self.batch_size, f"{self.seed}/passing/{step}") >= self.state_passing
        return found | begins

    def batch(self, step: int) -> StreamBatch:
        """This worker's rows of ``step`` (0-based)."""
        which, rows, resets = (x[self.mine] for x in (self.source, self.rows(step), self.resets(step)))
        tokens = np.full((len(rows), self.width + 1), self.sources[0].pad, np.int64)
        loss = np.zeros((len(rows), self.width), np.bool_)
        for b, (s, row) in enumerate(zip(which.tolist(), rows.tolist(), strict=True)):
            table, split = self.tables[s], self.sources[s].train
            first, length = int(table.first[row]), int(table.length[row])
            self._prefetch(b, split, first)
            span = split.read(first, first + length + 1)
            tokens[b, : length + 1], loss[b, :length] = span.tokens, span.loss[1:]
        return StreamBatch(*map(torch.from_numpy, (tokens, loss, resets)))

    def _prefetch(self, b: int, split: Split, first: int) -> None:
        """Prefetch the shard of a stream and the next one, when it reaches a new one."""
        shard = int(split.shard_of(np.array([first]))[0])
        if self._prefetched.get(b) != shard:
            self._prefetched[b] = shard
            split.prefetch([shard, (shard + 1) % len(split.held)])
