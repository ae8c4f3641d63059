"""Checkpoints: resume is bitwise exact, corruption is detected, and writes are asynchronous."""

import json
import math
import random
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from tests.training.small import Tied, trainer
from titans_platform.errors import StorageError, TitansError, UsageError
from titans_platform.files import PATIENCE
from titans_platform.training import checkpoint
from titans_platform.training.checkpoint import Saver
from titans_platform.training.loop import Hooks, Trainer


def weights(t: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in t.model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def save(folder: Path, t: Trainer, *arguments, **options) -> None:
    with Saver(folder, t, **options) as saver:
        saver.save(*arguments)


def interrupted(folder, upto: int, seed: int = 5) -> Trainer:
    t = trainer(seed)
    while t.progress.step < upto:
        t.step()
        if t.progress.step % 3 == 0:
            save(folder, t)
    return t


def test_restored_run_goes_on_to_the_same_weights(tmp_path):
    straight, resumed = trainer(5), trainer(6)
    straight.run(Hooks())
    interrupted(tmp_path, 7)
    assert checkpoint.restore(tmp_path, resumed) == tmp_path / "step-00000006"
    resumed.run(Hooks())
    assert same(weights(straight), weights(resumed))
    assert resumed.progress.final_loss == straight.progress.final_loss


def test_restore_brings_every_rng_back_and_load_model_the_weights_alone(tmp_path):
    t = interrupted(tmp_path, 3)
    drawn = torch.rand(2).tolist(), random.random(), np.random.rand()
    manifest = tmp_path / "step-00000003" / checkpoint.MANIFEST
    manifest.unlink()
    # as earlier versions wrote it
    checkpoint.write_manifest(manifest.parent, replace(t.progress, best_step=None, best_loss=None))
    checkpoint.restore(tmp_path, t)
    assert (t.progress.step, t.progress.best_step) == (3, 0)
    assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == drawn
    fresh = Tied()
    assert checkpoint.load_model(manifest.parent, fresh) == 3
    assert same(weights(t), fresh.state_dict())


@pytest.mark.parametrize("fault", ["truncate", "delete", "manifest", "no manifest"])
def test_broken_checkpoint_is_passed_over_with_one_line(tmp_path, caplog, fault):
    interrupted(tmp_path, 6)
    latest = tmp_path / "step-00000006"
    shard, manifest = max(latest.glob("*.distcp"), key=lambda p: p.stat().st_size), latest / "manifest.json"
    {
        "truncate": lambda: shard.write_bytes(shard.read_bytes()[:-10]), "delete": shard.unlink,
        "manifest": lambda: manifest.write_text('{"schema": 1, "fi'), "no manifest": manifest.unlink,
    }[fault]()  # fmt: skip
    t = trainer(5)
    assert (checkpoint.restore(tmp_path, t), t.progress.step) == (tmp_path / "step-00000003", 3)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "step-00000006 is not whole" in line
    with pytest.raises(UsageError, match="step-00000006: not a whole checkpoint: "):
        checkpoint.load_model(latest, Tied())


def test_one_flipped_bit_anywhere_is_seen(tmp_path):
    interrupted(tmp_path, 3)
    point, model = tmp_path / "step-00000003", Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    files = sorted(point.iterdir())
    assert {".metadata", "__0_0.distcp", "manifest.json"} == {path.name for path in files}
    draw = random.Random(0)
    for path in files:
        content = path.read_bytes()
        for _ in range(100):
            flipped = bytearray(content)
            flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            path.write_bytes(flipped)
            with pytest.raises(UsageError, match="not a whole checkpoint"):
                checkpoint.load_model(point, model)
        path.write_bytes(content)
    assert same(before, model.state_dict())
    assert checkpoint.load_model(point, model) == 3


@pytest.mark.parametrize(("changes", "reason"), [
    *((text, "is not a checkpoint's") for text in ("[]", "", '{"progress": {}}')),
    ({"files": ["a"]}, "files Input should be an object"),
    ({"files": {"__0_0.distcp": 7}}, r"__0_0\.distcp.? Input should be a valid string"),
    *(({"progress": {"step": x}}, r"progress\.step Input should be a valid integer") for x in ("3", None)),
    ({"progress": {"telemetry": [1]}}, r"progress\.telemetry Input should be an object"),
])  # fmt: skip
def test_manifest_of_another_format_is_one_line(tmp_path, changes, reason):
    """Another text, or fields changed and the hash computed again."""
    interrupted(tmp_path, 3)
    path = tmp_path / "step-00000003" / checkpoint.MANIFEST
    if isinstance(changes, dict):
        content = json.loads(path.read_text()) | changes
        del content["hash"]
        changes = json.dumps(content | {"hash": checkpoint._hash_of(content)})
    path.write_text(changes)
    with pytest.raises(UsageError, match=reason):
        checkpoint.load_model(path.parent, Tied())
    with pytest.raises(UsageError, match=reason):
        checkpoint.restore(tmp_path, trainer())


class Disk:
    """A disk that is full for the next ``writes`` writes; waiting for space takes no time."""

    def __init__(self, monkeypatch, writes: float):
        self.writes, self.waited = writes, 0.0
        write = filesystem._write_item

        def full(*arguments, **options):
            self.writes -= 1
            if self.writes >= 0:
                raise OSError(28, "No space left on device")
            return write(*arguments, **options)

        def sleep(seconds: float) -> None:
            self.waited += seconds

        monkeypatch.setattr(filesystem, "_write_item", full)
        monkeypatch.setattr("time.sleep", sleep)


def test_disk_that_stays_full_is_one_line_and_its_own_exit_code(tmp_path, monkeypatch):
    disk = Disk(monkeypatch, math.inf)
    with pytest.raises(StorageError, match=r"step-00000003: cannot be written: .*No space left") as raised:
        interrupted(tmp_path, 3)
    assert raised.value.exit_code == 3
    assert disk.waited >= PATIENCE
    assert not list(tmp_path.iterdir())


def test_training_goes_on_while_the_disk_is_full_for_a_while(tmp_path, monkeypatch, caplog):
    straight, t = trainer(5), trainer(5)
    straight.run(Hooks())
    Disk(monkeypatch, 2)
    with Saver(tmp_path, t, keep=9) as saver:
        t.run(Hooks(on_checkpoint=saver.save, checkpoint_every=3))
    assert same(weights(straight), weights(t))
    assert [path.name[-2:] for path in checkpoint.saved(tmp_path)] == ["12", "09"]
    assert "step-00000003: cannot be written: " in caplog.text
    assert "the next checkpoint tries again" in caplog.text


def test_full_disk_is_borne_for_so_long(tmp_path, monkeypatch):
    t = trainer(5)
    with Saver(tmp_path, t) as saver:
        saver.save()
        saver.finish()
        Disk(monkeypatch, math.inf)
        t.step()
        with pytest.raises(StorageError, match=r"step-00000001: cannot be written"):  # noqa: PT012
            saver.save()
            for seconds in (0, 200, 301):
                monkeypatch.setattr("time.monotonic", lambda now=1000 + seconds: now)
                saver.save()
                assert seconds < 300
        saver._writing = None
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]


def test_storage_that_is_gone_for_a_while_does_not_cost_the_newest_checkpoint(tmp_path, monkeypatch):
    interrupted(tmp_path, 6)
    read, failing = Path.read_bytes, iter(range(3))

    def stale(path: Path) -> bytes:
        if next(failing, None) is not None:
            raise OSError(116, "Stale file handle")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", stale)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert checkpoint.restore(tmp_path, trainer(6)) == tmp_path / "step-00000006"


@pytest.fixture
def disk(monkeypatch) -> threading.Event:
    """A disk whose writes block until the event is set."""
    ready, write = threading.Event(), FileSystemWriter.write_data

    def waits(self, *arguments):
        assert ready.wait(60)
        return write(self, *arguments)

    monkeypatch.setattr(FileSystemWriter, "write_data", waits)
    return ready


def test_steps_continue_while_a_checkpoint_is_written(tmp_path, disk):
    t = trainer(5)
    with Saver(tmp_path, t) as saver:
        t.run(Hooks(on_checkpoint=saver.save, checkpoint_every=3), until=3)
        t.run(Hooks(), until=8)
        kept = weights(t)
        assert checkpoint.newest(tmp_path) is None
        assert saver.waited == 0
        threading.Timer(0.3, disk.set).start()
    assert saver.waited > 0.2
    resumed = trainer(6)
    assert checkpoint.restore(tmp_path, resumed) == tmp_path / "step-00000003"
    # the file has the state at its own step, unaffected by later steps
    resumed.run(Hooks(), until=8)
    assert same(kept, weights(resumed))


def test_save_waits_for_the_one_before(tmp_path, disk):
    t = trainer()
    with Saver(tmp_path, t) as saver:
        saver.save()
        t.step()
        threading.Timer(0.3, disk.set).start()
        saver.save()
        assert saver.waited > 0.2
        assert (tmp_path / "step-00000000").exists()
    assert checkpoint.newest(tmp_path) == tmp_path / "step-00000001"


def test_first_worker_stores_what_a_checkpoint_covers_before_it_counts(tmp_path):
    t = trainer()
    t.step()
    seen: list[list[str]] = []
    save(tmp_path, t, lambda: seen.append([p.name for p in tmp_path.iterdir()]))
    assert seen == [[".partial-step-00000001"]]

    def fails() -> None:
        raise TitansError("what was logged cannot be kept")

    t.step()
    with pytest.raises(TitansError, match="cannot be kept"):
        save(tmp_path, t, fails)
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-00000001"]


def test_saves_that_fail_leave_the_last_checkpoint_and_the_error_of_the_run(tmp_path, monkeypatch, caplog):
    t = interrupted(tmp_path, 3)
    t.step()

    def refused(*arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.replace", refused)
    with pytest.raises(TitansError, match=r"step-00000004: cannot be written: .*Permission denied"):
        save(tmp_path, t)
    assert checkpoint.newest(tmp_path) == tmp_path / "step-00000003"
    with pytest.raises(KeyError, match="the run"), Saver(tmp_path, t) as saver:  # noqa: PT012
        saver.save()
        raise KeyError("the run")
    assert "step-00000004: cannot be written" in caplog.text


def test_damaged_later_checkpoint_does_not_push_out_a_whole_one(tmp_path):
    interrupted(tmp_path, 9)
    for step in (6, 9):
        (tmp_path / f"step-{step:08d}" / "manifest.json").unlink()
    # what a killed write has left goes too
    (tmp_path / ".partial-step-00000001").mkdir()
    t = trainer()
    t.run(Hooks(), until=4)
    save(tmp_path, t, keep=1)
    assert checkpoint.newest(tmp_path) == tmp_path / "step-00000004"
    assert not (tmp_path / ".partial-step-00000001").exists()


def test_another_model_is_refused_by_name(tmp_path):
    interrupted(tmp_path, 3)
    wider = trainer(model=Tied(width=16))
    before = weights(wider)
    with pytest.raises(UsageError, match=r"embedding\.weight is \(11, 12\) in the checkpoint and \(11, 16\)"):
        checkpoint.restore(tmp_path, wider)
    assert same(before, weights(wider))
    model = Tied()
    model.extra = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"extra\.weight is missing in the checkpoint and \(2, 2\)"):
        checkpoint.load_model(tmp_path / "step-00000003", model)
