"""Tokenise sources to shards, each once, and open prepared data.

Layout of `data/` under the storage root: a folder for each source, tokenizer and version; `index/`, which
maps a DataConfig, and the fingerprint of data, to folders (so that opening needs neither the sources nor the
tokenizer's file); `tokenizers/` with copies.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from titans_platform.config import DataConfig, RunConfig, digest
from titans_platform.data.encode import task_identity
from titans_platform.data.parts import (
    PartJob,
    PrepareProgress,
    Runner,
    default_runner,
    kept_tokenizer,
    make_source,
    text_source,
)
from titans_platform.data.shards import (
    MANIFEST,
    REPAIR,
    SCHEMA,
    SourceRows,
    read_manifest,
    read_table,
)
from titans_platform.data.stream import Batch, RowStream, Streams, validation_batches
from titans_platform.data.tokenizer import Tokenizer, load_tokenizer
from titans_platform.errors import UsageError
from titans_platform.files import file_lock, write_bytes, write_json

log = logging.getLogger(__name__)


class NotPrepared(UsageError):
    """The data have not been prepared yet; they are not damaged."""


class ItemHashes:
    """Set of the hashes of training task items (16 hex digits each), stored in 8 bytes per item."""

    def __init__(self, hashes: NDArray[np.uint64]):
        self.sorted = np.unique(hashes)

    def __contains__(self, item: str) -> bool:
        value = np.uint64(int(item, 16))
        at = int(np.searchsorted(self.sorted, value))
        return at < len(self.sorted) and self.sorted[at] == value


class PreparedData:
    """Tokenised sources, open for reading."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, sources: list[SourceRows]):
        self.config, self.tokenizer, self.sources = config, tokenizer, sources
        row = f"too few for a row of {config.sequence_length} + 1"
        for i, source in enumerate(sources):
            if source.weight and not len(source.train):
                cause = f"data.sources.{i}: {source.manifest.train.tokens} training tokens are {row}"
                raise UsageError(f"{cause}; lower data.sequence_length or give it more text")

    @property
    def fingerprint(self) -> str:
        """Hash of what determines the rows: content, tokenizer, weights, row length, packing; no paths."""
        # the second is always None: it stays, since the fingerprint is part of the names of runs
        parts = [[s.manifest.content, None, s.weight] for s in self.sources]
        changed = [v for v in (self.config.packing, self.config.rows) if v not in ("borders", "shuffled")]
        return digest([parts, self.tokenizer.fingerprint, self.config.sequence_length, *changed])

    @cached_property
    def labels(self) -> list[str]:
        """A unique name for each source."""
        names = [source.manifest.label for source in self.sources]
        return [f"{n}#{i}" if names.count(n) > 1 else n for i, n in enumerate(names)]

    @cached_property
    def item_hashes(self) -> ItemHashes:
        """Hashes of the task items in the training rows."""
        listed = [(source.files, info) for source in self.sources if (info := source.manifest.items)]
        parts = [read_table(*each).column("hash").to_numpy(zero_copy_only=True) for each in listed]
        return ItemHashes(np.concatenate([np.empty(0, np.uint64), *parts]))

    def train_stream(self, cfg: RunConfig, rank: int = 0, world_size: int = 1) -> RowStream | Streams:
        """Training batches: shuffled rows or continuous streams, as ``data.rows`` says. Raises UsageError."""
        stream = RowStream if cfg.data.rows == "shuffled" else Streams
        return stream(self.sources, cfg, rank, world_size)

    def validation(self, batch_size: int) -> Iterator[Batch]:
        """Yield all validation rows once, in a fixed order. Raises UsageError if there are none."""
        if not any(len(source.validation) for source in self.sources):
            available = sum(source.manifest.validation.tokens for source in self.sources)
            cause = f"{available} validation tokens, too few for a row of {self.config.sequence_length} + 1"
            fix = "raise a text source's validation_fraction or documents, or lower data.sequence_length"
            raise UsageError(f"data.sources: {cause}; {fix}")
        return validation_batches(self.sources, batch_size)


def prepare(
    data: DataConfig, root: Path, *, progress: PrepareProgress | None = None, repair: bool = False,
    run: Runner | None = None,
) -> PreparedData:  # fmt: skip
    """Tokenise the sources that are not prepared yet and open all of them. Idempotent.

    ``repair`` rewrites corrupt shards; without it they raise. ``run`` tokenises the parts of large sources,
    by default in one process per core. Several processes may prepare the same data: one works, the others
    wait. Raises UsageError.
    """
    store = store_of(data, root)
    tokenizer = load_tokenizer(data.tokenizer)
    try:
        (store / "index").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        key = "data.store" if data.store else "--root"
        raise UsageError(f"{key}: {store} cannot be written ({error.strerror}); give another") from error
    kept = tokenizer.fingerprint
    if tokenizer.path:
        kept += tokenizer.path.suffix
        if not (copy := store / "tokenizers" / kept).is_file():
            # workers on other machines may not see the original
            write_bytes(copy, tokenizer.path.read_bytes())
    names = []
    for i in range(len(data.sources)):
        name = _name_of_source(data, i, tokenizer, store)
        if not _is_whole(store / name, repair):
            with file_lock(store / "index" / f"{name}.lock", timeout=-1):
                if not _is_whole(store / name, repair):
                    make_source(PartJob(data, i, store, name, kept), run or default_runner(), progress)
                    if _name_of_source(data, i, tokenizer, store) != name:
                        shutil.rmtree(store / name, ignore_errors=True)
                        changed = f"data.sources.{i}: changed while it was read"
                        raise UsageError(f"{changed}; run the command again when nothing writes to it")
        names.append(name)
    index = {"sources": names, "tokenizer": kept}
    write_json(store / _index_file(data), index)
    prepared = _open_folders(data, store, kept, names)
    write_json(store / f"index/data-{prepared.fingerprint}.json", index)
    return prepared


def store_of(data: DataConfig, root: Path) -> Path:
    """Return the folder of prepared sources: ``data.store``, or `data/` under the root. Raises UsageError."""
    if data.store is None:
        return Path(root) / "data"
    scheme, _, path = data.store.partition("://")
    if path and scheme != "file":
        shown = data.store.partition("?")[0]  # credentials may follow the question mark
        fix = "mount the bucket on every node and give its path"
        raise UsageError(f"data.store: {shown} is not a folder; {fix}")
    return Path(path or scheme).expanduser()


def _name_of_source(data: DataConfig, i: int, tokenizer: Tokenizer, store: Path) -> str:
    """Name of the folder of source ``i``: a hash of everything that determines its content.

    The row length is no part of it for text, which is cut into rows only when it is read.
    """
    config = data.sources[i]
    identity = {"schema": SCHEMA, "source": config.identity(), "tokenizer": tokenizer.fingerprint}
    if config.kind == "task":
        read = {"found": task_identity(config), "length": data.item_tokens(config)}
    else:
        source = text_source(data, i, store)
        read = {"found": source.identity(), "length": None}
        if source.skipped:
            log.warning("data.sources.%d: %s", i, source.skipped)
    return digest(identity | read | {"seed": data.seed})


def _is_whole(folder: Path, repair: bool) -> bool:
    """Return True if a source is complete. Raises UsageError if it is corrupt, unless ``repair`` is set.

    A repair also compares the hashes of shards: a flipped bit changes neither size nor mtime.
    """
    try:
        read_manifest(folder, verify=repair)
    except FileNotFoundError:
        return False
    except UsageError:
        if not repair:
            raise
        # intact parts are reused
        (folder / MANIFEST).unlink(missing_ok=True)
        return False
    return True


def open_prepared(
    data: DataConfig, root: Path, *, verify: bool = False, fingerprint: str | None = None
) -> PreparedData:
    """Open data that `prepare` wrote; needs neither the sources nor the tokenizer. Raises UsageError.

    ``verify`` hashes every shard, even if its mtime matches the manifest. With a ``fingerprint`` the data
    that had it are opened, not the newest ones of this config.
    """
    store = store_of(data, root)
    name = f"index/data-{fingerprint}.json" if fingerprint else _index_file(data)
    try:
        index = json.loads((store / name).read_bytes())
        kept, names = str(index["tokenizer"]), [str(name) for name in index["sources"]]
    except (FileNotFoundError, NotADirectoryError):
        where = f"under {root}" if data.store is None else f"in {store}"
        raise NotPrepared(f"data: not prepared {where}; run titans data prepare") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{store / name}: cannot be read; {REPAIR}") from error
    return _open_folders(data, store, kept, names, verify)


def _open_folders(
    data: DataConfig, store: Path, kept: str, names: list[str], verify: bool = False
) -> PreparedData:
    tokenizer = kept_tokenizer(store, kept)
    sources = []
    for name, source in zip(names, data.sources, strict=True):
        try:
            manifest = read_manifest(store / name, verify)
        except FileNotFoundError:
            raise UsageError(f"{store / name}/{MANIFEST}: missing; {REPAIR}") from None
        length, borders = data.sequence_length, data.packing == "borders"
        sources.append(SourceRows(store / name, manifest, length, tokenizer.pad, source.weight, borders))
    return PreparedData(data, tokenizer, sources)


def _index_file(data: DataConfig) -> str:
    """Name of the index file that maps ``data`` to its folders."""
    sources = [source.identity() for source in data.sources]
    fields = data.model_dump(mode="json", exclude={"store", "packing", "rows"})
    return f"index/{digest(fields | {'sources': sources, 'schema': SCHEMA})}.json"
