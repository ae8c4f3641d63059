"""The MLflow store: one run across restarts, each step logged once, one-line error if it cannot be opened."""

import json
import math
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from titans_platform.errors import UsageError
from titans_platform.runs.folder import RunFolder
from titans_platform.runs.reporter import end_orphans
from titans_platform.text import flatten
from titans_platform.tracking import TrackingStore, check_store, open_store


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> TrackingStore:
    return open_store(tmp_path_factory.mktemp("store"))


def history(store: TrackingStore, run_id: str, name: str) -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in store.client.get_metric_history(run_id, name)]


@pytest.mark.slow
def test_store_is_made_without_a_cache_and_found_again(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    run_id = open_store(tmp_path / "runs").cell_run("abc", "lmm seed 0")
    assert open_store(tmp_path / "runs").cell_run("abc", "another name") == run_id
    # prints nothing, and writes nothing to the working directory
    assert capfd.readouterr() == ("", "")
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert open_store(tmp_path / "runs").cell_run("abc", "lmm")


@pytest.mark.slow
def test_new_store_is_a_copy_of_an_empty_one(tmp_path, monkeypatch):
    """MLflow's migrations of a new file take seconds: they are run once for a user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    open_store(tmp_path / "first").cell_run("abc", "lmm")
    (template,) = (tmp_path / "cache" / "titans").iterdir()
    before = template.read_bytes()
    monkeypatch.setattr("mlflow.store.db.utils._upgrade_db", lambda engine: pytest.fail("migrated"))
    second = open_store(tmp_path / "second")
    assert second.find("titans.cell", "abc") is None
    run_id = second.cell_run("def", "lmm")
    assert second.client.get_run(run_id).info.artifact_uri.startswith((tmp_path / "second").as_uri())
    assert template.read_bytes() == before


def test_cells_are_children_of_their_study_and_made_anew_when_discarded(store):
    parent = store.study_run("ablation-smoke")
    fields = {"params": {"depth": 3}, "config": {"model": {"d": 3}}, "tags": {"row": "lmm"}}
    child = store.cell_run("cell1", "lmm seed 0", parent=parent, **fields)
    assert store.study_run("ablation-smoke") == parent
    run = store.client.get_run(child)
    assert (run.data.tags["mlflow.parentRunId"], run.data.tags["row"]) == (parent, "lmm")
    # params are the few fields to compare by; the full config is an artifact
    assert run.data.params == {"depth": "3"}
    path = MlflowClient(store.uri, store.uri).download_artifacts(child, "config.json")
    assert json.loads(Path(path).read_text()) == {"model": {"d": 3}}
    assert run.info.run_name == "lmm seed 0"
    run_id = store.cell_run("again", "again")
    store.discard_cell("again")
    assert store.cell_run("again", "again") != run_id


def test_params_many_long_or_nested_are_taken(store):
    config = {f"key{i}": i for i in range(230)} | {"long": "x" * 9000}
    params = store.client.get_run(store.cell_run("wide", "wide", params=config)).data.params
    assert (len(params), params["key229"]) == (231, "229")
    config = {"a": {"b": 1, "c": None}, "d": [{"e": 2}, {"e": 3}], "f": [1, 2]}
    assert flatten(config) == {"a.b": 1, "a.c": None, "d.0.e": 2, "d.1.e": 3, "f": [1, 2]}


def points(*steps: int, **values: float) -> list[tuple[int, int, dict[str, float]]]:
    return [(step, 1000 + step, values or {"loss": 1 / step}) for step in steps]


def test_steps_are_logged_once_across_restarts_and_lost_answers(store, monkeypatch):
    run_id = store.cell_run("resumed", "resumed")
    store.run(run_id).send(points(*range(1, 31)))
    after = open_store(store.uri).run(run_id)
    after.send(points(*range(21, 41)))
    after.send(points(*range(31, 51)))
    after.close()
    assert [step for step, _ in history(store, run_id, "loss")] == list(range(1, 51))
    assert store.client.get_run(run_id).info.status == "FINISHED"
    log, answers = store.run(store.cell_run("lost", "lost")), store.client.log_batch

    def lost(*arguments, **options):
        answers(*arguments, **options)
        raise MlflowException("connection reset by peer")

    monkeypatch.setattr(store.client, "log_batch", lost)
    with pytest.raises(MlflowException):
        log.send(points(1, 2, 3))
    monkeypatch.setattr(store.client, "log_batch", answers)
    log.send(points(1, 2, 3, 4))
    assert [step for step, _ in history(store, log.run_id, "loss")] == [1, 2, 3, 4]


def test_summary_leaves_out_what_is_not_finite(store):
    run_id = store.cell_run("nan", "nan")
    log = store.run(run_id)
    log.summary({"column.reasoning": 0.5, "column.broken": math.inf})
    log.close("FAILED")
    assert store.client.get_run(run_id).data.metrics == {"column.reasoning": 0.5}
    assert store.client.get_run(run_id).info.status == "FAILED"


def test_run_whose_process_died_ends_with_its_last_sign_of_life(tmp_path):
    store = open_store(tmp_path)
    parent = store.study_run("tiny-small")
    run_id = store.cell_run("abc", "lmm", parent=parent)
    store.run(run_id)
    folder, died = RunFolder(tmp_path, "abc"), round(time.time()) - 1000
    folder.update(progress={"step": 3, "steps": 10, "time": died})
    end_orphans(store, parent, tmp_path)
    ended = store.client.get_run(run_id).info
    assert (ended.status, ended.end_time) == ("KILLED", 1000 * died)


def of_another_program(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
        connection.execute("INSERT INTO alembic_version VALUES ('from the future')")


UNREADABLE = {
    "not a database": lambda path: path.write_text("not a database " * 100), "a folder": Path.mkdir,
    "of another program": of_another_program,
    "under a file": lambda path: (path.parent.rmdir(), path.parent.write_text("")),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNREADABLE)
def test_store_that_cannot_be_opened_is_one_line(tmp_path, kind):
    root = tmp_path / "runs"
    root.mkdir()
    UNREADABLE[kind](root / "mlflow.db")
    with pytest.raises(UsageError, match=r"tracking store .*mlflow\.db: cannot be opened: ") as caught:
        open_store(root)
    assert "\n" not in str(caught.value)


def test_addresses_that_cannot_be_opened_are_refused_and_checking_makes_no_store(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(UsageError, match="no answer"):
        open_store(uri)
    with pytest.raises(UsageError, match="should start with"):
        open_store("file:///tmp/mlruns")
    check_store(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_first_writers_at_once_all_succeed(tmp_path):
    code = (
        "import sys; from pathlib import Path; from titans_platform.tracking import open_store;"
        "s = open_store(Path(sys.argv[1])); r = s.run(s.cell_run(sys.argv[2], 'x'));"
        "r.send([(1, 0, {'loss': 1.0})]); r.close()"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), f"cell{i}"]) for i in range(2)]
    assert [writer.wait(240) for writer in writers] == [0, 0]
    store = open_store(tmp_path)
    assert len(store.client.search_runs([store.experiment])) == 2
