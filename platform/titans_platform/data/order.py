"""The order of training rows: a stateless shuffle, a function of a key and a position."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

WINDOW = 8
"""Shards shuffled together in a source that is too large to shuffle as a whole."""


class Window(NamedTuple):
    """Rows shuffled together in an epoch: those of ``shards``, starting at position ``first``."""

    shards: tuple[int, ...]
    first: int
    rows: int


class SourceOrder:
    """The shuffled order of a source's rows in each epoch.

    With few shards all rows are shuffled. With ``windowed`` the shards are shuffled, then the rows within
    windows of WINDOW shards, so that only WINDOW shards are read at once.

    ``counts`` are the rows of each shard, in order of their numbers; ``key`` names seed and source.
    """

    def __init__(self, counts: Integers, key: str, windowed: bool):
        self.rows = int(counts.sum())
        self._counts, self._key, self._windowed = counts, key, windowed
        self._first_row = np.cumsum(counts) - counts
        # a batch may span two windows, and two epochs
        self.windows = lru_cache(maxsize=2)(self._windows)
        self._rows_of = lru_cache(maxsize=2)(self._shuffled_rows)

    def at(self, drawn: Integers) -> Integers:
        """Row numbers of the samples ``drawn``, numbered from the start of the first epoch."""
        found = np.empty_like(drawn)
        epochs = drawn // self.rows
        for epoch in np.unique(epochs).tolist():
            there = epochs == epoch
            positions = drawn[there] - epoch * self.rows
            rows = np.empty_like(positions)
            which = self.window_of(epoch, positions)
            for w in np.unique(which).tolist():
                inside = which == w
                first = self.windows(epoch)[w].first
                rows[inside] = self._rows_of(epoch, w)[positions[inside] - first]
            found[there] = rows
        return found

    def window_of(self, epoch: int, positions: Integers) -> Integers:
        """The window of each position of an epoch."""
        return np.searchsorted([w.first for w in self.windows(epoch)], positions, side="right") - 1

    def window_at(self, drawn: int) -> tuple[int, int]:
        """The epoch and the window of a sample."""
        epoch, position = divmod(drawn, self.rows)
        return epoch, int(self.window_of(epoch, np.array([position]))[0])

    def next_window(self, epoch: int, number: int) -> tuple[int, int]:
        """The next window."""
        return (epoch, number + 1) if number + 1 < len(self.windows(epoch)) else (epoch + 1, 0)

    def shards(self, epoch: int, number: int) -> tuple[int, ...]:
        """The shards of a window."""
        return self.windows(epoch)[number].shards

    def _windows(self, epoch: int) -> list[Window]:
        held = np.flatnonzero(self._counts)
        if not self._windowed:
            return [Window(tuple(held.tolist()), 0, self.rows)]
        held = held[shuffled(len(held), f"{self._key}/{epoch}/shards")]
        windows, first = [], 0
        for i in range(0, len(held), WINDOW):
            shards = held[i : i + WINDOW]
            rows = int(self._counts[shards].sum())
            windows.append(Window(tuple(shards.tolist()), first, rows))
            first += rows
        return windows

    def _shuffled_rows(self, epoch: int, number: int) -> Integers:
        """The rows of a window, shuffled."""
        window = self.windows(epoch)[number]
        if not self._windowed:
            return shuffled(window.rows, f"{self._key}/{epoch}")
        rows = [np.arange(self._counts[s]) + self._first_row[s] for s in window.shards]
        return np.concatenate(rows)[shuffled(window.rows, f"{self._key}/{epoch}/{number}")]


def spread(weights_cycle: Sequence[int], sources: int) -> tuple[Integers, Integers, Integers]:
    """A cycle of sources as arrays: source and turn at each place, and turns per source in a cycle."""
    cycle = np.array(weights_cycle)
    taken = np.cumsum(cycle[:, None] == np.arange(sources), axis=0)
    return cycle, taken[np.arange(len(cycle)), cycle] - 1, taken[-1]


def shuffled(n: int, key: str) -> Integers:
    """A permutation of 0..n-1 that is a function of ``key``: indices sorted by a hash of themselves.

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
