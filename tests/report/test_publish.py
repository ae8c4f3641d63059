"""Published MLflow views: units, links, and a store that was moved."""

import shutil
from dataclasses import replace

import pytest
from rich.console import Console

from tests.report.small import save
from titans_platform.config import RunConfig
from titans_platform.errors import UsageError
from titans_platform.report.publish import log_report, make, write_report
from titans_platform.report.report import build_report
from titans_platform.report.table import build_table
from titans_platform.study.grid import Cell, StudyRun
from titans_platform.study.spec import Column, Row, Scale, Study
from titans_platform.tracking import TrackingStore, adopt, open_store

ACC = Column(title="Reasoning", unit="%", factor=100)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def store(root) -> TrackingStore:
    return open_store(root)


@pytest.fixture(scope="module")
def study_run(root, store) -> StudyRun:
    """A study of one cell, which a run in MLflow is of."""
    cell = Cell("LMM", 0, RunConfig(), "abc")
    run_id = store.cell_run("abc", "LMM")
    log = store.run(run_id)
    log.summary({"acc": 0.25, "acc/recall/64": 0.5, "parameters": 7})
    log.close()
    tasks, config = {"acc/recall@64": {"value": 0.5, "stderr": 0.1}}, {"optim": {"steps": 20}}
    save(root, cell, columns={"acc": 0.25}, tasks=tasks, mlflow_run_id=run_id, config=config)
    study = Study(name="tiny", columns={"acc": ACC}, scales={"small": Scale()}, rows=(Row(name="LMM"),))
    return StudyRun(study, "small", root, "c0ffee", cells=(cell,), whole=(cell,))


@pytest.mark.slow
def test_report_logged_twice_leaves_the_runs_of_its_cells_as_they_are(study_run, store):
    report = build_report(build_table(study_run))
    log_report(store, report, write_report(report, study_run.path))
    parent = log_report(store, report, write_report(report, study_run.path))
    run_id = report.table.results[0].mlflow_run_id
    run = store.client.get_run(run_id)
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
    make(run, Console())
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
