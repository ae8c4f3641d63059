"""The run log during an MLflow outage: training does not block, and no point is lost or duplicated."""

import json
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlflow import MlflowClient

from tests.runs.test_execute import full
from tests.small import until
from titans_platform.cli.live import progress_line
from titans_platform.data import prepare
from titans_platform.errors import StorageError
from titans_platform.runs import reporter
from titans_platform.runs.execute import execute
from titans_platform.runs.folder import RunFolder
from titans_platform.runs.load import spec_for
from titans_platform.runs.reporter import Journal, Reporter, curve, send_left, unsent
from titans_platform.runs.spec import Resources, RunSpec, Tracking
from titans_platform.text import clock
from titans_platform.tracking import open_store


class Sink:
    """A run's log that remembers; what raises is asked first."""

    run_id = "r1"

    def __init__(self, fails=lambda: None):
        self.points: list[int] = []
        self.fails = fails

    def send(self, points) -> None:
        self.fails()
        self.points += [step for step, _, _ in points]


def opened(root: Path, sink: Sink) -> Journal:
    result = Journal(RunFolder(root, "run"), lambda: sink)  # type: ignore[arg-type]
    result.start()
    return result


@pytest.fixture(autouse=True)
def soon(monkeypatch) -> None:
    monkeypatch.setattr(reporter, "SEND_EVERY", 0.05)
    monkeypatch.setattr(reporter, "END_SECONDS", 5.0)


def test_what_is_logged_is_in_the_file_and_sent_in_order(tmp_path):
    sink = Sink()
    log = opened(tmp_path, sink)
    for step in range(1, 301):
        log.metrics(step, {"loss": 1 / step, "surprise": float("nan")})
    log.sync()
    lines = [json.loads(line) for line in (tmp_path / "cells/run/metrics.jsonl").read_text().splitlines()]
    assert ([line["step"] for line in lines], lines[0]["values"]) == (list(range(1, 301)), {"loss": 1.0})
    assert unsent(RunFolder(tmp_path, "run"))
    assert log.close(lambda run: None, "FINISHED") is None
    assert sink.points == list(range(1, 301))
    assert not unsent(RunFolder(tmp_path, "run"))


def test_losses_are_logged_often_and_the_rest_with_the_telemetry(tiny_run, tmp_path):
    """Most of a store is metrics: 200 losses of a run, and 50 values of each other metric."""
    cfg = tiny_run.model_copy(update={"optim": tiny_run.optim.model_copy(update={"steps": 1000})})
    reporter = Reporter(RunSpec(cfg, tmp_path, "run", "c0ffee", "data"))
    reporter.journal = Journal(RunFolder(tmp_path, "run"), lambda: pytest.fail("connected"))
    for step in range(1, 1001):
        validated = {"validation_loss": 2.0} if step == 333 else {}
        reporter.on_step(step, {"loss": 1.0, "lr": 0.1, "tokens_per_second": 9.0} | validated)
    assert [step for step, _ in curve(tmp_path / "cells/run")] == sorted({*range(5, 1001, 5), 333})
    assert [step for step, _ in curve(tmp_path / "cells/run", "lr")] == list(range(20, 1001, 20))
    assert curve(tmp_path / "cells/run", "validation_loss") == [(333, 2.0)]


def test_steps_that_compile_on_a_gpu_say_nothing_of_the_time_left(tiny_run, tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr("titans_platform.runs.reporter.time.monotonic", lambda: now)
    reporter = Reporter(RunSpec(tiny_run, tmp_path, "run", "c0ffee", "data", Resources(gpus_per_worker=1)))
    shown = []
    for step, seconds in enumerate((120, 90, 2), 1):
        now += seconds
        reporter.on_step(step, {"loss": 1.0, "lr": 0.1, "tokens_per_second": 8 / seconds})
        progress = RunFolder(tmp_path, "run").progress()
        assert RunFolder(tmp_path, "run").request_interrupt()
        shown.append((progress["phase"], progress_line(progress)))
    fast = f"loss 1.000  {tiny_run.tokens_per_step // 2} tok/s  {clock(2 * (tiny_run.optim.steps - 3))} left"
    assert shown == [("compile", "loss 1.000"), ("train", "loss 1.000"), ("train", fast)]


def test_killed_process_leaves_half_a_line_and_the_next_goes_on(tmp_path):
    first = Journal(RunFolder(tmp_path, "run"), lambda: pytest.fail("connected"))
    for step in (1, 2, 3):
        first.metrics(step, {"loss": 1.0})
    with (tmp_path / "cells/run/metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "ti')
    assert curve(tmp_path / "cells/run") == [(1, 1.0), (2, 1.0), (3, 1.0)]
    assert curve(tmp_path / "cells/run", "surprise") == curve(tmp_path) == []
    sink = Sink()
    log = opened(tmp_path, sink)
    # the checkpoint was of step 1
    for step in (2, 3, 4, 5):
        log.metrics(step, {"loss": 1.0})
    assert log.close(lambda run: None, "FINISHED") is None
    assert sink.points == [1, 2, 3, 4, 5]


def test_training_does_not_wait_for_a_server_that_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(reporter, "END_SECONDS", 0.3)
    over = threading.Event()
    log, started = opened(tmp_path, Sink(lambda: over.wait(60))), time.monotonic()
    for step in range(1, 50):
        log.metrics(step, {"loss": 1.0})
    log.sync()
    line = log.close(lambda run: None, "FINISHED")
    assert time.monotonic() - started < 5
    assert "49 steps of its log did not reach MLflow" in (line or "")
    over.set()


def test_full_disk_keeps_it_in_memory(tmp_path, monkeypatch):
    log = Journal(RunFolder(tmp_path, "run"), lambda: pytest.fail("connected"))
    log.metrics(1, {"loss": 1.0})
    whole = (tmp_path / "cells/run/metrics.jsonl").read_bytes()

    def closed(self, *arguments, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", closed)
        log.metrics(2, {"loss": 1.0})
        with pytest.raises(StorageError, match=r"metrics\.jsonl: cannot be written: No space left"):
            log.sync()
    assert (tmp_path / "cells/run/metrics.jsonl").read_bytes() == whole
    log.metrics(3, {"loss": 1.0})
    log.sync()
    lines = (tmp_path / "cells/run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


@pytest.mark.slow
def test_store_that_is_away_for_a_while_gets_every_point_once(tiny_run, tmp_path, monkeypatch):
    """tools/chaos/test_mlflow_server.py has a server."""
    prepare(tiny_run.data, tmp_path)
    store, answers = open_store(tmp_path), MlflowClient.log_batch
    spec = spec_for(tiny_run, tmp_path, tracking=Tracking(store.uri, "away"))
    with monkeypatch.context() as away:
        away.setattr(reporter, "connected", fails)
        result = execute(spec)
        assert result.mlflow_run_id is None
        (line,) = send_left(tmp_path)
        assert line.startswith(f"run {spec.name}: 20 steps of its log did not reach MLflow")
    with monkeypatch.context() as lost:  # what was sent arrives, the answer does not
        lost.setattr(MlflowClient, "log_batch", lambda *args, **how: (answers(*args, **how), fails()))
        (line,) = send_left(tmp_path)
        assert "20 steps" in line
    assert send_left(tmp_path) == []
    run = store.client.get_run(store.find("titans.cell", spec.name))
    assert (run.info.status, run.data.metrics["reasoning"]) == ("FINISHED", result.columns["reasoning"])
    history = partial(store.client.get_metric_history, run.info.run_id)
    assert [point.step for point in history("loss")] == list(range(1, 21))
    waited = [point.value for point in history("checkpoint_wait_seconds")]
    assert (len(waited), waited) == (20, sorted(waited))


def fails(*_: object) -> None:
    raise ConnectionError("refused")


def test_points_that_are_refused_for_a_while_are_sent_once_and_in_order(tmp_path):
    away = [False, True, True]
    log = opened(tmp_path, sink := Sink(lambda: fails() if away and away.pop(0) else None))
    for step in range(1, 61):
        log.metrics(step, {"loss": 1 / step})
        time.sleep(0.005)
    until(lambda: not away)
    assert log.close(lambda run: None, "FINISHED") is None
    assert sink.points == list(range(1, 61))


def test_progress_without_room_is_said_once_and_the_log_has_an_end(tiny_run, tmp_path, monkeypatch, caplog):
    prepare(tiny_run.data, tmp_path)
    spec = spec_for(tiny_run, tmp_path)
    spec.folder.path.mkdir(parents=True)
    reporter = Reporter(spec)
    for _ in range(2):
        with monkeypatch.context() as patched:
            patched.setattr(RunFolder, "update", full)
            reporter.start(1)
            reporter.start(2)
        reporter.start(3)
    assert [record.message for record in caplog.records] == ["No space left on device"] * 2
    log, ended = Journal(RunFolder(tmp_path, "run"), lambda: SimpleNamespace(run_id="r")), []  # type: ignore[arg-type]
    monkeypatch.setattr(Journal, "keep", full)
    monkeypatch.setattr(Journal, "_send", lambda self: setattr(self, "_run", "r"))
    line = log.close(ended.append, "FINISHED")
    assert ended == ["r"]
    assert "its end did not reach MLflow (No space left on device)" in line
