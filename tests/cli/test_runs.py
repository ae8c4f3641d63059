"""`titans runs` and `titans clean`: what is listed, tagged, deleted and kept."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from tests.small import trained
from titans_platform import cli
from titans_platform.runs.folder import RunFolder


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A root with one finished run."""
    root = tmp_path_factory.mktemp("trained")
    trained(root, checkpoint={"every": 5, "keep": 3})
    return root


@pytest.fixture
def root(finished, tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "tmp"))
    return shutil.copytree(finished, tmp_path / "root")


def titans(root: Path, *words: str) -> int:
    return cli.run([*words, "--root", str(root)])


def listed(root: Path, capsys, *words: str) -> list[dict]:
    assert titans(root, "runs", "list", "--json", *words) == 0
    return json.loads(capsys.readouterr().out)


def test_runs_are_listed_and_filtered_by_state_study_and_tag(root, capsys):
    (cell,) = (root / "cells").iterdir()
    study = root / "studies" / "tiny-small"
    study.mkdir(parents=True)
    (study / "cells.json").write_text(json.dumps({"cells": [{"cell": cell.name}]}))
    (run,) = listed(root, capsys)
    assert (run["name"], run["state"], run["variant"], run["steps"]) == (cell.name, "done", "lmm", 20)
    assert run["studies"] == ["tiny-small"]
    assert run["bytes"] > 10_000
    assert titans(root, "runs", "tag", cell.name[:5], "baseline", "lr=3e-3") == 0
    assert titans(root, "runs", "tag", cell.name[:5], "other", "--dry-run") == 0
    capsys.readouterr()
    for filters, count in (
        ("--tag baseline", 1), ("--tag baseline --tag other", 0), ("--state failed", 0),
        ("--study tiny", 1), ("--study tin", 0),
    ):  # fmt: skip
        assert len(listed(root, capsys, *filters.split())) == count, filters
    assert titans(root, "runs", "tag", cell.name, "baseline", "--remove") == 0
    capsys.readouterr()
    (run,) = listed(root, capsys)
    assert run["tags"] == ["lr=3e-3"]
    assert titans(root, "runs", "list") == 0
    assert "tiny-small #lr=3e-3" in capsys.readouterr().out


def test_a_deleted_run_is_gone_and_a_running_one_is_refused(root, capsys, refused):
    (cell,) = (root / "cells").iterdir()
    assert titans(root, "runs", "delete", cell.name, "--dry-run") == 0
    assert cell.is_dir()
    with RunFolder(root, cell.name).hold():
        assert "is running; stop it first" in refused("runs", "delete", cell.name, "--root", root)
    assert "zzz: no such run under" in refused("runs", "delete", "zzz", "--root", root)
    assert titans(root, "runs", "delete", cell.name[:6]) == 0
    assert not cell.exists()
    capsys.readouterr()
    assert listed(root, capsys) == []


def checkpoints(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("cells/*/checkpoints/step-*"))


def test_clean_keeps_the_checkpoint_that_is_used(root, capsys):
    (cell,) = (root / "cells").iterdir()
    before = checkpoints(root)
    assert len(before) > 1
    assert titans(root, "clean", "--dry-run", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (len(found["bytes"]), found["deleted"]) == (len(before) - 1, False)
    assert checkpoints(root) == before
    assert titans(root, "clean") == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("freed ")
    assert checkpoints(root) == before[-1:]
    assert titans(root, "eval", cell.name, "--json") == 0
    (cell / "result.json").rename(cell / "result.stale.json")
    assert titans(root, "clean", "--all-checkpoints") == 0
    assert checkpoints(root) == before[-1:], "the run is not finished"
    (cell / "result.stale.json").rename(cell / "result.json")
    assert titans(root, "clean", "--all-checkpoints") == 0
    assert checkpoints(root) == []
    assert titans(root, "train", "--help") == 0


def test_sessions_of_ray_are_deleted_when_old_and_dead(root, tmp_path, capsys, monkeypatch):
    place = tmp_path / "tmp" / "ray"
    for name in ("session_2026-01-01_old", "session_2026-01-02_new", "session_2026-01-03_alive"):
        (place / name / "logs").mkdir(parents=True)
        (place / name / "logs" / "x.log").write_text("x" * 1000)
        then = time.time() - (0 if name.endswith("new") else 2 * 24 * 3600)
        for path in (place / name / "logs" / "x.log", place / name / "logs", place / name):
            os.utime(path, (then, then))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "ps").write_text(f"#!/bin/sh\necho raylet --session_dir={place}/session_2026-01-03_alive\n")
    (tmp_path / "ps").chmod(0o755)
    assert titans(root, "clean") == 0
    assert {path.name.rpartition("_")[2] for path in place.iterdir()} == {"new", "alive"}
