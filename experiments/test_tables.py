"""Every table of an experiment equals its cells; the index has every experiment, and counts its cells."""

import csv
import re
from collections import defaultdict
from statistics import fmean

import pytest

from experiments.tables import HERE, check_table, measured, section, table
from titans_platform.report.table import Comparison, adjust, difference, tally
from titans_platform.study.grid import load_study

HEADINGS = {
    "carried/cells.csv": "Streams that take turns",
    "carried/cells-every-step.csv": "Streams that are all read at every step",
    "far_text/cells.csv": "In short, so far",
    "far_text/cells-large.csv": "4.5M parameters",
    "hybrids/cells.csv": "Ten reporting seeds",
    "letter/cells.csv": "What it showed",
    "long_ablation/cells.csv": "Ten seeds",
    "overnight/cells.csv": "Three seeds",
    "overnight/cells-4e-3.csv": "At 4e-3",
}
"""The heading above a table, where the page has several."""
TALLIES = (
    "forgetting", "hybrids", "letter", "long_ablation", "long_hybrids", "long_parts", "long_rules",
    "state_tracking", "tnt",
)  # fmt: skip
"""Studies whose rows have expectations and whose cells are of these rows."""
FILES = sorted(str(path.relative_to(HERE)) for path in HERE.glob("*/cells*.csv"))


@pytest.mark.parametrize("name", FILES)
def test_table_of_a_page_equals_its_cells(name):
    page = HERE / name.partition("/")[0] / "README.md"
    text = section(page, HEADINGS[name]) if name in HEADINGS else page.read_text("utf-8")
    check_table(text, HERE / name)


def test_table_by_seed_has_every_cell_of_the_ablation_overnight():
    rows = table(section(HERE / "overnight" / "README.md", "By seed"))
    for row, columns in measured(HERE / "overnight" / "cells.csv").items():
        places = (2, 1, 1)
        expected = [" / ".join(f"{x:.{n}f}" for x in seeds) for seeds, n in zip(columns, places, strict=True)]
        assert (len(columns[0]), rows[row]) == (3, expected)


def test_differences_and_tally_of_the_ablation_overnight_are_recomputed():
    """Floors are the table's: both numbers of a comparison are better than them."""
    page, study = HERE / "overnight" / "README.md", load_study("ablation")
    values = measured(HERE / "overnight" / "cells.csv")
    rows = {row.name: row for row in study.rows_at("overnight")}
    floors = table(section(page, "Three seeds"))["floor"]
    shown, comparisons = table(section(page, "Differences from the LMM")), []
    for row in (row for row in values if row != "LMM"):
        for i, (key, column) in enumerate(study.columns.items()):
            sign = 1 if column.higher_is_better else -1
            ours, base = (dict(enumerate(values[name][i])) for name in (row, "LMM"))
            low, high = difference(ours, base).interval
            numbers = [f"{x:+.{2 - i}f}" for x in (difference(ours, base).mean, low, high)]
            assert shown[row][1 + i] == "{} [{}, {}]".format(*numbers)
            better = [sign * (fmean(x.values()) - float(floors[i])) > 0 for x in (ours, base)]
            paper = [rows[name].paper.get(key) for name in (row, "LMM")]
            if None not in paper and not rows[row].reference:
                printed, pairs = sign * (paper[0] - paper[1]), difference(ours, base, sign)
                comparisons.append(Comparison(row, key, "LMM", printed, pairs, above_floor=all(better)))
    comparisons = adjust(comparisons)
    assert len(comparisons) == 24
    assert tally(comparisons).startswith("of 18 comparisons 0 agree, 1 disagree, 17 are not resolved; 6 more")
    (resolved,) = (each for each in comparisons if each.outcome == "disagrees")
    assert (resolved.row, resolved.column, f"{resolved.p:.3f}") == ("+ Attn (MAC)", "reasoning_acc", "0.045")


@pytest.mark.parametrize("name", TALLIES)
def test_tally_of_a_page_counts_every_expectation_of_its_study(name):
    """Cells do not have floors, so no comparison is left out for one; rates are equal or were tuned."""
    study, values = load_study(f"experiments/{name}"), defaultdict(lambda: defaultdict(dict))
    with (HERE / name / "cells.csv").open() as file:
        for line in csv.DictReader(file):
            for column, value in line.items():
                if column.partition(" (")[0] in study.columns and value:
                    values[line["row"]][column.partition(" (")[0]][int(line["seed"])] = float(value)
    rows = {row.name: row for row in study.rows_at("laptop")}
    first = next(row for row in values if not rows[row].reference)
    comparisons = [
        Comparison(row, key, first, None, difference(values[row][key], values[first][key], sign), expected)
        for row in values if row != first
        for key, expected in rows[row].expected.items()
        for sign in [1 if study.columns[key].higher_is_better else -1]
    ]  # fmt: skip
    page = " ".join((HERE / name / "README.md").read_text("utf-8").split())
    assert tally(adjust(comparisons)) in page


def test_table_of_fixed_pairs_equals_its_file():
    names = ["linear", "depth 2", "depth 3", "last layer, hidden x2", "depth 2, delta_ttt"]
    with (HERE / "depth" / "fit.csv").open() as file:
        stored = {
            (f"{row['kind']} {row['pairs']}", row["memory"], row["passes"]): float(row["stored"])
            for row in csv.DictReader(file) if row["chunk"] == "1"
        }  # fmt: skip
    text = (HERE / "depth" / "README.md").read_text("utf-8").partition("### Fixed pairs, no training\n")[2]
    settings = dict.fromkeys(setting for setting, _, _ in stored)
    assert len(settings) == 9
    for setting in settings:
        (line,) = re.findall(rf"^\| {setting} \|(.*)\|$", text, re.M)
        cells = [" / ".join(f"{stored[setting, name, number]:.3f}" for number in "18") for name in names]
        assert [cell.strip() for cell in line.split("|")] == cells


def test_index_lists_every_experiment_with_the_count_of_its_cells():
    rows = table((HERE / "README.md").read_text("utf-8"))
    listed = {name: cells[-1] for row, cells in rows.items() for name in re.findall(r"\]\((\w+)/README", row)}
    assert set(listed) == {path.parent.name for path in HERE.glob("*/README.md")} - {"log"}
    for name in {path.parent.name for path in HERE.glob("*/cells*.csv")}:
        cells = sum(len(path.read_text().splitlines()) - 1 for path in (HERE / name).glob("cells*.csv"))
        assert listed[name] == str(cells), name


def test_index_of_the_log_lists_every_entry_once():
    folder = HERE / "log"
    listed = set(re.findall(r"\]\((\d[^)#]+\.md)\)", (folder / "README.md").read_text("utf-8")))
    assert listed == {path.name for path in folder.glob("2*.md")}
