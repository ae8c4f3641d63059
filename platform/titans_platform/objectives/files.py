"""What objectives that read a file of their own share: opening it, and the order of training."""

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

from titans_platform.data.order import shuffled
from titans_platform.errors import UsageError, one_line

OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}

R = TypeVar("R")


@contextmanager
def opened(name: str, readers: Mapping[str, R], field: str) -> Iterator[tuple[R, Any]]:
    """The reader that goes with a file's ending, which may have .gz or .xz behind it; and the file, unpacked.

    Raises UsageError, which names ``field``: no such ending, or it cannot be read, here or in the block.
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
    """Which of ``items`` each step trains on: a function of the seed and the step, for any number of workers.

    Every item comes once before any comes again, in a new order each time.
    """

    def __init__(self, items: int, batch_size: int, seed: int, rank: int, world_size: int):
        self.items, self.batch_size = items, batch_size
        self.share = slice(rank, None, world_size)
        # a batch may span two epochs
        self._order = lru_cache(2)(lambda epoch: shuffled(items, f"{seed}/{epoch}"))

    def of(self, step: int) -> NDArray[np.int64]:
        """This worker's items of the global batch of ``step`` (from 0)."""
        samples = range(step * self.batch_size, (step + 1) * self.batch_size)[self.share]
        drawn = [divmod(sample, self.items) for sample in samples]
        return np.array([self._order(epoch)[place] for epoch, place in drawn])
