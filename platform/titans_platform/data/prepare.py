"""Sources to shards on disk, each once, and prepared data opened for reading.

Under the storage root, in `data/`: a folder for each source, tokenizer and version; `index/` with which
folders a DataConfig means (so that opening needs neither the sources nor the tokenizer's file);
`tokenizers/` with copies.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from titans_platform.config import DataConfig, digest
from titans_platform.data.encode import Encoded, encode_documents, generate_items, task_identity
from titans_platform.data.reading import Folder, SourceRows, read_table
from titans_platform.data.shards import (
    MANIFEST,
    REPAIR,
    SCHEMA,
    Manifest,
    SplitWriter,
    read_manifest,
    write_manifest,
    write_table,
)
from titans_platform.data.sources import open_source
from titans_platform.data.stream import Batch, RowStream, validation_batches
from titans_platform.data.tokenizer import Tokenizer, load_tokenizer
from titans_platform.errors import UsageError
from titans_platform.files import write_bytes, write_json

Progress = Callable[[str, int, int, "float | None"], None]
"""Called with a source's label, documents and tokens so far, and the share done where it is known."""


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
        for i, source in enumerate(sources):
            if source.weight and not len(source.train):
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
                column = read_table(source.place.local(info), info.rows).column("hash")
                parts.append(column.to_numpy(zero_copy_only=True))
        return ItemHashes(np.concatenate(parts))

    def train_stream(self, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> RowStream:
        """Training batches of ``batch_size`` rows over all workers. Raises UsageError."""
        return RowStream(self.sources, batch_size, seed, rank, world_size)

    def validation(self, batch_size: int) -> Iterator[Batch]:
        """All validation rows once in a fixed order. Raises UsageError where there are none."""
        if not any(len(source.validation) for source in self.sources):
            have = sum(source.manifest.validation.tokens for source in self.sources)
            raise UsageError(
                f"data.sources: {have} validation tokens make no row of {self.config.sequence_length} + 1; "
                "raise a text source's validation_fraction or documents, or lower data.sequence_length"
            )
        return validation_batches(self.sources, batch_size)


def prepare(
    data: DataConfig, root: Path, *, progress: Progress | None = None, repair: bool = False
) -> PreparedData:
    """Tokenise under the storage root what is not tokenised yet and open it all; a second call only opens.

    ``repair`` makes damaged shards anew; without it they raise. Processes may prepare the same data at
    once: one works, the others wait. Raises UsageError.
    """
    store = Path(root) / "data"
    tokenizer = load_tokenizer(data.tokenizer)
    try:
        (store / "index").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--root: {store} cannot be written ({error.strerror}); give another") from error
    folders = [_prepare_source(data, i, tokenizer, store, progress, repair) for i in range(len(data.sources))]
    kept = _keep_tokenizer(tokenizer, store)
    write_json(_index_file(data, store), {"sources": folders, "tokenizer": kept})
    return _open_folders(data, store, kept, folders)


def _keep_tokenizer(tokenizer: Tokenizer, store: Path) -> str:
    """Copy the tokenizer's file under the store: workers on other machines may not see the original."""
    if tokenizer.path is None:
        return tokenizer.fingerprint
    kept = store / "tokenizers" / f"{tokenizer.fingerprint}{tokenizer.path.suffix}"
    if not kept.exists():
        write_bytes(kept, tokenizer.path.read_bytes())
    return kept.name


def _prepare_source(
    data: DataConfig, i: int, tokenizer: Tokenizer, store: Path, progress: Progress | None, repair: bool
) -> str:
    """Make the folder of source ``i`` unless it is there and whole; its name.

    The name is a hash of all that decides what the folder holds; running text is cut into rows only when
    read.
    """
    config, field = data.sources[i], f"data.sources.{i}"
    text = None if config.kind == "task" else open_source(config, field, store / "huggingface")
    item_tokens = data.sequence_length if text is None else None
    identity = {
        "schema": SCHEMA,
        "source": config.model_dump(mode="json", exclude={"weight"}),
        "found": task_identity(config) if text is None else text.identity(),
        "tokenizer": tokenizer.fingerprint,
        "length": item_tokens,
        "seed": data.seed,
    }
    folder = store / digest(identity)
    if _whole(folder, repair):
        return folder.name
    with FileLock(store / "index" / f"{folder.name}.lock"):
        if not _whole(folder, repair):
            if text is None:
                encoded = generate_items(config, tokenizer, data, field)
            else:
                encoded = encode_documents(text, tokenizer, config, data.seed)
            label = text.label if text else "task:" + "+".join(task.task for task in config.tasks)
            with _replacing(folder) as partial:
                written = _write(partial, encoded, tokenizer.vocab_size, label, progress)
                if not written.train.documents + written.validation.documents:
                    raise UsageError(f"{field}: {label} is empty; give a source that holds text")
                origin = {"python": text.python if text else None, "item_tokens": item_tokens}
                write_manifest(partial, written.model_copy(update=origin))
    return folder.name


def _whole(folder: Path, repair: bool) -> bool:
    """Whether the folder is complete. Raises UsageError where it is damaged and ``repair`` is off."""
    if not (folder / MANIFEST).exists():
        return False
    try:
        read_manifest(folder)
    except UsageError:
        if not repair:
            raise
        return False
    return True


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A new folder beside ``folder`` that takes its place at the end; the caller holds the lock."""
    partial = folder.with_name(f"{folder.name}.partial")
    # left by a process that died
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(
    folder: Path, encoded: Iterator[Encoded], vocab_size: int, label: str, progress: Progress | None
) -> Manifest:
    """Write the shards of both splits and the hashes of the items; what was written."""
    train, validation = (SplitWriter(folder, split, vocab_size) for split in ("train", "validation"))
    hashes: list[int] = []
    for one in encoded:
        (validation if one.validation else train).add(one.tokens, one.loss)
        if one.item is not None:
            hashes.append(int(one.item, 16))
        if progress:
            documents = train.documents + validation.documents
            progress(label, documents, train.tokens + validation.tokens, one.done)
    items = {"hash": np.unique(np.array(hashes, np.uint64))}
    return Manifest(
        schema_version=SCHEMA,
        label=label,
        # closed first: what is left is hashed when it is written
        train=train.close(),
        validation=validation.close(),
        content=digest([train.content.hexdigest(), validation.content.hexdigest()], 16),
        items=write_table(folder / "items.arrow", items) if hashes else None,
    )


def open_prepared(data: DataConfig, root: Path, *, verify: bool = False) -> PreparedData:
    """Data that `prepare` made, neither sources nor tokenizer needed. Raises UsageError.

    ``verify`` hashes every shard, also those whose time of writing is the manifest's.
    """
    store = Path(root) / "data"
    path = _index_file(data, store)
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        kept, folders = str(index["tokenizer"]), [str(name) for name in index["sources"]]
    except (FileNotFoundError, NotADirectoryError):
        raise NotPrepared(f"data: not prepared under {root}; run titans data prepare") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: cannot be read; {REPAIR}") from error
    return _open_folders(data, store, kept, folders, verify)


def _open_folders(
    data: DataConfig, store: Path, kept: str, folders: list[str], verify: bool = False
) -> PreparedData:
    tokenizer = load_tokenizer("byte" if kept == "byte" else str(store / "tokenizers" / kept))
    sources = []
    for name, source in zip(folders, data.sources, strict=True):
        manifest = read_manifest(store / name, verify)
        place = Folder(store / name)
        sources.append(SourceRows(place, manifest, data.sequence_length, tokenizer.pad, source.weight))
    return PreparedData(data, tokenizer, sources)


def _index_file(data: DataConfig, store: Path) -> Path:
    sources = [source.model_dump(mode="json", exclude={"weight"}) for source in data.sources]
    identity: dict[str, Any] = data.model_dump(mode="json") | {"sources": sources, "schema": SCHEMA}
    if any(source.kind == "stdlib" for source in data.sources):
        identity["python"] = platform.python_version()
    return store / "index" / f"{digest(identity)}.json"
