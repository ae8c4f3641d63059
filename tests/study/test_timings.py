"""The timings of a study add up, on made-up spans."""

from __future__ import annotations

import pytest

from titans_platform.config import RunConfig
from titans_platform.files import write_json
from titans_platform.study import timings as module
from titans_platform.study.grid import Cell
from titans_platform.study.timings import Stopwatch, timings, timings_line

NOW = 2_000_000_000.0
# two slots, three cells of ten seconds each: seven of their own
SPANS = {"abc": (104, 114), "abd": (105, 115), "abe": (115, 125)}


@pytest.fixture
def cells(tmp_path, monkeypatch):
    monkeypatch.setattr(module.time, "time", lambda: NOW + 130)
    found = []
    for seed, (name, (began, ended)) in enumerate(SPANS.items()):
        cell = Cell("LMM", seed, RunConfig(seed=seed), name)
        folder = cell.folder(tmp_path).path
        seconds = {"train": 5.0, "evaluate": 2.0, "checkpoint": 1.5, "data": 0.5}
        write_json(folder / "time.json", {"began": NOW + began, "ended": NOW + ended, "seconds": seconds})
        found.append(cell)
    return found


def test_the_parts_add_up_to_the_overhead(cells, tmp_path):
    stopwatch = Stopwatch(NOW + 90, {"preparation": NOW + 91, "start of Ray": NOW + 95, "cells": NOW + 101})
    stopwatch.at |= {"end of Ray": NOW + 126, "report": NOW + 128}
    record = timings(stopwatch, cells, tmp_path, slots=2)
    assert record["own_seconds"] == pytest.approx(21)
    assert record["overhead_seconds_a_cell"] == pytest.approx((40 * 2 - 21) / 3)
    parts = {name: 3 * seconds for name, seconds in record["parts_seconds_a_cell"].items()}
    assert sum(parts.values()) == pytest.approx(40 * 2 - 21)
    assert parts["start of workers"] == pytest.approx(3 + 4)
    assert parts["idle at the end"] == pytest.approx(11 + 1)
    assert parts["between cells"] == pytest.approx(1)
    assert parts["start of a cell"] == pytest.approx(30 - 27)
    assert parts["checkpoint"] == pytest.approx(4.5)
    line = timings_line(record)
    assert line.startswith("Overhead: 19.7 s a cell (3 cells, 2 at once; wall time 3.81 times")


def test_cells_of_an_earlier_run_are_not_counted(cells, tmp_path):
    stopwatch = Stopwatch(NOW + 114.5, {"cells": NOW + 114.5})
    record = timings(stopwatch, cells, tmp_path, slots=1)
    assert (record["cells"], record["own_seconds"]) == (1, pytest.approx(7))
