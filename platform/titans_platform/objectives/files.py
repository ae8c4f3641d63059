"""Shared by objectives that read their own file: opening it, and the order of training items."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from titans_platform.data.stream import shuffled
from titans_platform.errors import UsageError, one_line

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


class Places:
    """The indices of the items in each step: a function of the seed and the step, for any world size.

    Every item is drawn once per epoch, in a new order each epoch.
    """

    def __init__(self, items: int, batch_size: int, seed: int, rank: int, world_size: int):
        self.items, self.batch_size = items, batch_size
        self.share = slice(rank, None, world_size)
        # a batch may span two epochs
        self._order = lru_cache(2)(lambda epoch: shuffled(items, f"{seed}/{epoch}"))

    def of(self, step: int) -> NDArray[np.int64]:
        """This worker's items of the global batch of ``step`` (0-based)."""
        samples = range(step * self.batch_size, (step + 1) * self.batch_size)[self.share]
        drawn = [divmod(sample, self.items) for sample in samples]
        return np.array([self._order(epoch)[place] for epoch, place in drawn])
