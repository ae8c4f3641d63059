"""`titans bench step`: it times every row, and rejects a source tree with different results."""

import json
from pathlib import Path

import pytest

from benchmarks import step
from titans_platform.cli import run
from titans_platform.errors import UsageError

QUICK = ["--scale", "smoke", "--rounds", "1", "--steps", "1"]
TREE = Path(__file__).parents[1]


@pytest.mark.slow
def test_row_is_timed_beside_another_checkout(capsys):
    command = ["bench", "step", "ablation", *QUICK, "--rows", "LMM", "--against", str(TREE), "--json"]
    assert run(command) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["same_losses"]
    assert row["loss_off"] == 0
    assert row["ours"]["tokens_per_second"] == pytest.approx(1000 * 8 * 64 / row["ours"]["cpu_ms"])
    assert row["times"]["median"] == pytest.approx(row["theirs"]["cpu_ms"] / row["ours"]["cpu_ms"])


def test_differing_losses_are_refused_for_one_config_and_marked_for_a_newer_one(monkeypatch):
    ours = {"config": {"depth": 2}, "parameters": 3, "losses": [5.0, 4.0]}
    off = ours | {"losses": [5.0, 4.001]}
    assert "losses differ by 2.5e-04" in step._compare(ours, off)["refused"]
    newer = step._compare(ours, off | {"config": {}})
    assert not newer["same_losses"]
    assert "refused" not in newer
    assert step._compare(ours, ours | {"config": {}})["same_losses"]


def test_refused_row_is_printed_and_fails_the_command(monkeypatch, capsys):
    result = {"study": "s", "scale": "smoke", "threads": 1, "rounds": 1, "against": "x"}
    refused = {"row": "LMM", "refused": "same config, but its losses differ by 1.0e-02"}
    monkeypatch.setattr(step, "run", lambda *args, **options: result | {"rows": [refused]})
    assert run(["bench", "step"]) == 1
    assert "not timed: same config, but its losses differ" in capsys.readouterr().out


def test_invalid_checkout_error_names_the_path(tmp_path):
    with pytest.raises(UsageError, match=r"--against: .* is no checkout of this project"):
        step.run("ablation", "smoke", against=tmp_path)
