"""The status of a study: cells that ended, and how their time was spent."""

import io
import re
from contextlib import nullcontext

import pytest

from tests.report.small import save, study_of
from titans_platform.cli import live
from titans_platform.cli.live import running
from titans_platform.config import RunConfig
from titans_platform.files import write_json
from titans_platform.runs.folder import RunFolder
from titans_platform.study import run as study_run
from titans_platform.study.grid import Cell
from titans_platform.study.spec import Column
from titans_platform.study.status import CellStatus, read_status
from titans_platform.text import plain_console


def test_cell_that_ended_is_shown_in_the_units_of_the_table(tmp_path):
    cell = Cell("LMM [x] :b:", 0, RunConfig(), "abc")
    columns = {"acc": Column(title="Reasoning", unit="%", factor=100), "ppl": Column(title="LM", decimals=2)}
    measured = {"acc": 0.25, "ppl": 5.125, "speed": None}
    result = {"cell": "abc", "columns": measured, "train_seconds": 8, "eval_seconds": 2}
    out = io.StringIO()
    with running(study_of(tmp_path, cell, columns=columns), plain_console(file=out, width=100)):
        assert not out.getvalue()
        write_json(cell.folder(tmp_path).path / "result.json", result)
    assert out.getvalue() == "done    LMM [x] :b:, seed 0: acc 25.0 %, ppl 5.12, speed — (10s)\n"
    study_of(tmp_path, cell).write()
    assert read_status(tmp_path, "tiny")["counts"]["done"] == 1


def test_table_is_shown_when_a_seed_is_finished_in_every_row(tmp_path):
    pairs = [(row, seed) for seed in (0, 1) for row in ("LMM", "MAC")]
    cells = [Cell(row, seed, RunConfig(seed=seed), f"{row}{seed}") for row, seed in pairs]
    study, out = study_of(tmp_path, *cells, columns={"lm_ppl": Column(title="LM [ppl]")}), io.StringIO()
    for last in (2, 4):
        with running(study, plain_console(file=out, width=100)):
            for cell in cells[last - 2 : last]:
                save(tmp_path, cell, columns={"lm_ppl": 5.0 + cell.seed})
    shown = out.getvalue()
    assert shown.count("tiny, 1 of 2 seeds finished: one seed has no spread") == shown.count("[ppl]") == 1
    assert [line.split()[:3] for line in shown.splitlines() if line.startswith((" LMM", " MAC"))] == [
        ["LMM", "5.0", "1/2"], ["MAC", "5.0", "1/2"],
    ]  # fmt: skip
    assert "2 of 2" not in shown


def test_display_of_a_row_with_a_long_name_fits_80_columns_and_has_the_time_left_once(tmp_path, monkeypatch):
    progress = {"phase": "train", "step": 1200, "steps": 20_000, "loss": 3.123, "tokens_per_second": 12_345.0}
    name = "Gated DeltaNet with a short convolution and a window of 2,048"
    item = CellStatus("abc", name, 0, "running", progress | {"eta_seconds": 754.0})
    monkeypatch.setattr(live, "cell_statuses", lambda cells, root: [item])
    study, out = study_of(tmp_path, Cell(name, 0, RunConfig(), "abc")), io.StringIO()
    with running(study, plain_console(file=out, width=80, force_terminal=True, color_system=None)):
        pass
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", out.getvalue()))
    shown = [line for line in lines if "1200/20000 loss 3.123 12.3K tok/s" in line]
    assert shown
    assert max(map(len, lines)) <= 80
    assert not [line for line in shown if "12m34s" in line]


def test_ctrl_c_ends_the_cells_that_this_study_trains_and_no_others(tmp_path, monkeypatch):
    ended: list[RunFolder] = []
    monkeypatch.setattr(study_run, "ray_session", lambda *_: nullcontext())
    monkeypatch.setattr(study_run, "end_at_checkpoints", ended.extend)
    study = study_of(tmp_path, *(Cell(row, 0, RunConfig(), row) for row in ("ours", "another's")))
    study.write()

    def interrupted() -> None:
        with study_run.session(study) as opened:
            for row, parent in (("ours", opened.tracking.parent), ("another's", "another study")):
                RunFolder(tmp_path, row).update(mlflow={"tracking": {"parent": parent}})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [folder.name for folder in ended] == ["ours"]
