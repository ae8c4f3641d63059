"""The page of the paper's tables, and the list of their completed runs."""

import json
import re
from dataclasses import replace

import pytest

from titans_platform import cli
from titans_platform.report.publish import paper_page
from titans_platform.runs.folder import RunFolder
from titans_platform.study.status import overview, studies_of_the_paper


@pytest.fixture
def begun(tmp_path):
    """A root in which one of two cells of the ablation is done."""
    folder = tmp_path / "studies" / "ablation-smoke"
    folder.mkdir(parents=True)
    cells = [{"cell": name, "row": "LMM", "seed": seed} for seed, name in enumerate(("a" * 12, "b" * 12))]
    record = {"study": "ablation", "scale": "smoke", "commit": "c0ffee", "cells": cells}
    (folder / "cells.json").write_text(json.dumps(record))
    done = RunFolder(tmp_path, "a" * 12)
    done.path.mkdir(parents=True)
    (done.path / "result.json").write_text(json.dumps({"cell": "a" * 12, "columns": {}}))
    return tmp_path


def test_sweep_list_shows_what_has_been_run(begun, capsys, answer):
    assert cli.run(["sweep", "list", "--root", str(begun)]) == 0
    lines = capsys.readouterr().out.splitlines()
    ablation = lines[lines.index("Table 5: The ablation") + 1]
    assert ablation.startswith("  study ablation; scales smoke (1 of 2 cells done), laptop,")
    studies = {study["name"]: study for study in answer("sweep", "list", "--root", begun)}
    assert studies["ablation"]["ran"] == {"smoke": {"done": 1, "cells": 2}}
    assert studies["memory_depth"]["paper"] == ["Figure 7", "Figure 8"]
    assert "paper" not in studies["grid"]


def test_page_has_our_numbers_and_the_papers(begun):
    items = overview(begun, studies_of_the_paper())
    assert [name for item in items for name in item.names] == [
        *(f"Table {n}" for n in range(1, 6)), *(f"Figure {n}" for n in range(6, 10)),
    ]  # fmt: skip
    shown = [item for item in items if item.names[0] in ("Table 3", "Table 5", "Figure 6", "Figure 9")]
    # as where a fork has left a study out
    shown = [replace(item, study=None) if item.names == ("Figure 6",) else item for item in shown]
    page = paper_page(shown, begun)
    # what has been run, and the scale that the paper's numbers belong to
    assert ["Table 5, scale smoke." in page, "Table 5, scale 400M." in page, "scale laptop." in page] == [
        1,
        1,
        0,
    ]
    assert ("28.73" in page, "0.231" in page) == (True, True)
    # what has been run comes first
    names = re.findall(r'<h2 id="section-\d+">(.*?)</h2>', page)
    assert (names, page.count("<html")) == (["Table 5", "Table 3", "Figure 6", "Figure 9"], 1)
