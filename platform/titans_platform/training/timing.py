"""Where a cell's time goes: wall-clock seconds by phase, the loop and the evaluation apart from the rest."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Phases:
    """Seconds by phase; a phase inside another is taken out of it, so that they add up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block as ``name``, less what phases inside it took."""
        self._inner.append(0.0)
        started = time.perf_counter()
        try:
            yield
        finally:
            taken = time.perf_counter() - started
            self.seconds[name] += taken - self._inner.pop()
            self._inner[-1] += taken
