"""The status of a study: cells that ended, and how their time was spent."""

import io

import pytest
from rich.console import Console

from titans_platform.cli.live import running
from titans_platform.config import RunConfig
from titans_platform.files import write_json
from titans_platform.study import status
from titans_platform.study.grid import Cell, StudyRun
from titans_platform.study.spec import Column, Row, Scale, Study
from titans_platform.study.status import timings, timings_line

NOW = 2_000_000_000.0
# two slots, three cells of ten seconds each: seven of their own
SPANS = {"abc": (104, 114), "abd": (105, 115), "abe": (115, 125)}


def test_cell_that_ended_is_shown_in_the_units_of_the_table(tmp_path):
    cell = Cell("LMM", 0, RunConfig(), "abc")
    columns = {"acc": Column(title="Reasoning", unit="%", factor=100), "ppl": Column(title="LM", decimals=2)}
    measured = {"acc": 0.25, "ppl": 5.125, "speed": None}
    result = {"cell": "abc", "columns": measured, "train_seconds": 8, "eval_seconds": 2}
    study = Study(name="tiny", columns=columns, scales={"small": Scale()}, rows=(Row(name="LMM"),))
    study = StudyRun(study, "small", tmp_path, "one", cells=(cell,))
    out = io.StringIO()
    with running(study, Console(file=out, width=100)):
        assert not out.getvalue()
        write_json(cell.folder(tmp_path).path / "result.json", result)
    assert out.getvalue() == "done    LMM, seed 0: acc 25.0 %, ppl 5.12, speed — (10s)\n"


@pytest.fixture
def cells(tmp_path, monkeypatch):
    monkeypatch.setattr(status.time, "time", lambda: NOW + 130)
    collected = [Cell("LMM", seed, RunConfig(seed=seed), name) for seed, name in enumerate(SPANS)]
    for cell, (began, ended) in zip(collected, SPANS.values(), strict=True):
        seconds = {"train": 5.0, "evaluate": 2.0, "checkpoint": 1.5, "data": 0.5}
        span = {"began": NOW + began, "ended": NOW + ended, "seconds": seconds}
        cell.folder(tmp_path).update(attempt=span)
    return collected


def test_parts_add_up_to_the_overhead(cells, tmp_path):
    record = timings(NOW + 90, cells, tmp_path, slots=2)
    assert record["own_seconds"] == pytest.approx(21)
    assert record["overhead_seconds_a_cell"] == pytest.approx((40 * 2 - 21) / 3)
    parts = {name: 3 * seconds for name, seconds in record["parts_seconds_a_cell"].items()}
    expected = {"checkpoint": 4.5, "data": 1.5, "start of a cell": 30 - 27, "outside of cells": 80 - 30}
    assert parts == pytest.approx(expected)
    line = timings_line(record)
    assert line.startswith("Overhead: 19.7 s a cell (3 cells, 2 at once; wall time 3.81 times")


def test_cells_of_an_earlier_run_are_not_counted(cells, tmp_path):
    record = timings(NOW + 114.5, cells, tmp_path, slots=1)
    assert (record["cells"], record["own_seconds"]) == (1, pytest.approx(7))
