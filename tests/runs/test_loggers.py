"""Loggers beside MLflow: TensorBoard, W&B, and somebody's own class."""

import struct
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from tensorboardX.proto.event_pb2 import Event

from titans_platform.config import LogConfig
from titans_platform.errors import Interrupted, UsageError
from titans_platform.runs.reporter import Logger, Reporter
from titans_platform.runs.spec import RunSpec

calls: list[tuple] = []


class Recorder(Logger):
    def start(self, step):
        calls.append(("start", self.spec.name, step))

    def log(self, step, metrics):
        calls.append((step, dict(metrics)))

    def close(self):
        calls.append(("close",))


class Broken(Recorder):
    def log(self, step, metrics):
        raise OSError("no space left")


@pytest.fixture
def spec(tiny_run, tmp_path):
    logged = lambda names: tiny_run.model_copy(update={"log": LogConfig(loggers=[*names])})  # noqa: E731
    return lambda *names: RunSpec(logged(names), tmp_path, "run", "c0ffee", "data")


def trained(spec: RunSpec, steps: range) -> None:
    """Report ``steps`` of a run, the last of which is interrupted."""
    reporter = Reporter(spec)
    reporter.start(steps.start - 1)
    for step in steps:
        reporter.on_step(step, {"loss": float(step), "lr": 0.1, "tokens_per_second": 9.0})
    reporter.fail(Interrupted("enough"))


def events(folder) -> Iterator[Event]:
    """Events of all files in the order of their names; a record is a length, its check, data, its check."""
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack("<Q", data[at : at + 8])
            yield Event.FromString(data[at + 12 : at + 12 + size])
            at += size + 16


def test_own_logger_hears_of_every_step_and_a_failing_one_is_left_out(spec, caplog):
    calls.clear()
    trained(spec(f"{__name__}:Recorder"), range(1, 4))
    values = [(step, {"loss": float(step), "lr": 0.1, "tokens_per_second": 9.0}) for step in (1, 2, 3)]
    assert calls == [("start", "run", 0), *values, ("close",)]
    calls.clear()
    trained(spec(f"{__name__}:Broken", f"{__name__}:Recorder"), range(1, 4))
    assert [line.message for line in caplog.records] == ["log.loggers: Broken: no space left"]
    assert [step for step, *_ in calls] == ["start", "start", 1, 2, 3, "close"]


def test_tensorboard_replaces_what_came_after_the_checkpoint(spec):
    run = spec("examples.loggers:TensorBoard")
    trained(run, range(1, 6))
    trained(run, range(4, 7))
    shown: dict[int, float] = {}
    for event in events(run.folder.path / "tensorboard"):
        # as TensorBoard reads it: a session that starts at a step purges what is there from it on
        if event.HasField("session_log"):
            shown = {step: value for step, value in shown.items() if step < event.step}
        for value in event.summary.value:
            if value.tag == "loss":
                assert event.step not in shown
                shown[event.step] = value.simple_value
    assert shown == {step: float(step) for step in range(1, 7)}


def test_wandb_gets_the_config_and_resumes(spec, monkeypatch):
    asked, logged = {}, []
    log = lambda values, step: logged.append((step, values["loss"]))  # noqa: E731
    run = SimpleNamespace(log=log, finish=lambda: None, summary={})
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **how: asked.update(how) or run))
    trained(spec("examples.loggers:WeightsAndBiases"), range(3, 5))
    assert (asked["id"], asked["resume"], asked["config"]["optim"]["steps"]) == ("run", "allow", 20)
    assert logged == [(3, 3.0), (4, 4.0)]


@pytest.mark.parametrize(("name", "says"), [
    ("examples.loggers:WeightsAndBiases", "log.loggers: wandb: wandb is not installed; pip install wandb"),
    ("tensorboard", "log.loggers: 'tensorboard' is not an import path; name a class of your own"),
    ("json:JSONDecoder", "log.loggers: json:JSONDecoder is not a subclass"),
])  # fmt: skip
def test_what_cannot_be_logged_to_is_refused(spec, name, says, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError) as error:
        Reporter(spec(name))
    assert str(error.value).startswith(says)
