"""Token shards on disk: Arrow IPC files with one record batch each, memory-mapped and read in place.

Three columns: token (uint16, or uint32 for large vocabularies), start (a document starts here) and loss
(predicting this token counts). Every shard of a split but the last holds the same number of tokens.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, JsonValue

from titans_core.config import Frozen
from titans_platform.config import digest
from titans_platform.errors import UsageError
from titans_platform.files import write_bytes, write_error

SCHEMA = 1
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
    python: str | None = None
    """stdlib: the version of Python."""
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
    def files(self) -> tuple[ShardInfo, ...]:
        """All files of the source except the manifest."""
        items = () if self.items is None else (self.items,)
        return self.train.shards + self.validation.shards + items


class SplitWriter:
    """Buffers documents and writes a shard when it is full; holds one shard in memory."""

    def __init__(self, folder: Path, split: str, vocab_size: int, shard_tokens: int | None = None):
        dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
        self.folder, self.split = folder, split
        self.shard_tokens = shard_tokens or SHARD_BYTES // np.dtype(dtype).itemsize
        self.content = hashlib.sha256()
        self.documents = self.tokens = 0
        self._shards: list[ShardInfo] = []
        self._filled = 0
        flags = (np.empty(self.shard_tokens, np.bool_) for _ in range(2))
        self._buffer = (np.empty(self.shard_tokens, dtype), *flags)

    def add(self, tokens: NDArray[np.integer], loss: BoolArray) -> None:
        """Append one document: its ids, bos first, and which of them count as targets."""
        starts = np.zeros(len(tokens), np.bool_)
        starts[:1] = True
        done = 0
        while done < len(tokens):
            n = min(len(tokens) - done, self.shard_tokens - self._filled)
            for buffer, values in zip(self._buffer, (tokens, starts, loss), strict=True):
                buffer[self._filled : self._filled + n] = values[done : done + n]
            done, self._filled = done + n, self._filled + n
            if self._filled == self.shard_tokens:
                self._flush()
        self.documents += 1
        self.tokens += len(tokens)

    def close(self) -> SplitInfo:
        """Flush the last shard. Returns the split's entry for the manifest."""
        if self._filled:
            self._flush()
        held = {"documents": self.documents, "tokens": self.tokens, "shard_tokens": self.shard_tokens}
        return SplitInfo(**held, shards=tuple(self._shards))

    def _flush(self) -> None:
        tokens, starts, loss = (values[: self._filled] for values in self._buffer)
        name = f"{self.split}-{len(self._shards):05d}.arrow"
        columns = {"token": tokens, "start": starts, "loss": loss}
        self._shards.append(write_table(self.folder / name, columns))
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


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest together with its digest."""
    write_bytes(folder / MANIFEST, signed(manifest))


def signed(manifest: Manifest) -> bytes:
    """Serialise a manifest to JSON with its own digest."""
    fields = manifest.model_dump(mode="json")
    return (json.dumps(fields | {"digest": digest(fields)}, indent=2, sort_keys=True) + "\n").encode()


def parse_manifest(content: bytes, where: str) -> Manifest:
    """Parse a manifest file. Raises UsageError that names the file."""
    try:
        fields = json.loads(content)
        if fields.pop("digest") != digest(fields):
            raise ValueError("digest")
        fields.pop("left_out", None)  # always empty in manifests of earlier versions
        return Manifest.model_validate_json(json.dumps(fields))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{where}: is not a manifest or was changed; {REPAIR}") from error


def find_damage(path: Path, info: ShardInfo, verify: bool) -> str | None:
    """Find corruption of a file. Returns a message that names the file, or None if it is intact.

    The size is always compared; the hash only if the mtime differs from the manifest, or with ``verify``:
    hashing a whole corpus at every start would take minutes.
    """
    try:
        stat = path.stat()
    except OSError:
        return f"{path}: missing shard"
    if stat.st_size != info.bytes:
        return f"{path}: truncated shard, {stat.st_size} bytes of {info.bytes}"
    touched = verify or stat.st_mtime_ns != info.mtime_ns
    if touched and _file_sha256(path) != info.sha256:
        return f"{path}: corrupted shard, its hash is not the manifest's"
    return None


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
