"""Token shards on disk: Arrow IPC files with one record batch each, memory-mapped and read in place.

Three columns: token (uint16, or uint32 for large vocabularies), start (a document starts here) and loss
(predicting this token counts). Every shard of a split but the last holds the same number of tokens. Any span
is read, or many rows at once.

Shapes: R rows of W tokens.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, JsonValue

from titans_core.config import Frozen
from titans_platform.config import digest
from titans_platform.errors import UsageError
from titans_platform.files import write_error

SCHEMA = 3
SHARD_BYTES = 64 * 2**20
HASHED_TOKENS = 2**20
MANIFEST = "manifest.json"
REPAIR = "delete its folder or run titans data prepare again"
BoolArray = NDArray[np.bool_]
Integers = NDArray[np.int64]


class ShardInfo(Frozen):
    """One file of a prepared source, with its checksum."""

    file: str
    rows: int
    bytes: int
    sha256: str
    mtime_ns: int
    """Modification time; a file whose mtime differs is hashed again when it is opened."""


class SplitInfo(Frozen):
    """The training or the validation part of a source."""

    documents: int = 0
    tokens: int = 0
    shard_tokens: int
    shards: tuple[ShardInfo, ...] = ()


class Manifest(Frozen):
    """Describes a prepared source; written last, so that a folder with a manifest is complete."""

    schema_version: int
    label: str
    content: str
    """Hash of all tokens, starts and loss masks, of both splits."""
    item_tokens: int | None = None
    """Tokens per row if each row is one task item; None for text."""
    train: SplitInfo
    validation: SplitInfo
    items: ShardInfo | None = None
    """Sorted hashes of the task items."""
    source: dict[str, JsonValue] = Field(default_factory=dict)
    """The source's fields in the config, for information only; the source may have changed since."""
    revision: str | None = None
    """The commit of a Hub dataset."""
    tokenizer: str | None = None
    """The tokenizer's fingerprint."""

    @property
    def documents(self) -> int:
        """Documents of both splits."""
        return self.train.documents + self.validation.documents

    @property
    def tokens(self) -> int:
        """Tokens of both splits."""
        return self.train.tokens + self.validation.tokens

    @property
    def files(self) -> tuple[ShardInfo, ...]:
        """All files of the source except the manifest."""
        return (*self.train.shards, *self.validation.shards, *filter(None, [self.items]))


class SplitWriter:
    """Buffers documents and writes a shard when it is full; holds one shard in memory."""

    def __init__(self, folder: Path, split: str, vocab_size: int, shard_tokens: int | None = None):
        dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
        self.folder, self.split = folder, split
        self.shard_tokens = shard_tokens or SHARD_BYTES // np.dtype(dtype).itemsize
        self.content = hashlib.sha256()
        self.documents = self.tokens = self._filled = 0
        self._shards: list[ShardInfo] = []
        self._buffer = tuple(np.empty(self.shard_tokens, kind) for kind in (dtype, np.bool_, np.bool_))

    def add(self, tokens: NDArray[np.integer], loss: BoolArray, first: bool = True) -> None:
        """Append one document: its ids, bos first, and which of them count as targets."""
        starts, offset = (np.arange(len(tokens)) == 0) & first, 0
        while offset < len(tokens):
            n = min(len(tokens) - offset, self.shard_tokens - self._filled)
            for buffer, values in zip(self._buffer, (tokens, starts, loss), strict=True):
                buffer[self._filled : self._filled + n] = values[offset : offset + n]
            offset, self._filled = offset + n, self._filled + n
            if self._filled == self.shard_tokens:
                self._flush()
        self.documents += first
        self.tokens += len(tokens)

    def close(self) -> SplitInfo:
        """Flush the last shard. Returns the split's entry for the manifest."""
        if self._filled:
            self._flush()
        totals = {"documents": self.documents, "tokens": self.tokens, "shard_tokens": self.shard_tokens}
        return SplitInfo(**totals, shards=tuple(self._shards))

    def _flush(self) -> None:
        tokens, starts, loss = (values[: self._filled] for values in self._buffer)
        name = f"{self.split}-{len(self._shards):05d}.arrow"
        self._shards.append(write_table(self.folder / name, {"token": tokens, "start": starts, "loss": loss}))
        # as 32-bit little-endian, so that the hash is independent of byte order and of the width on disk
        for first in range(0, len(tokens), HASHED_TOKENS):
            self.content.update(tokens[first : first + HASHED_TOKENS].astype("<u4").tobytes())
        self.content.update(np.packbits(starts).tobytes() + np.packbits(loss).tobytes())
        self._filled = 0


def write_table(path: Path, columns: dict[str, NDArray]) -> ShardInfo:
    """Write ``columns`` as one record batch. Returns the file's entry for the manifest.

    Raises TitansError that names the file if it cannot be written.
    """
    batch = pa.record_batch({name: pa.array(values) for name, values in columns.items()})
    try:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
    except OSError as error:
        raise write_error(path, error) from error
    size, mtime_ns = path.stat().st_size, path.stat().st_mtime_ns
    rows, sha256 = batch.num_rows, _file_sha256(path)
    return ShardInfo(file=path.name, rows=rows, bytes=size, sha256=sha256, mtime_ns=mtime_ns)


def signed(manifest: Manifest) -> bytes:
    """Serialise a manifest to JSON with its own digest."""
    fields = manifest.model_dump(mode="json")
    return (json.dumps(fields | {"digest": digest(fields)}, indent=2, sort_keys=True) + "\n").encode()


def read_manifest(folder: Path, verify: bool = False) -> Manifest:
    """Read the manifest of a source and check its files.

    Sizes are always compared, hashes of files whose mtime differs; with ``verify`` the hashes of all: hashing
    a whole corpus at every start would take minutes. Raises FileNotFoundError; UsageError that names the
    first corrupt file.
    """
    content = (path := folder / MANIFEST).read_bytes()
    try:
        fields = json.loads(content)
        if fields.pop("digest") != digest(fields):
            raise ValueError("digest")
        manifest = Manifest.model_validate_json(json.dumps(fields))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: is not a manifest or was changed; {REPAIR}") from error
    for info in manifest.files:
        problem, path = "", folder / info.file
        if not path.exists():
            problem = "missing shard"
        elif (size := path.stat().st_size) != info.bytes:
            problem = f"truncated shard, {size} bytes of {info.bytes}"
        elif (verify or path.stat().st_mtime_ns != info.mtime_ns) and _file_sha256(path) != info.sha256:
            problem = "corrupted shard, its hash is not the manifest's"
        if problem:
            raise UsageError(f"{path}: {problem}; {REPAIR}")
    return manifest


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


OPEN_SHARDS = 64
"""Minimum size of the LRU cache of mapped shards of a split; larger if more places are read at once."""
MOST_OPEN = 256
"""Its maximum for streams that take turns: each mapped shard is an open file."""


class TokenSpan(NamedTuple):
    """Consecutive tokens; all arrays have the same shape."""

    tokens: NDArray[np.integer]
    starts: BoolArray
    loss: BoolArray


def read_table(folder: Path, info: ShardInfo) -> pa.RecordBatch:
    """Memory-map the record batch of an Arrow file. Raises UsageError if rows are missing."""
    path = folder / info.file
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        batch = pa.ipc.open_file(pa.py_buffer(mapped)).get_record_batch(0)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UsageError(f"{path}: cannot be read as an Arrow file; {REPAIR}") from error
    if batch.num_rows != info.rows:
        cause = f"holds {batch.num_rows} rows where the manifest says {info.rows}"
        raise UsageError(f"{path}: {cause}; {REPAIR}")
    return batch


class Shard:
    """One mapped shard."""

    def __init__(self, batch: pa.RecordBatch):
        self.tokens = batch.column("token").to_numpy(zero_copy_only=True)
        # the file stores flags as a bitmap
        bitmaps = (batch.column(name).buffers()[1] for name in ("start", "loss"))
        self.starts, self.loss = (np.frombuffer(bitmap, np.uint8) for bitmap in bitmaps)

    def span(self, first: int, last: int) -> TokenSpan:
        """Tokens ``first`` to ``last``, exclusive."""
        return TokenSpan(self.tokens[first:last], *(_bits(x, first, last) for x in (self.starts, self.loss)))


def _bits(column: NDArray[np.uint8], first: int, last: int) -> BoolArray:
    bits = np.unpackbits(column[first // 8 : -(-last // 8)], bitorder="little")
    return bits[first % 8 : first % 8 + last - first].view(np.bool_)


class Split:
    """The tokens of one split as one sequence, read in place from its shards, and its rows.

    Text is cut into rows of T+1 tokens with stride T, the ``length``; a task item is a row of T tokens.
    """

    def __init__(self, files: Path, info: SplitInfo, length: int = 1, items: bool = False):
        self.files, self.info = files, info
        self.length, self.width = length, length + (not items)
        self.held = np.array([shard.rows for shard in info.shards], np.int64)
        self.begins = np.cumsum(self.held) - self.held
        """Offset of each shard in the sequence."""
        self.keep_open(OPEN_SHARDS)

    def keep_open(self, shards: int) -> None:
        """Keep up to ``shards`` shards mapped, the most recently used ones."""
        self.shard = lru_cache(shards)(lambda number: Shard(read_table(self.files, self.info.shards[number])))

    def read(self, start: int, stop: int) -> TokenSpan:
        """Tokens ``start`` to ``stop`` (exclusive) of the split; a view if they lie in one shard."""
        first, last = (np.searchsorted(self.begins, [start, stop - 1], side="right") - 1).tolist()
        parts = []
        for number in range(first, last + 1):
            begin = int(self.begins[number])
            end = min(stop - begin, int(self.held[number]))
            parts.append(self.shard(number).span(max(start - begin, 0), end))
        return parts[0] if len(parts) == 1 else TokenSpan(*map(np.concatenate, zip(*parts, strict=True)))

    def __len__(self) -> int:
        return max(0, int(self.held.sum()) - (self.width - self.length)) // self.length

    def row(self, number: int) -> TokenSpan:
        """Read one row."""
        return self.read(number * self.length, number * self.length + self.width)


class SourceRows:
    """The rows of one prepared source."""

    def __init__(self, files: Path, manifest: Manifest, length: int, pad: int, weight: float, borders: bool):
        self.files, self.manifest, self.weight = files, manifest, weight
        self.length, self.pad, self.borders = length, pad, borders
        self.items = manifest.item_tokens is not None
        self.train = Split(files, manifest.train, length, self.items)
        self.validation = Split(files, manifest.validation, length, self.items)
