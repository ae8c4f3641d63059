"""Shared by objectives that read their own file: opening it, a copy of it, the stream of training items."""

from __future__ import annotations

import gzip
import lzma
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from titans_platform.data import NotPrepared
from titans_platform.data.stream import shuffled
from titans_platform.errors import UsageError, one_line
from titans_platform.files import read_json, write_json

OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}

R = TypeVar("R")


@contextmanager
def opened(name: str, readers: Mapping[str, R], field: str) -> Iterator[tuple[R, Any]]:
    """Open a file, decompressing .gz and .xz; yields the reader for its suffix and the file.

    Raises UsageError that names ``field`` if the suffix is unknown, or if the file cannot be read, here or in
    the ``with`` block.
    """
    path = Path(name).expanduser()
    suffix = path.with_suffix("").suffix if path.suffix in OPENERS else path.suffix
    if suffix not in readers:
        raise UsageError(f"{field}: {name} is none of {', '.join(readers)} (or with .gz or .xz)")
    try:
        with OPENERS.get(path.suffix, open)(path, "rb") as file:
            yield readers[suffix], file
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:  # pyarrow's errors are ValueErrors
        raise UsageError(f"{field}: {name} cannot be read: {one_line(error)}") from None


class ItemStream:
    """The training batches of one worker: a function of the seed and the step, for any world size.

    Every item is drawn once per epoch, in a new order each epoch. ``make(step, which)`` makes the batch of
    the items ``which``. Raises UsageError if there are more workers than rows.
    """

    def __init__(
        self,
        items: int,
        batch_size: int,
        seed: int,
        rank: int,
        world_size: int,
        make: Callable[[int, NDArray[np.int64]], Any],
    ):
        if batch_size < world_size:
            raise UsageError(
                f"optim.global_batch_size: {batch_size} rows cannot be shared by {world_size} workers"
            )
        self.items, self.batch_size, self.make = items, batch_size, make
        self.share = slice(rank, None, world_size)
        # a batch may span two epochs
        self._order = lru_cache(2)(lambda epoch: shuffled(items, f"{seed}/{epoch}"))

    def batch(self, step: int) -> Any:
        """This worker's items of the global batch of ``step`` (0-based)."""
        samples = range(step * self.batch_size, (step + 1) * self.batch_size)[self.share]
        drawn = [divmod(sample, self.items) for sample in samples]
        return self.make(step, np.array([self._order(epoch)[place] for epoch, place in drawn]))


def save_copy(index: Path, content: str, suffix: str, write: Callable[[Path], object], **about: Any) -> None:
    """Save a copy beside ``index`` in a file named by the hash of its ``content``, to which ``index`` points.

    The copy is written also if it exists, which repairs a corrupt one.
    """
    index.parent.mkdir(parents=True, exist_ok=True)
    partial = index.with_name(f".{content}.{os.getpid()}{suffix}")
    write(partial)
    os.replace(partial, index.with_name(f"{content}{suffix}"))
    write_json(index, {"content": content, **about})


def load_copy(
    index: Path, suffix: str, read: Callable[[Path, dict[str, Any]], R], content_of: Callable[[R], str]
) -> R:
    """Load the copy to which ``index`` points. Raises NotPrepared; UsageError if it is corrupt."""
    if (noted := read_json(index)) is None:
        raise NotPrepared("objective.options: the data are not prepared; run titans train on them first")
    path = index.with_name(f"{noted['content']}{suffix}")
    try:
        found = read(path, noted)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {error}; prepare it again") from None
    if content_of(found) != noted["content"]:
        raise UsageError(f"{path}: damaged: its content is not what its name says; prepare it again")
    return found
