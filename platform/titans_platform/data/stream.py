"""Rows out of prepared sources, in an order that is a function of the seed and one counter.

B rows of a batch, T tokens a row predicts (`sequence_length`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titans_platform.data.encode import interleave
from titans_platform.data.shards import Manifest, Span, Split
from titans_platform.errors import UsageError


class Batch(NamedTuple):
    """Rows of tokens, where documents start in them, and which predictions count."""

    tokens: Tensor
    """int64 [B, T+1]"""
    starts: Tensor
    """bool [B, T+1]: a document begins at this token; the first of a row always does."""
    loss: Tensor
    """bool [B, T]: predicting tokens[b, t+1] counts."""


class SourceRows:
    """The rows of one prepared source.

    Running text is cut into rows of T+1 tokens, T apart; a task item is a row, followed by a pad that
    has no loss.
    """

    def __init__(self, folder: Path, manifest: Manifest, sequence_length: int, pad: int, weight: float):
        self.folder, self.manifest, self.weight = folder, manifest, weight
        self.length, self.pad = sequence_length, pad
        self.train = Split(folder, manifest.train)
        self.validation = Split(folder, manifest.validation)

    def count(self, split: Split) -> int:
        """Rows of ``split``."""
        if self.manifest.item_tokens is not None:
            return split.info.tokens // self.length
        return max(0, split.info.tokens - 1) // self.length

    def row(self, split: Split, number: int) -> Span:
        """T+1 tokens with their starts, and whether each counts as a target."""
        first = number * self.length
        if self.manifest.item_tokens is None:
            return split.read(first, first + self.length + 1)
        tokens, starts, loss = split.read(first, first + self.length)
        tokens = np.append(tokens, tokens.dtype.type(self.pad))
        return Span(tokens, np.append(starts, False), np.append(loss, False))


def collate(rows: Sequence[Span], length: int) -> Batch:
    """Rows as one batch of tensors; ``length`` is T."""
    tokens = np.empty((len(rows), length + 1), np.int64)
    starts = np.empty((len(rows), length + 1), np.bool_)
    loss = np.empty((len(rows), length), np.bool_)
    for i, row in enumerate(rows):
        tokens[i], starts[i], loss[i] = row.tokens, row.starts, row.loss[1:]
    starts[:, 0] = True
    return Batch(torch.from_numpy(tokens), torch.from_numpy(starts), torch.from_numpy(loss))


class RowStream:
    """Training batches: `batch(step)` is a function of the seed and the step, for any number of workers.

    The sources take turns in a fixed cycle that gives each exactly its share; the rows of each come in a
    new order every time round.
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
        self.rows = [source.count(source.train) if source.weight else 0 for source in sources]
        """Training rows of each source."""
        if not any(source.weight for source in sources):
            raise UsageError("data.sources: every weight is 0; give one a weight above 0 to train on it")
        self._cycle = np.array(interleave([source.weight for source in sources]))
        taken = np.cumsum(self._cycle[:, None] == np.arange(len(sources)), axis=0)
        self._turn = taken[np.arange(len(self._cycle)), self._cycle] - 1
        self._per_cycle = taken[-1]
        # the last few are kept: a batch may span two epochs
        order = lru_cache(maxsize=2 * len(sources))
        self._order = order(lambda source, epoch: shuffled(self.rows[source], f"{seed}/{source}/{epoch}"))

    def batch(self, step: int) -> Batch:
        """This worker's rows of the global batch of ``step`` (from 0)."""
        mine = self.global_rows(step)[self.rank :: self.world_size]
        rows = [self.sources[s].row(self.sources[s].train, row) for s, row in mine]
        return collate(rows, self.sources[0].length)

    def global_rows(self, step: int) -> list[tuple[int, int]]:
        """(source, row) of every row of the global batch, all workers' together."""
        samples = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        # else a worker, or a micro-batch, could see one source only
        samples = samples[shuffled(self.batch_size, f"{self.seed}/batch/{step}")]
        return [self._at(sample) for sample in samples.tolist()]

    def _at(self, sample: int) -> tuple[int, int]:
        cycle, place = divmod(sample, len(self._cycle))
        source = int(self._cycle[place])
        drawn = cycle * int(self._per_cycle[source]) + int(self._turn[place])
        epoch, position = divmod(drawn, self.rows[source])
        return source, int(self._order(source, epoch)[position])


def validation_batches(sources: Sequence[SourceRows], batch_size: int) -> Iterator[Batch]:
    """All validation rows once, ``batch_size`` at a time, in one fixed order that mixes the sources.

    A prefix is a fair sample of the whole; the last batch may be smaller.
    """
    counts = np.array([source.count(source.validation) for source in sources])
    order, ends = shuffled(int(counts.sum()), "validation"), counts.cumsum()
    which = np.searchsorted(ends, order, side="right")
    rows = np.stack([which, order - (ends - counts)[which]], axis=1).tolist()
    for first in range(0, len(rows), batch_size):
        batch = [sources[s].row(sources[s].validation, row) for s, row in rows[first : first + batch_size]]
        yield collate(batch, sources[0].length)


def shuffled(n: int, key: str) -> NDArray[np.int64]:
    """A permutation of 0..n-1 that is a function of ``key``: indices sorted by a hash of themselves.

    Not numpy's generators, whose streams may change between versions: a resumed run must see the same rows.
    """
    salt = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
    x = np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(salt)
    # splitmix64's finaliser
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(x ^ (x >> np.uint64(31)), kind="stable")
