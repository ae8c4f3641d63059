"""Published views: MLflow, a store that was moved, and the page of the paper's tables."""

import json
import re
import shutil
from dataclasses import replace

import pytest

from tests.report.small import save, study_of
from titans_platform import cli
from titans_platform.config import RunConfig
from titans_platform.errors import UsageError
from titans_platform.report.publish import log_report, make, paper_page, write_report
from titans_platform.report.report import build_report
from titans_platform.report.table import build_table
from titans_platform.runs.folder import RunFolder
from titans_platform.study.grid import Cell, StudyRun
from titans_platform.study.spec import Column
from titans_platform.study.status import overview, studies_of_the_paper
from titans_platform.text import plain_console
from titans_platform.tracking import TrackingStore, adopt, open_store


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def store(root) -> TrackingStore:
    return open_store(root)


@pytest.fixture(scope="module")
def study_run(root, store) -> StudyRun:
    """A study of one cell, which a run in MLflow is of."""
    cell, run_id = Cell("LMM", 0, RunConfig(), "abc"), store.cell_run("abc", "LMM")
    log = store.run(run_id)
    log.summary({"acc": 0.25, "acc/recall/64": 0.5, "parameters": 7})
    log.close()
    tasks, config = {"acc/recall@64": {"value": 0.5, "stderr": 0.1}}, {"optim": {"steps": 20}}
    save(root, cell, columns={"acc": 0.25}, tasks=tasks, mlflow_run_id=run_id, config=config)
    return study_of(root, cell, columns={"acc": Column(title="Reasoning", unit="%", factor=100)})


@pytest.mark.slow
def test_report_logged_twice_leaves_the_runs_of_its_cells_as_they_are(study_run, store):
    report = build_report(build_table(study_run))
    log_report(store, report, write_report(report, study_run.path))
    parent = log_report(store, report, write_report(report, study_run.path))
    run = store.client.get_run(report.table.results[0].mlflow_run_id)
    assert run.data.metrics == {"acc": 0.25, "acc/recall/64": 0.5, "parameters": 7.0}
    assert run.info.status == "FINISHED"
    # a metric that is logged once would be a chart with one bar
    assert store.client.get_run(parent).data.metrics == {}


def test_copied_root_does_not_write_into_the_original(study_run, root, tmp_path, capsys):
    copy = tmp_path / "copy"
    journal = study_run.cells[0].folder(root).path / "metrics.jsonl"
    journal.write_text('{"step": 1, "time": 0, "values": {"loss": 3.0}}\n')
    shutil.copytree(root, copy)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    with pytest.raises(UsageError, match="copied or moved") as caught:
        open_store(copy)
    assert "\n" not in str(caught.value)
    run = replace(study_run, root=copy)
    make(run, plain_console())
    assert (run.path / "table.csv").is_file()
    # the report of a copy has the learning curves too
    assert "Learning curves" in (run.path / "report.html").read_text()
    assert "copied or moved" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    adopt(copy)
    adopt(copy)  # idempotent
    adopted = open_store(copy)
    (result,) = adopted.client.search_runs([adopted.experiment], "tags.`titans.cell` = 'abc'")
    assert result.info.artifact_uri.startswith(copy.as_uri())
    assert open_store(root).client.get_run(result.info.run_id).info.artifact_uri.startswith(root.as_uri())


@pytest.fixture
def begun(tmp_path):
    """A root in which one of two cells of the ablation is done."""
    folder = tmp_path / "studies" / "ablation-smoke"
    folder.mkdir(parents=True)
    cells = [{"cell": name, "row": "LMM", "seed": seed} for seed, name in enumerate(("a" * 12, "b" * 12))]
    record = {"study": "ablation", "scale": "smoke", "commit": "c0ffee", "cells": cells}
    (folder / "cells.json").write_text(json.dumps(record))
    done = RunFolder(tmp_path, "a" * 12)
    done.path.mkdir(parents=True)
    (done.path / "result.json").write_text(json.dumps({"cell": "a" * 12, "columns": {}}))
    return tmp_path


def test_sweep_list_shows_what_has_been_run(begun, capsys, answer):
    assert cli.run(["sweep", "list", "--root", str(begun)]) == 0
    lines = capsys.readouterr().out.splitlines()
    ablation = lines[lines.index("Table 5: The ablation") + 1]
    assert ablation.startswith("  study ablation; scales smoke (1 of 2 cells done), laptop,")
    studies = {study["name"]: study for study in answer("sweep", "list", "--root", begun)}
    assert studies["ablation"]["ran"] == {"smoke": {"done": 1, "cells": 2}}
    assert studies["memory_depth"]["paper"] == ["Figure 7", "Figure 8"]
    assert "paper" not in studies["grid"]


def test_page_has_our_numbers_and_the_papers(begun):
    items = overview(begun, studies_of_the_paper())
    assert [name for item in items for name in item.names] == [
        *(f"Table {n}" for n in range(1, 6)), *(f"Figure {n}" for n in range(6, 10)),
    ]  # fmt: skip
    shown = [item for item in items if item.names[0] in ("Table 3", "Table 5", "Figure 6", "Figure 9")]
    shown = [replace(item, study=None) if item.names == ("Figure 6",) else item for item in shown]
    page = paper_page(shown, begun)
    # what has been run, and the scale that the paper's numbers belong to
    scales = ("Table 5, scale smoke.", "Table 5, scale 400M.", "scale laptop.")
    assert [scale in page for scale in scales] == [True, True, False]
    assert ("28.73" in page, "0.231" in page) == (True, True)
    names = re.findall(r'<h2 id="section-\d+">(.*?)</h2>', page)
    assert (names, page.count("<html")) == (["Table 5", "Table 3", "Figure 6", "Figure 9"], 1)
