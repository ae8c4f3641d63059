"""Ctrl-C, SIGTERM and preempted workers: a checkpoint is written first, and no number changes."""

# ruff: noqa: PT012  what raises is a signal, at any of a block's statements
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.runs.test_execute import UNLIKE, run, weights_hash
from tests.small import changed, until
from titans_platform.config import RunConfig
from titans_platform.data import prepare
from titans_platform.errors import Interrupted
from titans_platform.runs import preemption
from titans_platform.runs.execute import execute
from titans_platform.runs.folder import RunFolder
from titans_platform.runs.load import spec_for
from titans_platform.runs.preemption import interruptible
from titans_platform.runs.spec import Resources
from titans_platform.training.checkpoint import newest, saved

# a run of 80 steps: long enough to be interrupted, and with its next checkpoint far away
SLOW = """
import sys, time
import titans_platform.training.loop as loop
step = loop.Trainer.step
def slow(self, *arguments, **options):
    time.sleep(0.05)
    return step(self, *arguments, **options)
loop.Trainer.step = slow
from titans_platform.cli import main
main(sys.argv[1:])
"""


def steps_of(folder: RunFolder) -> int:
    return int((folder.progress() or {}).get("step", 0))


@pytest.fixture
def cfg(tiny_run) -> RunConfig:
    return changed(tiny_run, optim={"steps": 80}, checkpoint={"every": 70})


def started(cfg: RunConfig, root: Path, *more: str) -> tuple[subprocess.Popen, RunFolder]:
    """`titans train` in a subprocess, once it has done a few steps."""
    prepare(cfg.data, root)
    config = root / "run.yaml"
    config.write_text(cfg.model_dump_json())
    command = [sys.executable, "-c", SLOW, "train", str(config), "--root", str(root), *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return process, RunFolder(root, "")


@pytest.mark.slow
@pytest.mark.parametrize("sent", [pytest.param(signal.SIGINT, marks=pytest.mark.nightly), signal.SIGTERM])
def test_signal_to_the_command_is_a_checkpoint_at_the_step_it_is_at(cfg, tmp_path, sent):
    process, _ = started(cfg, tmp_path)
    folder = spec_for(cfg, tmp_path).folder
    until(lambda: steps_of(folder) > 2, process)
    process.send_signal(sent)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130, out
    (point,) = saved(folder.path / "checkpoints")
    step = int(point.name[-3:])
    assert 2 < step < 70
    assert out.count("saving a checkpoint after this step; press Ctrl-C again to stop at once\n") == 1
    assert f"error: interrupted after step {step}, at a checkpoint; run the same command to resume" in out
    assert folder.state() == "interrupted"
    again = execute(spec_for(cfg, tmp_path))
    straight = run(cfg, tmp_path, name="straight")
    assert again.model_dump(exclude=UNLIKE | {"cell"}) == straight.model_dump(exclude=UNLIKE | {"cell"})
    assert weights_hash(cfg, folder) == weights_hash(cfg, RunFolder(tmp_path, "straight"))


def test_run_that_is_asked_ends_at_its_step_and_forgets_it(cfg, tmp_path, monkeypatch):
    prepare(cfg.data, tmp_path)
    spec, look = spec_for(cfg, tmp_path), preemption.PreemptionGuard.poll

    def ask(self, saver, before_commit):
        if saver.trainer.progress.step == 5:
            spec.folder.request_interrupt()
        look(self, saver, before_commit)

    monkeypatch.setattr(preemption.PreemptionGuard, "poll", ask)
    with pytest.raises(Interrupted, match="after step 5"):
        execute(spec)
    assert newest(spec.folder.path / "checkpoints").name == "step-00000005"
    assert not spec.folder.interrupt_requested()
    assert spec.folder.failure() is None
    monkeypatch.undo()
    assert execute(spec).cell == spec.name


def test_second_signal_ends_at_once(tmp_path):
    folder, before = RunFolder(tmp_path, "run"), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), interruptible(folder):
        os.kill(os.getpid(), signal.SIGTERM)
        assert folder.interrupt_requested()
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("it went on")
    assert signal.getsignal(signal.SIGTERM) == before


def test_signal_waits_for_a_step_for_a_while_and_past_training_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(preemption, "GRACE", 0.2)
    folder = RunFolder(tmp_path, "run")
    with pytest.raises(KeyboardInterrupt), interruptible(folder):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.update(progress={"phase": "evaluate"})
    monkeypatch.setattr(preemption, "GRACE", 30)
    with pytest.raises(KeyboardInterrupt), interruptible(folder):
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("it went on")


@pytest.mark.nightly
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_worker_that_is_killed_or_told_to_end_changes_no_number(tiny_run, tmp_path, sent):
    """A worker that gets SIGTERM writes a checkpoint first; one that is killed is started again."""
    ends = sent == signal.SIGTERM
    cfg = changed(tiny_run, optim={"steps": 300}, checkpoint={"every": 290 if ends else 5})
    prepare(cfg.data, tmp_path)
    straight = execute(spec_for(cfg, tmp_path, Resources(workers=2), name="straight"))
    folder, struck = RunFolder(tmp_path, "struck"), []
    kept = lambda: [path.name for path in saved(folder.path / "checkpoints")]  # noqa: E731

    def strike() -> None:
        until(lambda: steps_of(folder) > 5 and folder.progress()["pid"] != os.getpid() and (ends or kept()))
        struck.append(folder.progress()["pid"])
        os.kill(struck[0], sent)
        until(kept)
        struck.append(int(kept()[-1][-3:]))

    striker = threading.Thread(target=strike, daemon=True)
    striker.start()
    result = execute(spec_for(cfg, tmp_path, Resources(workers=2), name="struck"))
    striker.join(10)
    assert struck[1] < 290
    assert ends or folder.progress()["pid"] != struck[0]
    for key in ("final_train_loss", "columns", "telemetry"):
        assert getattr(result, key) == getattr(straight, key)


class Together:
    """A stand-in for Saver; ``reported`` is what the other ranks report."""

    def __init__(self, reported: int = 0):
        self.reported, self.polled, self.saves = reported, [], []

    def max_over_ranks(self, own: int) -> int:
        self.polled.append(own)
        return max(own, self.reported)

    def save(self, before_commit) -> None:
        self.saves.append(before_commit)

    def finish(self) -> None:
        pass


@pytest.mark.parametrize("rank", [0, 1])
def test_all_workers_ask_ray_at_the_step_at_which_the_first_says_so(tmp_path, monkeypatch, rank):
    polled = []
    monkeypatch.setattr(preemption, "rank", lambda: rank)
    monkeypatch.setattr(preemption, "ASK_EVERY", 0.0)
    monkeypatch.setattr("ray.train.get_preemption_info", lambda: polled.append(rank))
    guard = preemption.PreemptionGuard(RunFolder(tmp_path, "run"), several=True)
    # the first worker decides when to ask; the others never ask on their own
    alone = Together()
    guard.poll(alone, None)
    assert (alone.polled, polled) == ([1 - rank], [0] * (1 - rank))
    guard.poll(Together(reported=1), None)
    assert (polled, alone.saves) == ([rank] * (2 - rank), [])
