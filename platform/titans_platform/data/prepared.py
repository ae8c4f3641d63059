"""Prepared data, opened for reading: training batches, validation batches, what to name them by."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titans_platform.config import DataConfig, digest
from titans_platform.data.shards import REPAIR, SCHEMA, read_manifest, read_table
from titans_platform.data.stream import Batch, RowStream, SourceRows, ValidationRows
from titans_platform.data.tokenizer import Tokenizer, load_tokenizer
from titans_platform.errors import UsageError


class NotPrepared(UsageError):
    """The data have not been prepared yet; they are not damaged."""


class ItemHashes:
    """Hashes of the task items in training, 16 hex digits each, as a set that takes eight bytes an item."""

    def __init__(self, hashes: NDArray[np.uint64]):
        self._sorted = np.unique(hashes)

    def __contains__(self, item: str) -> bool:
        value = np.uint64(int(item, 16))
        at = int(np.searchsorted(self._sorted, value))
        return at < len(self._sorted) and self._sorted[at] == value

    def __iter__(self) -> Iterator[str]:
        return (f"{value:016x}" for value in self._sorted.tolist())

    def __len__(self) -> int:
        return len(self._sorted)


class PreparedData:
    """Tokenised sources, open for reading."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, sources: list[SourceRows]):
        self.config, self.tokenizer, self.sources = config, tokenizer, sources
        self._validation = ValidationRows(sources)
        for i, source in enumerate(sources):
            if source.weight and not source.count(source.train):
                raise UsageError(
                    f"data.sources.{i}: {source.manifest.train.tokens} training tokens make no row of "
                    f"{config.sequence_length} + 1; lower data.sequence_length or give it more text"
                )

    @property
    def fingerprint(self) -> str:
        """Names all that decides what is read, none of it a path: content, tokenizer, shares, row length.

        With the standard library among the sources it begins with the Python version.
        """
        parts = [[s.manifest.content, s.manifest.python, s.weight] for s in self.sources]
        python = next((s.manifest.python for s in self.sources if s.manifest.python), None)
        name = digest([parts, self.tokenizer.fingerprint, self.config.sequence_length])
        return f"py{python}-{name}" if python else name

    @cached_property
    def tokens(self) -> dict[str, int]:
        """Training tokens of each source, by its label."""
        return {label: s.manifest.train.tokens for label, s in zip(self.labels, self.sources, strict=True)}

    @cached_property
    def labels(self) -> list[str]:
        """A name for each source, each once."""
        names = [source.manifest.label for source in self.sources]
        return [f"{n}#{i}" if names.count(n) > 1 else n for i, n in enumerate(names)]

    @cached_property
    def item_hashes(self) -> ItemHashes:
        """Hashes of the task items that training rows are made of."""
        parts = [np.empty(0, np.uint64)]
        for source in self.sources:
            if (info := source.manifest.items) is not None:
                column = read_table(source.folder / info.file, info.rows).column("hash")
                parts.append(column.to_numpy(zero_copy_only=True))
        return ItemHashes(np.concatenate(parts))

    def train_stream(self, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> RowStream:
        """Training batches of ``batch_size`` rows over all workers. Raises UsageError."""
        return RowStream(self.sources, batch_size, seed, rank, world_size)

    def validation_rows(self) -> int:
        """Number of validation rows."""
        return len(self._validation)

    def validation(self, batch_size: int) -> Iterator[Batch]:
        """All validation rows once in a fixed order. Raises UsageError where there are none."""
        if not len(self._validation):
            have = sum(source.manifest.validation.tokens for source in self.sources)
            raise UsageError(
                f"data.sources: {have} validation tokens make no row of {self.config.sequence_length} + 1; "
                "raise a text source's validation_fraction or documents, or lower data.sequence_length"
            )
        return self._validation.batches(batch_size)


def open_prepared(data: DataConfig, root: Path, *, verify: bool = False) -> PreparedData:
    """Data that `prepare` made, neither sources nor tokenizer needed. Raises UsageError.

    ``verify`` hashes every shard, also those whose time of writing is the manifest's.
    """
    store = store_of(root)
    path = index_file(data, store)
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        kept, folders = str(index["tokenizer"]), [str(name) for name in index["sources"]]
    except FileNotFoundError:
        raise NotPrepared(f"data: not prepared under {root}; run titans data prepare") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: cannot be read; {REPAIR}") from error
    return open_folders(data, store, kept, folders, verify)


def store_of(root: Path) -> Path:
    """The folder of prepared data under a storage root."""
    return Path(root) / "data"


def open_folders(
    data: DataConfig, store: Path, kept: str, folders: list[str], verify: bool = False
) -> PreparedData:
    """The prepared ``folders`` under ``store``, one for each source, with the ``kept`` tokenizer."""
    tokenizer = load_tokenizer("byte" if kept == "byte" else str(store / "tokenizers" / kept))
    sources = []
    for name, source in zip(folders, data.sources, strict=True):
        manifest = read_manifest(store / name, verify)
        sources.append(SourceRows(store / name, manifest, data.sequence_length, tokenizer.pad, source.weight))
    return PreparedData(data, tokenizer, sources)


def index_file(data: DataConfig, store: Path) -> Path:
    """Where `prepare` notes which folders ``data`` means."""
    sources = [source.model_dump(mode="json", exclude={"weight"}) for source in data.sources]
    identity: dict[str, Any] = data.model_dump(mode="json") | {"sources": sources, "schema": SCHEMA}
    if any(source.kind == "stdlib" for source in data.sources):
        identity["python"] = platform.python_version()
    return store / "index" / f"{digest(identity)}.json"
