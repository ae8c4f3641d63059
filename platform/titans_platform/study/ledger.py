"""Where a study's time went: what its cells took for themselves, and what was spent around them.

Counted in seconds of a slot, of which as many run side by side as cells do: wall time x concurrency is the
whole, a cell's own are its training loop and its evaluation, and everything else is overhead.
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

LEDGER = "ledger.json"
"""The record of the latest run, in the study's folder."""
OWN = ("train", "evaluate")


@dataclass
class Marks:
    """When each part of a study began, the command that runs it first."""

    began: float = field(default_factory=time.time)
    at: dict[str, float] = field(default_factory=dict)

    def mark(self, name: str) -> None:
        """A part begins now; the one before has ended."""
        self.at[name] = time.time()

    @property
    def now(self) -> str:
        """What is going on while no cell runs; empty before the first part."""
        name = next(reversed(self.at), "")
        return "start of workers" if name == "cells" else name

    def spans(self) -> dict[str, tuple[float, float]]:
        """When each part began and ended; the last goes on."""
        times = [self.began, *self.at.values(), time.time()]
        return dict(zip(("the command", *self.at), pairwise(times), strict=True))


def account(marks: Marks, cells: Sequence[Cell], root: Path, slots: int) -> dict[str, Any]:
    """The ledger of a run of ``cells``, those that ended in it counted."""
    spans = [span for cell in cells if (span := read_json(cell.folder(root).path / TIME))]
    spans = [span for span in spans if span["began"] >= marks.began]
    # the phases of the cells, summed
    inside: Counter[str] = Counter()
    for span in spans:
        inside.update(span["seconds"])
    own = sum(inside.pop(name, 0.0) for name in OWN)
    driver = marks.spans()
    first, last = driver.pop("cells")
    parts = {name: slots * (ended - began) for name, (began, ended) in driver.items()}
    parts |= _without_cell(spans, slots, first, last) | inside
    parts["start of a cell"] = max(0.0, _busy(spans) - own - sum(inside.values()))
    wall, count = time.time() - marks.began, len(spans)
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


def _busy(spans: Sequence[dict[str, Any]]) -> float:
    return sum(span["ended"] - span["began"] for span in spans)


def _without_cell(spans: Sequence[dict[str, Any]], slots: int, first: float, last: float) -> dict[str, float]:
    """The seconds of slots without a cell from ``first`` to ``last``, before, between and after them."""
    begins = sorted(span["began"] for span in spans)[:slots]
    ends = sorted(span["ended"] for span in spans)[-slots:]
    never = (slots - len(begins)) * (last - first)
    before, after = sum(b - first for b in begins), sum(last - e for e in ends)
    between = slots * (last - first) - before - after - never - _busy(spans)
    return {"start of workers": before, "between cells": max(0.0, between), "idle at the end": after + never}


def ledger_line(record: dict[str, Any]) -> str:
    """The ledger in a sentence, the largest parts first."""
    if not record["cells"]:
        return "Overhead: no cell ended in this run."
    parts = sorted(record["parts_seconds_a_cell"].items(), key=lambda part: -part[1])
    listed = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts if seconds >= 0.005)
    # no cell trained where all failed
    ratio = record["wall_over_own"]
    wall = "" if ratio is None else f"; wall time {ratio:.2f} times the cells' own"
    return (
        f"Overhead: {record['overhead_seconds_a_cell']:.1f} s a cell ({record['cells']} cells, "
        f"{record['slots']} at once{wall}): {listed}."
    )
