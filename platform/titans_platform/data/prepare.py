"""Sources to shards on disk, each once.

Under the storage root, in `data/`: a folder for each source, tokenizer and version; `index/` with which
folders a DataConfig means (so that opening needs neither the sources nor the tokenizer's file);
`tokenizers/` with copies.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    SplitWriter,
    read_manifest,
    write_manifest,
    write_table,
)
from titans_platform.data.sources import TextSource, open_source
from titans_platform.data.tokenizer import Tokenizer, load_tokenizer
from titans_platform.errors import UsageError
from titans_platform.files import write_json

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
            with _replacing(store / name) as partial:
                written = _write(partial, encoded, tokenizer.vocab_size, label, progress)
                if not written.train.documents + written.validation.documents:
                    raise UsageError(f"{field}: {label} is empty; give a source that holds text")
                item_tokens = data.sequence_length if text is None else None
                origin = {"python": text.python if text else None, "item_tokens": item_tokens}
                write_manifest(partial, written.model_copy(update=origin))
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
    train_info, validation_info = train.close(), validation.close()
    return Manifest(
        schema_version=SCHEMA,
        label=label,
        content=digest([train.content.hexdigest(), validation.content.hexdigest()], 16),
        train=train_info,
        validation=validation_info,
        items=write_table(folder / "items.arrow", items) if hashes else None,
    )
