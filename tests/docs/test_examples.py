"""The examples run as they are, in this process."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

TOP = Path(__file__).parents[2]
EXAMPLES = TOP / "examples"


def run(monkeypatch, name: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with torch.random.fork_rng():
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_train_minimal_learns_and_writes(monkeypatch, capsys):
    run(monkeypatch, "train_minimal.py", str(TOP / "CONTRIBUTING.md"), "--steps", "30", "--length", "64")
    out = capsys.readouterr().out
    losses = [float(x) for x in re.findall(r"held-out (\d\.\d+)", out)]
    assert len(losses) == 10
    assert losses[-1] < losses[0] < 5.6
    assert re.search(r"[\d,]+ tokens/s", out)
    assert len(out.partition("|")[2]) > 100


def test_train_minimal_stays_minimal_and_refuses_a_wrong_text(monkeypatch, tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    for name, says in (("short.txt", "9 bytes are too few"), ("none.txt", "No such file")):
        with pytest.raises(SystemExit, match=says):
            run(monkeypatch, "train_minimal.py", str(tmp_path / name))
    source = (EXAMPLES / "train_minimal.py").read_text("utf-8")
    assert len(source.splitlines()) <= 150
    assert "titans_platform" not in source


def test_memory_in_a_model_answers_from_its_carried_state(monkeypatch, capsys):
    run(monkeypatch, "memory_in_your_model.py")
    carried, new = re.findall(r"(\d+)%(?: of the questions| \(chance)", capsys.readouterr().out)
    assert int(carried) > 80
    assert int(new) < 25


@pytest.mark.slow
def test_notebook_shows_what_the_memory_retrieves(monkeypatch, capsys):
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "show", lambda: None)
    cells = json.loads((EXAMPLES / "what_the_memory_retrieves.ipynb").read_text("utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells), "outputs are not committed"
    names: dict = {"__name__": "__main__"}
    with torch.random.fork_rng():
        for cell in cells:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    assert len(pyplot.gcf().axes) == 3
    pyplot.close("all")
    assert names["accuracy"] > 0.8
    assert names["shares"].max() > 0.4, "no memory finds the pairs"
    assert "of the questions answered" in capsys.readouterr().out
