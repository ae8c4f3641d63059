"""A full disk: a small file system is filled up while a run writes a checkpoint to it. The faults that this
found are also tested separately, for users who may not mount a file system.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.runs.test_execute import changed, run, weights_hash
from titans_platform.data import prepare
from titans_platform.errors import StorageError, TitansError
from titans_platform.runs.folder import RunFolder
from titans_platform.runs.load import spec_for
from titans_platform.runs.reporter import Journal, Reporter
from titans_platform.tracking import open_store

CHECKPOINT_AT, LEFT = 21, 20_000
"""The step whose checkpoint finds the disk full, and the free bytes at that point."""

# mounted in a private namespace, which ends with the process
MOUNTED = [
    *("unshare", "--user", "--map-root-user", "--mount", "sh", "-c"),
    'mount -t tmpfs -o size=3m titans "$0" && exec "$@"',
]

PROGRAM = """
import json, os, shutil, sys
from pathlib import Path
from torch.distributed.checkpoint import filesystem
from titans_platform.cli import run
from titans_platform.training.checkpoint import Saver

config, disk, kept = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
ballast, write = disk / "ballast", filesystem._write_item

def while_it_fills(*arguments, **options):
    if list(disk.glob(f"runs/cells/*/checkpoints/.partial-step-{STEP:08d}")):
        filesystem._write_item = write
        ballast.write_bytes(bytes(shutil.disk_usage(disk).free - LEFT))
    return write(*arguments, **options)

filesystem._write_item = while_it_fills
# five minutes are too long for a test
Saver.__init__.__kwdefaults__["patience"] = 0.5
code = run(["train", config, "--root", str(disk / "runs")])
names = sorted(path.name for path in disk.glob("runs/cells/*/checkpoints/*"))
print(json.dumps({"code": code, "checkpoints": names, "free": shutil.disk_usage(disk).free}))
ballast.unlink()
code = run(["train", config, "--root", str(disk / "runs")])
print(json.dumps({"code": code}))
# the file system ends with this process
shutil.copytree(disk / "runs", kept)
"""


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """An empty mount point."""
    (folder := tmp_path / "disk").mkdir()
    command = ["sh", "-c", '"$@"', "sh", *MOUNTED, folder, "true"]
    tried = subprocess.run(command, capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"this user may not mount a file system: {tried.stderr.strip()}")
    return folder


def full(*arguments, **options):
    raise StorageError("No space left on device")


@pytest.mark.slow
def test_records_that_have_no_room_do_not_replace_the_error_of_the_run(tiny_run, tmp_path, monkeypatch):
    prepare(tiny_run.data, tmp_path)
    monkeypatch.setattr("titans_platform.runs.execute.evaluate", lambda *a, **k: 1 / 0)
    monkeypatch.setattr(RunFolder, "record_failure", full)
    monkeypatch.setattr(RunFolder, "record_attempt", full)
    with pytest.raises((ZeroDivisionError, TitansError), match="division by zero"):
        run(tiny_run, tmp_path)


def test_progress_without_room_is_said_once_and_the_log_ends_with_a_line(
    tiny_run, tmp_path, monkeypatch, caplog
):
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


@pytest.mark.slow
def test_full_disk_ends_a_run_with_a_line_and_with_room_it_ends_the_same(tiny_run, disk, tmp_path):
    cfg = changed(tiny_run, optim={"steps": 40}, checkpoint={"every": 7})
    prepare(cfg.data, tmp_path)
    straight = run(cfg, tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(cfg.model_dump_json())
    program = PROGRAM.replace("STEP", str(CHECKPOINT_AT)).replace("LEFT", str(LEFT))
    command = [sys.executable, "-c", program, str(file), str(disk), str(tmp_path / "kept")]
    done = subprocess.run([*MOUNTED, str(disk), *command], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    full, again = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert (full["code"], full["checkpoints"]) == (3, ["step-00000007", "step-00000014"])
    assert full["free"] < 2 * LEFT
    (line,) = re.findall(r"^error: .*", done.stderr, re.MULTILINE)
    # the third that fails ends it where half a second has gone by, else the last
    assert re.search(r"step-000000(35|40): cannot be written: .*No space left on device; run the same", line)
    assert "Traceback" not in done.stderr
    assert again["code"] == 0
    shutil.move(tmp_path / "kept", disk / "runs")
    folder = spec_for(cfg, disk / "runs").folder
    result = folder.result()
    assert result is not None
    assert weights_hash(cfg, folder) == weights_hash(cfg, spec_for(cfg, tmp_path).folder)
    for key in ("columns", "tasks", "final_train_loss", "telemetry", "tokens"):
        assert getattr(result, key) == getattr(straight, key)
    store = open_store(disk / "runs")
    points = store.client.get_metric_history(result.mlflow_run_id, "loss")
    assert sorted(point.step for point in points) == list(range(1, 41))
