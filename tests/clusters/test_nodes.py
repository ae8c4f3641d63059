"""Two real Ray nodes: a study is their job, a node and the driver are killed, the numbers stay the same."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.small import study, until
from titans_platform.clusters.local import family, find
from titans_platform.data import prepare
from titans_platform.runs.execute import execute
from titans_platform.runs.folder import RunFolder
from titans_platform.runs.load import spec_for
from titans_platform.study.grid import expand, load_study

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

# three long cells: when the second node starts, the first must not be through with all of them
THIRD = {"name": "w/o Momentum", "set": {"model.memory.momentum": False}}
STUDY = study(steps=2500, items=20, more_rows=(THIRD,))


def titans(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "titans_platform", *arguments], stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, **options,
    )  # fmt: skip


def ended(process: subprocess.Popen[str], timeout: float = 400) -> tuple[int, str]:
    out, _ = process.communicate(timeout=timeout)
    return process.returncode, out


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two nodes that are up; the folder of their state."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "two.yaml").write_text("kind: nodes\nnodes: 2\n")
    monkeypatch.setenv("TWO", str(tmp_path / "two.yaml"))
    code, out = ended(titans("cluster", "up", os.environ["TWO"], "--json"))
    assert code == 0, out
    state = tmp_path / "state" / "titans" / "clusters" / "two"
    recorded = json.loads((state / "state.json").read_text())
    everyone = [member for process in recorded["processes"] for member in family(process)]
    try:
        yield state
    finally:
        code, out = ended(titans("cluster", "down", os.environ["TWO"]))
        assert code == 0, out
        assert not any(member.is_running() and member.status() != "zombie" for member in everyone)
        assert not Path(recorded["folder"]).exists()


def node_at_work(state: Path, cells: dict[str, RunFolder]) -> list[Any] | None:
    """The processes of a node, not the head, on which a cell is being trained."""
    at_work = {cell.record().get("pid") for cell in cells.values() if cell.is_held() and cell.progress()}
    for process in json.loads((state / "state.json").read_text())["processes"][1:]:
        members = family(process)
        if at_work & {member.pid for member in members}:
            return members
    return None


def driver_of(state: Path) -> int | None:
    """The process of the study: a child of the head's, and not one of Ray's own."""
    for member in family(json.loads((state / "state.json").read_text())["processes"][0]):
        if member.cmdline()[1:4] == ["-m", "titans_platform", "sweep"]:
            return member.pid
    return None


@pytest.mark.nightly
def test_node_and_the_driver_killed_the_study_ends_with_the_same_numbers(nodes, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "tiny.yaml").write_text(json.dumps(STUDY))
    root = tmp_path / "runs"
    cells = expand(load_study(str(elsewhere / "tiny.yaml")), "small")
    prepare(cells[0].config.data, tmp_path / "alone")
    alone = {cell.row: execute(spec_for(cell.config, tmp_path / "alone")) for cell in cells}
    folders = {row: RunFolder(root, result.cell) for row, result in alone.items()}

    line = ["sweep", "run", "tiny.yaml", "--scale", "small"]
    line += ["--cluster", os.environ["TWO"], "--root", str(root)]
    first = titans(*line, cwd=elsewhere)
    try:
        at_work = until(lambda: node_at_work(nodes, folders), first)
        _check_private(nodes)
        for member in reversed(at_work):
            with contextlib.suppress(Exception):  # one that ended by itself meanwhile
                member.kill()
        until(lambda: any(folder.result() for folder in folders.values()), first)
        if pid := driver_of(nodes):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        code, out = ended(first)
    finally:
        first.kill()
        first.wait()
    # unless it was done before it could be killed
    assert (code == 137 and "run the same command again to resume" in out) or code == 0, out

    code, out = ended(titans(*line, cwd=elsewhere))
    assert code == 0, out
    for row, result in alone.items():
        actual = folders[row].result()
        for key in ("columns", "tasks", "final_train_loss", "parameters", "config", "tokens"):
            assert getattr(actual, key) == getattr(result, key), (row, key)

    code, out = ended(titans("cluster", "status", os.environ["TWO"], "--json"))
    assert code == 0, out
    report = json.loads(out)
    assert sorted(node["alive"] for node in report["nodes"]) == [False, True]
    assert {job["state"] for job in report["jobs"]} <= {"succeeded", "failed"}
    code, out = ended(titans("cluster", "logs", os.environ["TWO"], "none"))
    jobs = ", ".join(job["id"] for job in report["jobs"])
    assert (code, out) == (3, f"error: cluster two: no job 'none'; its jobs: {jobs}\n")
    _check_token(nodes, report["where"], elsewhere, line)


def _check_private(state: Path) -> None:
    """Other users can neither enter the folder that workers import code from, nor connect from elsewhere."""
    recorded = json.loads((state / "state.json").read_text())
    assert Path(recorded["folder"]).stat().st_mode & 0o777 == 0o700
    members = [member for process in recorded["processes"] for member in family(process)]
    listening = set()
    for member in members:
        with contextlib.suppress(Exception):  # one that ended meanwhile
            collected = [c for c in member.net_connections("inet") if c.status == "LISTEN"]
            listening |= {c.laddr.ip.removeprefix("::ffff:") for c in collected}
    assert listening == {"127.0.0.1"}


def _check_token(state: Path, address: str, folder: Path, line: list[str]) -> None:
    """Refused with another token; nowhere to be seen but in its file."""
    token = (state / "token").read_text()
    spec = {"kind": "existing", "address": address, "token": {"file": str(folder / "wrong")}}
    spec |= {"storage": str(folder), "mlflow": "http://localhost.invalid:5000"}
    (folder / "other.yaml").write_text(json.dumps(spec))
    (folder / "wrong").write_text("f" * 64)
    changed = [part if part != os.environ["TWO"] else "other.yaml" for part in line]
    code, out = ended(titans(*changed, cwd=folder))
    assert (code, out.count("\n")) == (3, 1)
    assert "rejects the token" in out
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert token.encode() not in path.read_bytes()
    for log in state.glob("*.log"):
        assert token not in log.read_text()
    assert find({"pid": os.getpid(), "born": 0}) is None
