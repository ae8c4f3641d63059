"""Where the time of a study goes: training and evaluation of its cells, and the overhead around them.

Times are slot-seconds: one slot per concurrent cell, so the total is wall time x concurrency. Everything
except training and evaluation is overhead.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from titans_platform.files import read_json
from titans_platform.runs.folder import TIME
from titans_platform.study.grid import Cell

OWN = ("train", "evaluate")
"""Phases of a cell that are not overhead."""


@dataclass
class Stopwatch:
    """When each part of a command started; each part ends when the next one starts."""

    began: float = field(default_factory=time.time)
    """Seconds since 1970."""
    at: dict[str, float] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Start a part and end the one before it."""
        self.at[name] = time.time()

    def reset(self, name: str) -> None:
        """Forget all parts and start with this one."""
        self.began = time.time()
        self.at = {name: self.began}

    @property
    def now(self) -> str:
        """What happens while no cell runs; empty before the first part."""
        name = next(reversed(self.at), "")
        return "start of workers" if name == "cells" else name

    def spans(self) -> dict[str, tuple[float, float]]:
        """Start and end of each part; the last one ends now."""
        times = [self.began, *self.at.values(), time.time()]
        return dict(zip(("the command", *self.at), pairwise(times), strict=True))


def timings(stopwatch: Stopwatch, cells: Sequence[Cell], root: Path, slots: int) -> dict[str, Any]:
    """The timings of one run, from those of ``cells`` that ended in it."""
    spans = [span for cell in cells if (span := read_json(cell.folder(root).path / TIME))]
    spans = [span for span in spans if span["began"] >= stopwatch.began]
    # phases inside of cells, summed over cells
    inside: Counter[str] = Counter()
    for span in spans:
        inside.update(span["seconds"])
    own = sum(inside.pop(name, 0.0) for name in OWN)
    driver = stopwatch.spans()
    first, last = driver.pop("cells")
    busy = sum(span["ended"] - span["began"] for span in spans)
    parts = {name: slots * (ended - began) for name, (began, ended) in driver.items()}
    parts |= _idle(spans, slots, first, last, busy) | inside
    parts["start of a cell"] = max(0.0, busy - own - sum(inside.values()))
    wall, count = time.time() - stopwatch.began, len(spans)
    overhead = wall * slots - own
    return {
        "cells": count,
        "slots": slots,
        "wall_seconds": wall,
        "own_seconds": own,
        "overhead_seconds_a_cell": overhead / count if count else None,
        "wall_over_own": wall * slots / own if own else None,
        "parts_seconds_a_cell": {k: v / count for k, v in parts.items()} if count else {},
    }


def _idle(
    spans: Sequence[dict[str, Any]], slots: int, first: float, last: float, busy: float
) -> dict[str, float]:
    """Idle slot-seconds between ``first`` and ``last``: before, between and after cells."""
    begins = sorted(span["began"] for span in spans)[:slots]
    ends = sorted(span["ended"] for span in spans)[-slots:]
    never = (slots - len(begins)) * (last - first)
    before, after = sum(b - first for b in begins), sum(last - e for e in ends)
    between = slots * (last - first) - before - after - never - busy
    return {"start of workers": before, "between cells": max(0.0, between), "idle at the end": after + never}


def timings_line(record: dict[str, Any]) -> str:
    """One-sentence summary, largest parts first."""
    if not record["cells"]:
        return "Overhead: no cell ended in this run."
    parts = sorted(record["parts_seconds_a_cell"].items(), key=lambda part: -part[1])
    listed = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts if seconds >= 0.005)
    # None if every cell failed
    ratio = record["wall_over_own"]
    wall = "" if ratio is None else f"; wall time {ratio:.2f} times the cells' own"
    return (
        f"Overhead: {record['overhead_seconds_a_cell']:.1f} s a cell ({record['cells']} cells, "
        f"{record['slots']} at once{wall}): {listed}."
    )
