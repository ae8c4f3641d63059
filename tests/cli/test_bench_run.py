"""`titans bench run`: what a run adds to its steps, measured in a folder that does not stay."""

from __future__ import annotations

import json

import pytest

from titans_platform import cli


def test_what_a_run_adds_is_what_its_steps_leave_of_the_clock(tiny_yaml, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert cli.run(["bench", "run", str(tiny_yaml), "--steps", "6", "--every", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["checkpoints"]) == (6, 2)
    phases = found["phases"]
    loop = sum(phases[name] for name in ("train", "data wait", "checkpoint", "checkpoint wait"))
    assert found["overhead"] == pytest.approx(loop / 6 - found["step"])
    # two checkpoints are in it
    assert 6 * found["overhead"] > phases["checkpoint"]
    assert found["bare"] > 0
    assert found["before"] + found["after"] > phases["record"]
    assert found["after"] > 0
    assert not list(tmp_path.glob("titans-bench-*"))
    assert cli.run(["bench", "run", str(tiny_yaml), "--steps", "2"]) == 0
    assert "2 steps and 1 checkpoint, clock times" in capsys.readouterr().out
