"""Prepared tokens, read in place from memory-mapped shards: any span, or many rows at once.

Shapes: R rows of W tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from titans_platform.data.shards import REPAIR, BoolArray, Integers, Manifest, ShardInfo, SplitInfo
from titans_platform.data.store import ShardSource
from titans_platform.errors import UsageError

MANY_SHARDS = 16
"""A split of more shards is cut into rows shard by shard, so that a row never spans two shards."""
LONG_ROW = 1 / 64
"""Rows longer than this fraction of a shard may span shards, whatever their number: cutting shard by shard
would drop too much at the end of each."""
OPEN_SHARDS = 16
"""Minimum size of the LRU cache of mapped shards of a split; larger if more places are read at once."""


class Span(NamedTuple):
    """Consecutive tokens; all arrays have the same shape."""

    tokens: NDArray[np.integer]
    starts: BoolArray
    loss: BoolArray


def read_table(files: ShardSource, info: ShardInfo) -> pa.RecordBatch:
    """Memory-map the record batch of an Arrow file. Raises UsageError if rows are missing."""
    try:
        batch = pa.ipc.open_file(pa.py_buffer(files.open(info))).get_record_batch(0)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UsageError(f"{files}/{info.file}: cannot be read as an Arrow file; {REPAIR}") from error
    if batch.num_rows != info.rows:
        what = f"holds {batch.num_rows} rows where the manifest says {info.rows}"
        raise UsageError(f"{files}/{info.file}: {what}; {REPAIR}")
    return batch


class Shard:
    """One mapped shard."""

    def __init__(self, batch: pa.RecordBatch):
        self.tokens = batch.column("token").to_numpy(zero_copy_only=True)
        # the file stores flags as a bitmap
        self.starts, self.loss = (
            np.frombuffer(batch.column(name).buffers()[1], np.uint8) for name in ("start", "loss")
        )

    def span(self, first: int, last: int) -> Span:
        """Tokens ``first`` to ``last``, exclusive."""
        flags = (_bits(column, np.array([first]), last - first)[0] for column in (self.starts, self.loss))
        return Span(self.tokens[first:last], *flags)

    def rows(self, firsts: Integers, width: int) -> Span:
        """[R, W]: the spans of ``width`` tokens that start at ``firsts``."""
        tokens = sliding_window_view(self.tokens, width)[firsts]
        return Span(tokens, _bits(self.starts, firsts, width), _bits(self.loss, firsts, width))


def _bits(column: NDArray[np.uint8], firsts: Integers, width: int) -> BoolArray:
    """[R, W] bits of a column, each row starting at one of ``firsts``."""
    held = min((width + 14) // 8, len(column))
    # the end of the file may be shorter than a row
    byte = np.minimum(firsts >> 3, len(column) - held)
    bits = np.unpackbits(sliding_window_view(column, held)[byte], axis=1, bitorder="little")
    skip = firsts - 8 * byte
    if (skip == skip[0]).all():
        return bits[:, skip[0] : skip[0] + width].view(np.bool_)
    found = np.empty((len(firsts), width), np.bool_)
    for n in np.unique(skip).tolist():
        found[skip == n] = bits[skip == n, n : n + width]
    return found


def _copy(found: Span, out: Span, rows: Integers) -> None:
    out.tokens[rows], out.starts[rows], out.loss[rows] = found


class Split:
    """The tokens of one split as one sequence, read in place from its shards."""

    def __init__(self, files: ShardSource, info: SplitInfo):
        self.files, self.info = files, info
        self.held = np.array([shard.rows for shard in info.shards], np.int64)
        self.begins = np.cumsum(self.held) - self.held
        """Offset of each shard in the sequence."""
        self.max_open = OPEN_SHARDS
        self._open: OrderedDict[int, Shard] = OrderedDict()

    def read(self, start: int, stop: int) -> Span:
        """Tokens ``start`` to ``stop`` (exclusive) of the split; a view if they lie in one shard."""
        first, last = self.shard_of(np.array([start, stop - 1])).tolist()
        parts = []
        for number in range(first, last + 1):
            begin = int(self.begins[number])
            end = min(stop - begin, int(self.held[number]))
            parts.append(self.shard(number).span(max(start - begin, 0), end))
        return parts[0] if len(parts) == 1 else Span(*map(np.concatenate, zip(*parts, strict=True)))

    def gather(self, firsts: Integers, into: Integers, out: Span) -> None:
        """Copy the spans that start at ``firsts`` into the rows ``into`` of ``out``, full width."""
        width = out.tokens.shape[1]
        shards = self.shard_of(firsts)
        inside = firsts - self.begins[shards]
        crossing = inside + width > self.held[shards]
        for number in np.unique(shards[~crossing]).tolist():
            mine = np.flatnonzero((shards == number) & ~crossing)
            found = self.shard(number).rows(inside[mine], width)
            _copy(found, out, into[mine])
        for i in np.flatnonzero(crossing).tolist():
            _copy(self.read(int(firsts[i]), int(firsts[i]) + width), out, into[i])

    def shard_of(self, tokens: Integers) -> Integers:
        """The shard that contains each position of the sequence."""
        return np.searchsorted(self.begins, tokens, side="right") - 1

    def shard(self, number: int) -> Shard:
        """A shard, mapped."""
        if number not in self._open:
            self._open[number] = Shard(read_table(self.files, self.info.shards[number]))
            if len(self._open) > self.max_open:
                self._open.popitem(last=False)
        self._open.move_to_end(number)
        return self._open[number]

    def prefetch(self, shards: Sequence[int]) -> None:
        """Fetch these shards in the background: they are needed next."""
        self.files.prefetch([self.info.shards[number] for number in shards])


class SplitRows(Split):
    """The training or validation rows of a source.

    Text is cut into rows of T+1 tokens with stride T; a task item is a row of T tokens. A split of many
    shards is cut shard by shard, and the remainder of each is dropped.
    """

    def __init__(self, files: ShardSource, info: SplitInfo, length: int, items: bool):
        super().__init__(files, info)
        self.length, self.width = length, length + (not items)
        held, largest = self.held, int(self.held.max(initial=0))
        self.by_shard = len(held) > MANY_SHARDS and self.width <= largest * LONG_ROW
        if self.by_shard:
            self.counts = np.maximum(held - (self.width - length), 0) // length
        else:
            # rows that start in each shard
            total = max(0, int(held.sum()) - (self.width - length)) // length
            self.counts = np.diff(np.minimum(-(-np.append(self.begins, held.sum()) // length), total))
        self._ends = np.cumsum(self.counts)

    def __len__(self) -> int:
        return int(self.counts.sum())

    def first_tokens(self, rows: Integers) -> Integers:
        """Offset of each row in the split."""
        if not self.by_shard:
            return rows * self.length
        shard = np.searchsorted(self._ends, rows, side="right")
        return self.begins[shard] + (rows - self._ends[shard] + self.counts[shard]) * self.length


class SourceRows:
    """The rows of one prepared source."""

    def __init__(
        self,
        files: ShardSource,
        manifest: Manifest,
        sequence_length: int,
        pad: int,
        weight: float,
        borders: bool = True,
    ):
        self.files, self.manifest, self.weight = files, manifest, weight
        self.length, self.pad, self.borders = sequence_length, pad, borders
        self.items = manifest.item_tokens is not None
        self.train, self.validation = (
            SplitRows(files, info, sequence_length, self.items)
            for info in (manifest.train, manifest.validation)
        )

    def fill(self, rows: SplitRows, numbers: Integers, into: Integers, out: Span) -> None:
        """Copy rows of a split, by number, into the rows ``into`` of ``out``, [R, T+1] each.

        The padding after a task item has no loss.
        """
        firsts = rows.first_tokens(numbers)
        if not self.items:
            rows.gather(firsts, into, out)
            if not self.borders:
                out.starts[into] = False
            return
        tokens, starts, loss = out
        items = Span(tokens[:, : self.length], starts[:, : self.length], loss[:, : self.length])
        rows.gather(firsts, into, items)
        out.tokens[into, self.length] = self.pad
        out.starts[into, self.length] = out.loss[into, self.length] = False
