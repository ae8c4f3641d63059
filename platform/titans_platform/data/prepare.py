"""Sources to shards on disk, each once.

Under the storage root, in `data/`: a folder for each source, tokenizer and version; `index/` with which
folders a DataConfig means (so that opening needs neither the sources nor the tokenizer's file);
`tokenizers/` with copies.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from filelock import FileLock

from titans_platform.config import DataConfig, SourceConfig, digest
from titans_platform.data.encode import Encoded, encode_documents, generate_items, task_identity
from titans_platform.data.prepared import PreparedData, index_file, open_folders, store_of
from titans_platform.data.shards import (
    MANIFEST,
    SCHEMA,
    Manifest,
    ShardInfo,
    SplitWriter,
    read_manifest,
    write_json,
    write_manifest,
    write_table,
)
from titans_platform.data.sources import TextSource, open_source
from titans_platform.data.tokenizer import Tokenizer, load_tokenizer
from titans_platform.errors import UsageError

Progress = Callable[[str, int, int, "float | None"], None]
"""Called with a source's label, documents and tokens so far, and the share done where it is known."""


def prepare(
    data: DataConfig, root: Path, *, progress: Progress | None = None, repair: bool = False
) -> PreparedData:
    """Tokenise under the storage root what is not tokenised yet and open it all; a second call only opens.

    ``repair`` makes damaged shards anew; without it they raise. Processes may prepare the same data at
    once: one works, the others wait. Raises UsageError.
    """
    store = store_of(root)
    tokenizer = load_tokenizer(data.tokenizer)
    try:
        (store / "index").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--root: {store} cannot be written ({error.strerror}); give another") from error
    places = range(len(data.sources))
    folders = [_prepare_source(data, i, tokenizer, store, progress, repair) for i in places]
    kept = _keep_tokenizer(tokenizer, store)
    write_json(index_file(data, store), {"sources": folders, "tokenizer": kept})
    return open_folders(data, store, kept, folders)


def _keep_tokenizer(tokenizer: Tokenizer, store: Path) -> str:
    """Copy the tokenizer's file under the store: workers on other machines may not see the original."""
    if tokenizer.path is None:
        return tokenizer.fingerprint
    kept = store / "tokenizers" / f"{tokenizer.fingerprint}{tokenizer.path.suffix}"
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        partial = kept.with_name(f".{kept.name}.{os.getpid()}")
        shutil.copyfile(tokenizer.path, partial)
        os.replace(partial, kept)
    return kept.name


def _prepare_source(
    data: DataConfig, i: int, tokenizer: Tokenizer, store: Path, progress: Progress | None, repair: bool
) -> str:
    """Make the folder of source ``i`` unless it is there and whole; its name."""
    config, field = data.sources[i], f"data.sources.{i}"
    text = None if config.kind == "task" else open_source(config, field, store / "huggingface")
    name = _folder_name(data, config, text, tokenizer)
    if _whole(store / name, repair):
        return name
    with FileLock(store / "index" / f"{name}.lock"):
        if not _whole(store / name, repair):
            if text is None:
                encoded = generate_items(config, tokenizer, data, field)
            else:
                encoded = encode_documents(text, tokenizer, config, data.seed)
            label = text.label if text else "task:" + "+".join(task.task for task in config.tasks)
            python = text.python if text else None
            items = data.sequence_length if text is None else None
            writing = _Writing(store / name, label, python, items, field, tokenizer.vocab_size)
            writing.run(encoded, progress)
    return name


def _folder_name(
    data: DataConfig, config: SourceConfig, text: TextSource | None, tokenizer: Tokenizer
) -> str:
    """Hash of all that decides what the folder holds; running text is cut into rows only when read."""
    return digest(
        {
            "schema": SCHEMA,
            "source": config.model_dump(mode="json", exclude={"weight"}),
            "found": task_identity(config) if text is None else text.identity(),
            "tokenizer": tokenizer.fingerprint,
            "length": data.sequence_length if text is None else None,
            "seed": data.seed,
        }
    )


def _whole(folder: Path, repair: bool) -> bool:
    """Whether the folder is complete. Raises UsageError where it is damaged, unless that may be repaired."""
    if not (folder / MANIFEST).exists():
        return False
    try:
        read_manifest(folder)
    except UsageError:
        if not repair:
            raise
        return False
    return True


class _Writing:
    """Writes one source beside its final place, and moves it there when it is complete."""

    def __init__(
        self,
        folder: Path,
        label: str,
        python: str | None,
        item_tokens: int | None,
        field: str,
        vocab_size: int,
    ):
        self.folder, self.field = folder, field
        self.label, self.python, self.item_tokens = label, python, item_tokens
        # the lock is held: whatever is there was left by a process that died
        self.partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir()
        self.train = SplitWriter(self.partial, "train", vocab_size)
        self.validation = SplitWriter(self.partial, "validation", vocab_size)

    def run(self, encoded: Iterator[Encoded], progress: Progress | None) -> None:
        try:
            manifest = self._manifest(self._write(encoded, progress))
            write_manifest(self.partial, manifest)
            shutil.rmtree(self.folder, ignore_errors=True)
            os.rename(self.partial, self.folder)
        finally:
            shutil.rmtree(self.partial, ignore_errors=True)

    def _write(self, encoded: Iterator[Encoded], progress: Progress | None) -> ShardInfo | None:
        hashes: list[int] = []
        for one in encoded:
            (self.validation if one.validation else self.train).add(one.tokens, one.loss)
            if one.item is not None:
                hashes.append(int(one.item, 16))
            if progress:
                documents = self.train.documents + self.validation.documents
                progress(self.label, documents, self.train.tokens + self.validation.tokens, one.done)
        if not self.train.documents + self.validation.documents:
            raise UsageError(f"{self.field}: {self.label} is empty; give a source that holds text")
        if self.item_tokens is None:
            return None
        return write_table(self.partial / "items.arrow", {"hash": np.unique(np.array(hashes, np.uint64))})

    def _manifest(self, items: ShardInfo | None) -> Manifest:
        train, validation = self.train.close(), self.validation.close()
        return Manifest(
            schema_version=SCHEMA,
            label=self.label,
            python=self.python,
            content=digest([self.train.content.hexdigest(), self.validation.content.hexdigest()], 16),
            item_tokens=self.item_tokens,
            train=train,
            validation=validation,
            items=items,
        )
