"""`titans runs`: what is listed, deleted and kept."""

import json
import shutil
from pathlib import Path

import pytest

from tests.small import trained
from titans_platform import cli
from titans_platform.runs.folder import RunFolder


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    trained(root, checkpoint={"every": 5, "keep": 3})
    return root


@pytest.fixture
def root(finished, tmp_path) -> Path:
    return shutil.copytree(finished, tmp_path / "root")


def titans(root: Path, *words: str) -> int:
    return cli.run([*words, "--root", str(root)])


def test_runs_are_listed_and_filtered_by_state_and_study(root, capsys, answer):
    (cell,) = (root / "cells").iterdir()
    study = root / "studies" / "tiny-small"
    study.mkdir(parents=True)
    (study / "cells.json").write_text(json.dumps({"cells": [{"cell": cell.name}]}))
    (run,) = answer("runs", "list", "--root", root)
    assert (run["name"], run["state"], run["variant"], run["steps"]) == (cell.name, "done", "lmm", 20)
    assert run["studies"] == ["tiny-small"]
    assert run["bytes"] > 10_000
    for filters, count in (("--state failed", 0), ("--study tiny", 1), ("--study tin", 0)):
        assert len(answer("runs", "list", "--root", root, *filters.split())) == count, filters
    assert titans(root, "runs", "list") == 0
    assert "MB  tiny-small" in capsys.readouterr().out


def test_deleted_run_is_gone_and_a_running_one_is_refused(root, answer, refused):
    (cell,) = (root / "cells").iterdir()
    assert titans(root, "runs", "delete", cell.name, "--dry-run") == 0
    assert cell.is_dir()
    with RunFolder(root, cell.name).hold():
        assert "is running; stop it first" in refused("runs", "delete", cell.name, "--root", root)
    assert "zzz: no such run under" in refused("runs", "delete", "zzz", "--root", root)
    assert titans(root, "runs", "delete", cell.name[:6]) == 0
    assert not cell.exists()
    assert answer("runs", "list", "--root", root) == []
