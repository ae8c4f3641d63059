"""The tables of other studies in the documents are those of the cells in the files beside them."""

import csv
import re
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

from tests.docs.test_ablation import table

TOP = Path(__file__).parents[2]
TABLES = {
    "babilong.csv": ("docs/results.md", "Questions to a book"),
    "carried.csv": ("docs/carried.md", "Streams that are all read at every step"),
    "carried-groups.csv": ("docs/carried.md", "Streams that take turns"),
    "carried-needle.csv": ("docs/carried.md", "A pass-key over 64 rows"),
    "drift.csv": ("docs/depth.md", "Drift: decay with an answer known in advance"),
    "oscillation.csv": ("docs/depth.md", "Oscillation: momentum with an answer known in advance"),
    "outliers.csv": ("docs/depth.md", "Outliers: a rule with an answer known in advance"),
    "dna.csv": ("docs/comparisons.md", "DNA: two tasks of GUE"),
    "forecasting.csv": ("docs/comparisons.md", "Forecasting: ETTh1 and ETTm1"),
    "hybrids.csv": ("docs/hybrids.md", "Ten reporting seeds"),
    "long-contexts.csv": ("docs/long-contexts.md", "Ten seeds"),
    "long-hybrids.csv": ("docs/long-contexts.md", "A memory, a window, and both"),
    "long-parts.csv": ("docs/long-contexts.md", "The paper's memory, a window, and both"),
    "long-rules.csv": ("docs/long-contexts.md", "A gradient after every token"),
    "language.csv": ("docs/comparisons.md", "Language: the Titans and their eleven baselines"),
    "far-needle.csv": ("docs/results.md", "How far a memory holds"),
    "forgetting.csv": ("docs/results.md", "Forgetting what is over"),
    "throughput.csv": ("docs/comparisons.md", "Throughput: fifteen models, 1K to 32K tokens"),
    "tnt.csv": ("docs/comparisons.md", "TNT: fine chunks at the speed of coarse ones"),
    "state-tracking.csv": ("docs/results.md", "Parity, asked once"),
}
"""Of a file of cells, where its table is: the page, and the heading above it."""


def measured(name: str) -> dict[str, list[list[float]]]:
    """By row the values of each column, one a seed that has it.

    A row's runs on several sets are one row; its runs on one set at several horizons, their mean.
    """
    rows: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(dict)
    with (TOP / "docs" / name).open() as file:
        for line in csv.DictReader(file):
            row = re.sub(r" on .*| ETT.*", "", line["row"])
            for column in list(line)[list(line).index("tokens") + 1 :]:
                seeds = rows[row].setdefault(column, defaultdict(list))
                if line[column] not in ("", "nan"):  # nan: the row does not have the column
                    seeds[line["seed"]].append(float(line[column]))
    return {
        row: [[statistics.mean(runs) for runs in seeds.values()] for seeds in columns.values()]
        for row, columns in rows.items()
    }


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_that_of_its_cells(name):
    page, heading = TABLES[name]
    text = (TOP / page).read_text("utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    shown, found = table(text), measured(name)
    assert found
    for row, columns in found.items():
        for cell, values in zip(shown[row], columns, strict=True):
            if not values:  # not run
                assert cell == "—", row
                continue
            places = len(cell.partition("±")[0].partition(".")[2])
            expected = f"{statistics.mean(values):.{places}f}"
            if len(values) > 1:
                expected += f"±{statistics.stdev(values):.{places}f}"
            assert cell == expected, row


def test_the_fixed_pairs_of_depth_are_those_of_their_file():
    names = ["linear", "depth 2", "depth 3", "last layer, hidden x2", "depth 2, delta_ttt"]
    with (TOP / "docs" / "fit.csv").open() as file:
        stored = {
            (f"{row['kind']} {row['pairs']}", row["memory"], row["passes"]): float(row["stored"])
            for row in csv.DictReader(file) if row["chunk"] == "1"
        }  # fmt: skip
    text = (TOP / "docs" / "depth.md").read_text("utf-8").partition("### Fixed pairs, no training\n")[2]
    settings = dict.fromkeys(setting for setting, _, _ in stored)
    assert len(settings) == 9
    for setting in settings:
        (line,) = re.findall(rf"^\| {setting} \|(.*)\|$", text, re.M)
        cells = [" / ".join(f"{stored[setting, name, number]:.3f}" for number in "18") for name in names]
        assert [cell.strip() for cell in line.split("|")] == cells
