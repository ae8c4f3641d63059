import errno
import io
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import click
import pytest
from pydantic import ValidationError

from tests.report.small import study_of
from tests.small import changed
from titans_platform.cli import live
from titans_platform.cli.train import Workers
from titans_platform.config import RunConfig
from titans_platform.errors import ClusterError, NotWritable, StorageError, UsageError
from titans_platform.files import file_lock, is_locked, write_json
from titans_platform.runs.check import check_batch
from titans_platform.runs.folder import Busy, RunFolder
from titans_platform.runs.spec import Machine, Resources, concurrency
from titans_platform.study.grid import Cell
from titans_platform.study.plan import place
from titans_platform.text import clock, plain_console
from titans_platform.tracking import open_store

HOLD = """
import sys, time
from pathlib import Path
from titans_platform.runs.folder import Busy, RunFolder
with RunFolder(Path(sys.argv[1]), "abc").hold():
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path, "abc")


def result(commit: str = "one") -> dict:
    return {"cell": "abc", "commit": commit, "columns": {}, "train_seconds": 8.0, "eval_seconds": 2.0}


def test_states_and_results_of_a_folder(folder):
    assert folder.state() == "missing"
    folder.update(progress={"step": 3, "steps": 10}, mlflow={"tracking": {"parent": "a study's"}})
    assert (folder.state(), folder.study_run_id()) == ("interrupted", "a study's")
    with folder.hold():
        assert (folder.state(), folder.progress()["step"]) == ("running", 3)
    folder.record_failure(ValueError("no\nluck"), "one")
    assert (folder.state(), folder.failure()["reason"]) == ("failed", "ValueError: no luck")
    folder.record_failure(RuntimeError(f"first {'frames ' * 900}last"), "c0ffee")
    reason = folder.failure()["reason"]
    assert (len(reason), reason[:19], reason[-4:]) == (605, "RuntimeError: first", "last")
    write_json(folder.path / "result.json", result())
    assert folder.state() == "done"
    write_json(folder.path / "result.json", {**result(), "cell": "abd"})
    assert folder.result() is None
    (folder.path / "result.json").write_text('{"cell": "abc", "colu')
    assert folder.result() is None


def test_a_killed_process_lets_go(folder):
    command = [sys.executable, "-c", HOLD, str(folder.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "held\n"
        assert folder.is_held()
        with pytest.raises(Busy), folder.hold(wait=0.3):
            pass
        child.kill()
    assert not folder.is_held()
    with folder.hold(wait=5):
        pass


def test_a_sign_of_life_from_another_machine_counts(folder):
    progress = {"step": 3, "steps": 10, "time": time.time()}
    folder.update(commit="one", host="node-7", progress=progress)
    assert folder.state() == "running"
    folder.record_failure(ValueError("no luck"), "one")
    assert folder.state() == "failed"
    folder.update(failure=None)
    folder.record_attempt()
    assert folder.state() == "interrupted"
    folder.update(attempt=None, progress=progress | {"time": time.time() - 1000})
    assert folder.state() == "interrupted"


def test_stale_checkpoints_start_over_and_stale_results_are_shown(folder):
    (folder.path / "checkpoints" / "step-1").mkdir(parents=True)
    for _ in range(2):
        folder.begin("one")
        assert (folder.path / "checkpoints" / "step-1").exists()
    folder.begin("two")
    assert not (folder.path / "checkpoints").exists()
    write_json(folder.path / "result.json", result("one"))
    folder.set_aside()
    assert folder.result() is None
    assert folder.shown_result().commit == "one"
    write_json(folder.path / "result.json", result("two"))
    assert folder.shown_result().commit == "two"


def test_a_plan_holds_what_is_missing_or_asked_again(tmp_path):
    cells = [Cell("LMM", seed, RunConfig(seed=seed), name) for seed, name in enumerate(("abc", "abd", "abe"))]
    write_json(cells[0].folder(tmp_path).path / "result.json", result("one"))
    write_json(cells[1].folder(tmp_path).path / "result.json", {**result("two"), "cell": "abd"})

    def todo(**options):
        plan, _ = place(replace(study_of(tmp_path, *cells, commit="two"), machine=Machine(cpus=2)), **options)
        assert [cell.name for cell in plan.stale] == ["abc"]
        return [cell.name for cell in plan.todo]

    assert (todo(), todo(rerun_stale=True)) == (["abe"], ["abc", "abe"])


def test_interrupted_cells_of_another_commit_are_listed_as_restarts(tmp_path):
    cells = [Cell("LMM", seed, RunConfig(seed=seed), name) for seed, name in enumerate(("abc", "abd", "abe"))]
    done, running, _ = folders = [cell.folder(tmp_path) for cell in cells]
    for folder in folders:
        folder.update(commit="one", progress={"step": 1258})
        (folder.path / "checkpoints" / "step-00001200").mkdir(parents=True)
    write_json(done.path / "result.json", result("one"))
    study = replace(study_of(tmp_path, *cells, commit="two"), rerun_stale=True)
    with running.hold():
        lines = [replace(study, commit=commit).restarts for commit in ("one", "two")]
    assert lines == [[], ["LMM seed 2 restarts from step 0; to keep its 1,258 steps, check out commit one"]]


def cluster(*nodes: tuple[float, float]) -> Machine:
    cpus, gpus = (sum(amounts) for amounts in zip(*nodes, strict=True))
    return Machine(cpus, gpus, tuple(Machine(*node) for node in nodes))


@pytest.mark.parametrize(("resources", "machine", "fit"), [
    (Resources(), Machine(2), 2), (Resources(cpus_per_worker=2), Machine(5), 2),
    (Resources(workers=2, gpus_per_worker=1), Machine(64, 4), 2),
    (Resources(gpus_per_worker=0.5), Machine(3, 1), 2),
    # a worker is not split over nodes
    (Resources(cpus_per_worker=2), cluster((3, 0), (3, 0)), 2),
    # the driver reserves a small fraction of a CPU, which must exist on some node
    (Resources(workers=2), cluster((2, 0), (2, 0)), 1), (Resources(workers=2), cluster((2, 0), (3, 0)), 2),
    (Resources(workers=8, cpus_per_worker=4, gpus_per_worker=1), cluster((64, 8), (64, 8)), 2),
    (Resources(gpus_per_worker=0.1), cluster((64, 1)), 10),
    (Resources(gpus_per_worker=0.6), Machine(9, 2), 2),
])  # fmt: skip
def test_concurrency_is_the_number_of_runs_that_fit(resources, machine, fit):
    assert (concurrency(resources, machine), concurrency(resources, machine, requested=1)) == (fit, 1)
    assert resources.whole_gpus(fit) <= machine.gpus
    with pytest.raises(UsageError, match=f"give 1 to {fit}|at most 1"):
        concurrency(resources, machine, requested=fit + 1)


@pytest.mark.parametrize(("resources", "machine", "lack"), [
    (Resources(cpus_per_worker=4), Machine(2), "2 CPU missing"),
    (Resources(gpus_per_worker=1), Machine(8), "1 GPU missing"),
    (Resources(workers=8, cpus_per_worker=4, gpus_per_worker=1), Machine(40, 6), "2 GPU missing"),
])  # fmt: skip
def test_runs_that_do_not_fit_are_refused_with_what_is_missing(resources, machine, lack):
    with pytest.raises(UsageError, match=f"a run takes .*: {lack}; choose a smaller scale"):
        concurrency(resources, machine)
    with pytest.raises(ClusterError, match="only 0 workers of 4 CPU and 1 GPU fit on its nodes"):
        concurrency(Resources(cpus_per_worker=4, gpus_per_worker=1), cluster((2, 4), (8, 0)))


@pytest.mark.slow
def test_study_has_one_driver_and_looking_at_a_lock_takes_it_from_nobody(tmp_path):
    run = study_of(tmp_path)
    with run.lock(), pytest.raises(UsageError, match="another sweep run"), run.lock():
        pass
    with run.lock():
        pass
    path = tmp_path / "study" / "lock"
    assert not is_locked(path)
    assert not path.parent.exists()
    with file_lock(path) as got:
        assert got
        assert is_locked(path)
    assert not is_locked(path)


def test_study_without_a_terminal_is_shown_in_lines(tmp_path, monkeypatch):
    cells = [Cell("LMM", seed, RunConfig(seed=seed), name) for seed, name in enumerate(("abc", "abd"))]
    half = {"step": 500, "steps": 1000, "loss": 2.5, "tokens_per_second": 1e4, "phase": "train"}
    cells[0].folder(tmp_path).update(progress=half)
    with cells[0].folder(tmp_path).hold():
        monkeypatch.setattr(live, "PLAIN_EVERY", 0.0)
        out = io.StringIO()
        with live.running(study_of(tmp_path, *cells), plain_console(file=out, width=100)):
            pass
        assert "1 running, 1 missing; ? left | LMM seed 0 500/1000 loss 2.500 10K tok/s" in out.getvalue()
    clocks = {None: "?", 0: "0s", 59.6: "1m00s", 185: "3m05s", 7800: "2h10m"}
    assert {seconds: clock(seconds) for seconds in clocks} == clocks


@pytest.mark.parametrize("root", ["file", "/proc/titans", "x" * 300])
def test_a_root_that_cannot_be_written_is_one_line(tmp_path, root):
    (tmp_path / "file").write_text("")
    run, line = study_of(tmp_path / root), r" cannot be written \(.*\); give another name or --root$"
    with pytest.raises(UsageError, match=line), run.lock():
        pass
    with pytest.raises(UsageError, match=line), RunFolder(run.root, "abc").hold():
        pass


def lock(root: Path) -> None:
    with file_lock(root / "a" / "lock"):
        pass


@pytest.mark.parametrize("write", [lock, lambda root: open_store(f"sqlite:///{root}/mlflow.db")])
@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_read_only_root_and_a_full_disk_are_exit_code_3(tmp_path, monkeypatch, write, number):
    kind = StorageError if number == errno.ENOSPC else NotWritable

    def fail(*arguments, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", fail)
    fix = "free space" if number == errno.ENOSPC else "change its permissions"
    with pytest.raises(kind, match=f"cannot be written: {os.strerror(number)}; {fix}") as caught:
        write(tmp_path)
    monkeypatch.undo()
    assert caught.value.exit_code == 3


def resources(workers) -> Resources:
    return Resources.model_validate_json(json.dumps({"workers": workers}))


def test_elastic_range_is_a_least_and_a_most_that_share_the_batch_and_fit(tiny_run):
    both = resources([2, 8])
    assert (both.min_workers, both.max_workers, both.cpus) == (2, 8, 8.01)
    assert resources([3, 3]) == resources(3)
    with pytest.raises(ValidationError, match="the least, 4, is more than the most, 2"):
        resources([4, 2])
    check_batch(changed(tiny_run, optim={"global_batch_size": 12}), resources([1, 4]))
    with pytest.raises(UsageError, match="8 rows do not divide among 3 workers"):
        check_batch(changed(tiny_run, optim={"global_batch_size": 8, "parallel": "fsdp"}), resources([1, 4]))
    with pytest.raises(UsageError, match="8 rows cannot be shared by 9 workers"):
        check_batch(changed(tiny_run, optim={"global_batch_size": 8}), resources([1, 9]))
    cluster = [{"CPU": 2}, {"CPU": 2}]
    assert concurrency(resources([2, 8]), Machine.of([{"CPU": 0.5}, *cluster])) == 1
    assert concurrency(resources([1, 2]), Machine.of([{"CPU": 1}, *cluster])) == 2
    with pytest.raises(ClusterError, match="a run takes 6 CPU on 6 workers"):
        concurrency(resources([6, 8]), Machine.of(cluster))


def test_elastic_range_is_written_with_a_colon():
    for text, workers in {"1": 1, "4": 4, "2:8": (2, 8), "4:4": 4}.items():
        assert Workers().convert(text, None, None) == workers
    for text in ("x", "4:2", "-1", "0", "0:2", "2:x"):
        with pytest.raises(click.BadParameter, match=r"as 2:8"):
            Workers().convert(text, None, None)
