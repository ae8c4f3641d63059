"""Batches of prepared sources, a function of the seed and the step: shuffled rows, or continuous streams.

The shuffle is stateless, a function of a key and a position. In continuous streams each row of a batch
continues the same row of the previous step, so that a model's state can be carried from step to step
(truncated backpropagation through time).

Shapes: B rows of a batch or streams, T predicted tokens of a row (`sequence_length`), W of a row of a stream
(T times `optim.bptt_rows`), R rows of a source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titans_platform.config import RunConfig, SourceConfig
from titans_platform.data.encode import interleave
from titans_platform.data.shards import MOST_OPEN, OPEN_SHARDS, Integers, SourceRows, Split
from titans_platform.errors import UsageError


class SourceOrder:
    """The shuffled order of a source's rows, another one in each epoch; both last orders are kept."""

    def __init__(self, rows: int, key: str):
        self.rows = rows
        self._shuffled = lru_cache(maxsize=2)(lambda epoch: shuffled(rows, f"{key}/{epoch}"))

    def at(self, drawn: Integers) -> Integers:
        """Row numbers of the samples ``drawn``, numbered from the start of the first epoch."""
        rows, epochs = np.empty_like(drawn), drawn // self.rows
        for epoch in np.unique(epochs).tolist():
            inside = epochs == epoch
            rows[inside] = self._shuffled(epoch)[drawn[inside] - epoch * self.rows]
        return rows


def shuffled(n: int, key: str) -> Integers:
    """Return a permutation of 0..n-1 that is a function of ``key``: indices sorted by a hash of themselves.

    Not numpy's generators, whose streams may change between versions: a resumed run must see the same rows.
    """
    return np.argsort(_hashes(n, key), kind="stable")


def uniform(n: int, key: str) -> NDArray[np.float64]:
    """n numbers in [0, 1), a function of ``key`` only."""
    return (_hashes(n, key) >> np.uint64(11)) / float(2**53)


def _hashes(n: int, key: str) -> NDArray[np.uint64]:
    salt = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
    x = np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(salt)
    # splitmix64's finaliser
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Batch(NamedTuple):
    """Rows of tokens with their document starts and loss mask."""

    tokens: Tensor
    """int64 [B, T+1]"""
    starts: Tensor
    """bool [B, T+1]: a document starts at this token; True for the first of every row."""
    loss: Tensor
    """bool [B, T]: predicting tokens[b, t+1] counts."""


def gather(sources: Sequence[SourceRows], validation: bool, source_ids: Integers, rows: Integers) -> Batch:
    """Collect the rows of a batch, each given by source and row number in that source."""
    shape = len(rows), sources[0].length + 1
    tokens = np.full(shape, sources[0].pad, np.int64)
    starts, loss = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
    for i, (s, row) in enumerate(zip(source_ids.tolist(), rows.tolist(), strict=True)):
        source = sources[s]
        span = (source.validation if validation else source.train).row(row)
        inside = slice(len(span.tokens))  # the padding after a task item has no loss
        tokens[i, inside], loss[i, inside] = span.tokens, span.loss
        starts[i, inside] = span.starts & source.borders
    starts[:, 0] = True
    return Batch(*map(torch.from_numpy, (tokens, starts, np.ascontiguousarray(loss[:, 1:]))))


def check_weights(sources: Sequence[SourceRows | SourceConfig]) -> None:
    """Raise UsageError if no source has a weight."""
    if not any(source.weight for source in sources):
        raise UsageError("data.sources: every weight is 0; give one a weight above 0 to train on it")


def _cycle_of(sources: Sequence[SourceRows]) -> list[int]:
    """Return a cycle of source indices, each as often as its weight says. Raises UsageError."""
    check_weights(sources)
    return interleave([source.weight for source in sources])


class RowStream:
    """Training batches: `batch(step)` is a function of the seed and the step, for any world size.

    Sources are interleaved in a fixed cycle that gives each exactly its weight; the rows of each source are
    reshuffled every epoch.
    """

    def __init__(self, sources: Sequence[SourceRows], cfg: RunConfig, rank: int = 0, world_size: int = 1):
        self.sources, self.batch_size, self.seed = sources, cfg.optim.global_batch_size, cfg.seed
        self.mine = slice(rank, None, world_size)
        self._orders = [SourceOrder(len(each.train), f"{cfg.seed}/{i}") for i, each in enumerate(sources)]
        # source and turn at each place of a cycle, and turns per source
        self._cycle = cycle = np.array(_cycle_of(sources))
        taken = np.cumsum(cycle[:, None] == np.arange(len(sources)), axis=0)
        self._turn, self._per_cycle = taken[np.arange(len(cycle)), cycle] - 1, taken[-1]

    def batch(self, step: int) -> Batch:
        """Return this worker's rows of the global batch of ``step`` (0-based)."""
        source_ids, rows = self.drawn(step)
        return gather(self.sources, False, source_ids[self.mine], rows[self.mine])

    def sources_of(self, step: int) -> Integers:
        """[B] the source of each row of the global batch."""
        return self.drawn(step)[0]

    def drawn(self, step: int) -> tuple[Integers, Integers]:
        """Return the source and the row of each sample of the global batch of a step."""
        samples = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        # otherwise a worker, or a micro-batch, could see only one source
        samples = samples[shuffled(self.batch_size, f"{self.seed}/batch/{step}")]
        cycle, place = np.divmod(samples, len(self._cycle))
        source_ids = self._cycle[place]
        drawn = cycle * self._per_cycle[source_ids] + self._turn[place]
        rows = np.empty_like(drawn)
        for s in np.unique(source_ids).tolist():
            of_source, order = source_ids == s, self._orders[s]
            rows[of_source] = order.at(drawn[of_source])
        return source_ids, rows


def validation_batches(sources: Sequence[SourceRows], batch_size: int) -> Iterator[Batch]:
    """Yield all validation rows once, ``batch_size`` at a time, in a fixed order that mixes the sources.

    Any prefix is a representative sample; the last batch may be smaller.
    """
    counts = np.array([len(source.validation) for source in sources])
    order, ends = shuffled(int(counts.sum()), "validation"), counts.cumsum()
    source_ids = np.searchsorted(ends, order, side="right")
    rows = order - (ends - counts)[source_ids]
    for first in range(0, len(rows), batch_size):
        part = slice(first, first + batch_size)
        yield gather(sources, True, source_ids[part], rows[part])


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
        inside = np.arange(int(rows.sum())) - np.repeat(np.cumsum(rows) - rows, rows)
        first = np.repeat(starts, rows) + width * inside
        length = np.minimum(width, np.repeat(ends, rows) - 1 - first)
        return RowTable(first, length, inside == 0, int(rows[0]) if item and len(rows) else 1)

    def __len__(self) -> int:
        return len(self.first)


def document_starts(split: Split) -> Integers:
    """Offset of each document in the split; reads one bit per token."""
    starts = [np.zeros(1, np.int64)]
    for number, (offset, tokens) in enumerate(zip(split.begins.tolist(), split.held.tolist(), strict=True)):
        bits = np.unpackbits(split.shard(number).starts, count=tokens, bitorder="little")
        starts.append(np.flatnonzero(bits) + offset)
    return np.unique(np.concatenate(starts))


class Streams:
    """Training batches of continuous streams: `batch(step)` for any number of workers.

    Of G groups of B streams, step s reads the next row of each stream of group s mod G. A group's streams are
    assigned to the sources by weight. The n streams of a source, over all groups, start at equal distances,
    at an offset drawn from the seed, and wrap around at its end: in G (R // n) steps they read every row
    once, except for a remainder of fewer than n rows (for a task, n items).

    Args:
        sources: prepared sources.
        cfg: B is ``optim.global_batch_size``, over all workers, G ``optim.stream_groups``; ``seed`` decides
            where streams start, and which are reset.
        rank, world_size: this worker has the streams rank, rank + world_size, ...

    Raises:
        UsageError: there are fewer streams than sources, or a source has too few rows.
    """

    def __init__(self, sources: Sequence[SourceRows], cfg: RunConfig, rank: int = 0, world_size: int = 1):
        self.sources, self.width, self.seed = sources, cfg.row_tokens, cfg.seed
        self.batch_size, self.groups = cfg.optim.global_batch_size, cfg.optim.stream_groups
        self.mine, self.reset_probability = slice(rank, None, world_size), cfg.optim.reset_probability
        width, batch_size, groups = self.width, self.batch_size, self.groups
        self.source = np.resize(_cycle_of(sources), batch_size)
        """[B] the source of each stream of a group."""
        self.tables: dict[int, RowTable] = {}
        self.begin = np.zeros((groups, batch_size), np.int64)
        """[G, B] the row of its source at which each stream starts."""
        for i, source in enumerate(sources):
            if not source.weight:
                continue
            streams = np.flatnonzero(self.source == i)
            count = groups * len(streams)
            if not count:
                cause = f"{source.weight:g} gives the source none of the {batch_size} streams"
                raise UsageError(f"data.sources.{i}.weight: {cause}; raise it, or optim.global_batch_size")
            table = self.tables[i] = RowTable.of(source, width)
            each = len(table) // count // table.unit * table.unit
            if not each:
                cause = f"{len(table)} rows of {width} tokens cannot be divided among {count} streams"
                fix = "give it more text, or lower optim.global_batch_size or optim.stream_groups"
                raise UsageError(f"data.sources.{i}: {cause}; {fix}")
            base = int(uniform(1, f"{cfg.seed}/{i}/streams")[0] * len(table)) // table.unit * table.unit
            self.begin[:, streams] = base + each * np.arange(count).reshape(groups, -1)
            # each stream reads a shard of its own
            source.train.keep_open(max(OPEN_SHARDS, 2 * len(streams), min(2 * count, MOST_OPEN)))

    def sources_of(self, step: int) -> Integers:
        """[B] the source of each stream of the step's group."""
        return self.source

    def rows(self, step: int) -> Integers:
        """[B] the row of its source that each stream of the step's group is at."""
        ends = np.array([len(self.tables[s]) if s in self.tables else 1 for s in range(len(self.sources))])
        return (self.begin[step % self.groups] + step // self.groups) % ends[self.source]

    def resets(self, step: int) -> NDArray[np.bool_]:
        """[B] which streams are reset at ``step``."""
        if step < self.groups:
            return np.ones(self.batch_size, np.bool_)
        random_resets = uniform(self.batch_size, f"{self.seed}/reset/{step}") < self.reset_probability
        rows, begins = self.rows(step), np.zeros(self.batch_size, np.bool_)
        for s, table in self.tables.items():
            of_source = self.source == s
            begins[of_source] = table.begins[rows[of_source]]
        return random_resets | begins

    def batch(self, step: int) -> StreamBatch:
        """Return this worker's rows of ``step`` (0-based)."""
        source_ids, rows, resets = (x[self.mine] for x in (self.source, self.rows(step), self.resets(step)))
        tokens = np.full((len(rows), self.width + 1), self.sources[0].pad, np.int64)
        loss = np.zeros((len(rows), self.width), np.bool_)
        for b, (s, row) in enumerate(zip(source_ids.tolist(), rows.tolist(), strict=True)):
            table, split = self.tables[s], self.sources[s].train
            first, length = int(table.first[row]), int(table.length[row])
            span = split.read(first, first + length + 1)
            tokens[b, : length + 1], loss[b, :length] = span.tokens, span.loss[1:]
        return StreamBatch(*map(torch.from_numpy, (tokens, loss, resets)))
