"""The live display of a study."""

from __future__ import annotations

from titans_platform.cli.live import StudyView
from titans_platform.config import RunConfig
from titans_platform.files import write_json
from titans_platform.study.grid import Cell, StudyRun
from titans_platform.study.plan import Plan
from titans_platform.study.spec import Column, Row, Scale, Study
from titans_platform.study.timings import Stopwatch


def test_a_cell_that_ended_is_shown_in_the_units_of_the_table(tmp_path):
    cell = Cell("LMM", 0, RunConfig(), "abc")
    columns = {"acc": Column(title="Reasoning", unit="%", factor=100), "ppl": Column(title="LM", decimals=2)}
    result = {
        "cell": "abc",
        "columns": {"acc": 0.25, "ppl": 5.125, "speed": None},
        "train_seconds": 8,
        "eval_seconds": 2,
    }
    study = Study(name="tiny", columns=columns, scales={"small": Scale()}, rows=(Row(name="LMM"),))
    run = StudyRun(study, "small", tmp_path, "one", cells=(cell,))
    view = StudyView(Plan(run, 1), Stopwatch())
    assert view.news() == []
    write_json(cell.folder(tmp_path).path / "result.json", result)
    assert view.news() == ["done    LMM, seed 0: acc 25.0 %, ppl 5.12, speed — (10s)"]
