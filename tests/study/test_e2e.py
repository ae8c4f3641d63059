"""A study end to end: killed twice, it has the numbers of an undisturbed run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.small import documented, study, until
from titans_platform.clusters import local
from titans_platform.data import prepare
from titans_platform.runs.execute import execute
from titans_platform.runs.folder import RunFolder
from titans_platform.runs.load import spec_for
from titans_platform.study.grid import expand, load_study
from titans_platform.study.status import read_status
from titans_platform.tracking import open_store

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

# of a variant in the folder of the study; stops being a number at its first step
DIVERGES = {
    "name": "diverges",
    "set": {"model.variant": "my_lab.blocks:Shift", "optim.lr": 1e30, "optim.grad_clip": None},
}
STUDY = study(steps=120, items=20, more_rows=(DIVERGES,))


def driver(folder: Path, *more: str) -> subprocess.Popen:
    """As the installed command starts: without the current folder on the path."""
    command = "import sys; from titans_platform.cli import main; main(sys.argv[1:])"
    arguments = ["sweep", "run", "tiny.yaml", "--scale", "small", "--root", "runs", *more]
    return subprocess.Popen(
        [sys.executable, "-P", "-c", command, *arguments], cwd=folder, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def worker_of(cell: RunFolder) -> int | None:
    """Pid of the worker of a cell that has a checkpoint."""
    if not cell.is_held() or not list((cell.path / "checkpoints").glob("step-*")):
        return None
    return cell.record().get("pid")


def below(pid: int) -> list[dict[str, Any]]:
    """Return records of a process's descendants, without Ray's agents: they outlive a dead cluster."""
    children = psutil.Process(pid).children(recursive=True)
    return [local.record(p.pid, "") for p in children if "agent" not in " ".join(p.cmdline()).lower()]


def test_study_killed_twice_has_the_numbers_of_an_undisturbed_one(tmp_path):
    (tmp_path / "tiny.yaml").write_text(json.dumps(STUDY))
    (tmp_path / "my_lab").mkdir()
    (tmp_path / "my_lab/blocks.py").write_text(documented("titans_core/blocks/shift.py"))
    cells = expand(load_study(str(tmp_path / "tiny.yaml")), "small")
    prepare(cells[0].config.data, tmp_path / "alone")
    alone = {cell.row: execute(spec_for(cell.config, tmp_path / "alone")) for cell in cells[:2]}
    root = tmp_path / "runs"
    folders = {row: RunFolder(root, result.cell) for row, result in alone.items()}

    first = driver(tmp_path, "--concurrency", "1")
    try:
        pid = until(lambda: worker_of(folders["LMM"]), first)
        status = read_status(root, "tiny")
        assert status["running"]
        assert status["counts"]["running"] == 1
        os.kill(pid, signal.SIGKILL)
        # another process resumes it
        until(lambda: worker_of(folders["LMM"]) not in (None, pid), first)
        until(lambda: worker_of(folders["Linear Memory"]), first)
        processes = below(first.pid)
    finally:
        first.kill()
        first.communicate()
    # no process of the dead driver's Ray survives
    until(lambda: not any(map(local.find, processes)), timeout=60)
    finished = (folders["LMM"].path / "result.json").stat().st_mtime_ns
    assert not read_status(root, "tiny", "small")["running"]

    last = driver(tmp_path)
    out, _ = last.communicate(timeout=300)
    assert last.returncode == 4, out
    assert "diverges, seed 0: failed" in out
    assert "1 cell has no result" in out
    for row, result in alone.items():
        actual = folders[row].result()
        assert actual.row == row
        for key in ("columns", "tasks", "final_train_loss", "parameters", "config", "tokens"):
            assert getattr(actual, key) == getattr(result, key), (row, key)
    assert (folders["LMM"].path / "result.json").stat().st_mtime_ns == finished
    _check_tracking(root, folders)
    status = read_status(root, "tiny", "small")
    assert status["counts"] == {"done": 2, "running": 0, "failed": 1, "interrupted": 0, "missing": 0}
    assert "gradient norm nan" in next(cell.reason for cell in status["cells"] if cell.state == "failed")


def _check_tracking(root: Path, folders: dict[str, RunFolder]) -> None:
    """One run a cell under one parent, with each step logged once."""
    store = open_store(root)
    runs = {run.info.run_id: run for run in store.client.search_runs([store.experiment])}
    parents = [run for run in runs.values() if run.data.tags.get("titans.study") == "tiny-small"]
    assert (len(parents), parents[0].data.params.keys()) == (1, {"study", "scale", "seeds"})
    assert not [run for run in runs.values() if run.info.status == "RUNNING"]
    for folder in folders.values():
        run = runs[folder.result().mlflow_run_id]
        assert run.data.tags["mlflow.parentRunId"] == parents[0].info.run_id
        assert run.info.status == "FINISHED"
        assert {"row", "seed", "model.variant", "optim.lr"} <= run.data.params.keys()
        assert len(run.data.params) < 15
        steps = [metric.step for metric in store.client.get_metric_history(run.info.run_id, "loss")]
        # every step once, whatever was killed in between
        assert steps == list(range(1, 121))
        assert folder.name in parents[0].data.tags["mlflow.note.content"]
    artifacts = {file.path for file in store.client.list_artifacts(parents[0].info.run_id)}
    assert {"table.md", "table.csv", "report.html", "figures"} <= artifacts
