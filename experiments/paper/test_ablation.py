"""The ablation's tables in the pages equal the cells here."""

import csv
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

from experiments.tables import table
from titans_core import LanguageModel
from titans_platform.report.table import Comparison, adjust, cell, difference, method, tally
from titans_platform.study.grid import expand, load_study
from titans_platform.text import count

TOP = Path(__file__).parents[2]
HERE = Path(__file__).parent
COLUMNS = {
    "lm_ppl": "lm_ppl", "reasoning_acc": "reasoning_acc (%)", "long_context_acc": "long_context_acc (%)",
}  # fmt: skip
"""The columns of the ablation, and what heads them in the file of its cells."""
RESULTS, ABLATION = "docs/results.md", "experiments/paper/README.md"
SECTIONS = {"workstation": (RESULTS, "The ablation's table"), "laptop": (ABLATION, "At scale laptop")}
"""The page and heading of a scale; its cells are in ablation-SCALE.csv, at one rate in ...-common.csv."""

Measured = dict[str, dict[str, dict[int, float]]]


@pytest.fixture(params=SECTIONS)
def scale(request) -> str:
    return request.param


@pytest.fixture
def text(scale) -> str:
    """Return the section of a document that has the scale's table."""
    page, heading = SECTIONS[scale]
    section = (TOP / page).read_text("utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert section
    return section


@pytest.fixture
def measured(scale) -> Measured:
    return measured_in(f"ablation-{scale}.csv")


def measured_in(name: str) -> Measured:
    """By row and column, the ablation's number of each seed, as printed."""
    scores: Measured = defaultdict(lambda: defaultdict(dict))
    with (HERE / name).open() as file:
        for line in csv.DictReader(file):
            for column, head in COLUMNS.items():
                scores[line["row"]][column][int(line["seed"])] = float(line[head])
    return scores


def scores(text: str) -> dict[str, list[str]]:
    """Return the rows of the ablation's table."""
    return table(text.partition("minus LMM")[0])


def digits(column: str) -> int:
    return 2 if column == "lm_ppl" else 1


def check_scores(shown: dict[str, list[str]], measured: Measured) -> None:
    for row, cells in shown.items():
        for shown_cell, (column, values) in zip(cells[::2], measured[row].items(), strict=False):
            mean, spread = statistics.mean(values.values()), statistics.stdev(values.values())
            assert shown_cell == f"{mean:.{digits(column)}f}±{spread:.{digits(column)}f}", f"{row} {column}"


def test_ablation_table_equals_its_data_for_every_row_and_seed(text, scale, measured):
    shown, study = scores(text), load_study("ablation")
    assert list(measured) == [row.name for row in study.rows]
    # the page's laptop is the former one
    seeds = {0, 1, 2} if scale == "laptop" else set(study.scales[scale].seeds)
    assert all(set(values) == seeds for row in measured.values() for values in row.values())
    check_scores({row: shown[row] for row in measured}, measured)


def compared(measured: Measured) -> list[Comparison]:
    """Every comparison with the LMM of which the paper has a direction."""
    study, comparisons = load_study("ablation"), []
    papers = {row.name: row.paper for row in study.rows_at("400M")}
    for row in (row.name for row in study.rows if not row.reference and row.name != "LMM"):
        for column in COLUMNS:
            sign = 1 if study.columns[column].higher_is_better else -1
            ours = difference(measured[row][column], measured["LMM"][column], sign)
            theirs, base = papers[row][column], papers["LMM"][column]
            assert None not in (ours, theirs, base)
            comparisons.append(Comparison(row, column, "LMM", sign * (theirs - base), ours))
    return adjust(comparisons)


def check_verdicts(shown: dict[str, list[str]], comparisons: list[Comparison]) -> None:
    for verdict in comparisons:
        expected = str(cell(verdict, digits(verdict.column)))
        printed = shown[verdict.row][list(COLUMNS).index(verdict.column)]
        assert printed == expected, f"{verdict.row} {verdict.column}"


def test_ablation_verdict_equals_its_data(text, measured):
    comparisons = compared(measured)
    check_verdicts(table(text.partition("minus LMM")[2].partition("**Rates.**")[0]), comparisons)
    assert tally(comparisons) in " ".join(text.split())
    assert method(comparisons) in " ".join(text.split())


def test_second_set_of_seeds_is_reported_as_measured():
    """Ten seeds in one table, and how many verdicts of the first five the other five have again."""
    first, second = measured_in("ablation-workstation.csv"), measured_in("ablation-workstation-second.csv")
    both = {row: {key: first[row][key] | second[row][key] for key in COLUMNS} for row in second}
    assert {seed for row in second.values() for values in row.values() for seed in values} == {5, 6, 7, 8, 9}
    assert all(len(values) == 10 for row in both.values() for values in row.values())
    text = (TOP / ABLATION).read_text("utf-8").partition("\n## Ten seeds at scale workstation\n")[2]
    check_scores({row: scores(text)[row] for row in both}, both)
    comparisons = compared(both)
    check_verdicts(table(text.partition("minus LMM")[2]), comparisons)
    pairs = zip(compared(first), compared(second), strict=True)
    resolved = [pair for pair in pairs if pair[0].outcome in ("agrees", "disagrees")]
    again = sum(before.outcome == after.outcome for before, after in resolved)
    for page in (" ".join(text.split()), " ".join((TOP / "docs/results.md").read_text("utf-8").split())):
        assert f"{again} of the {len(resolved)}" in page
        assert tally(comparisons) in page


@pytest.mark.parametrize("scale", ["workstation"], indirect=True)
def test_rows_at_one_rate_equal_their_data(text, scale, measured):
    rates = text.partition("**Rates.**")[2]
    shown, common = table(rates), measured_in(f"ablation-{scale}-common.csv")
    shown = {row: cells for row, cells in shown.items() if row in common}
    others = {row for row in common if common[row] != measured[row]}
    assert set(shown) == others
    check_scores(shown, common)
    assert tally(compared(common)) in " ".join(rates.split())


def test_sizes_in_the_page_equal_current_models(text, scale):
    shown = scores(text)
    models = {c.row: LanguageModel(c.config.model) for c in expand(load_study("ablation"), scale)}
    for row, model in models.items():
        assert shown[row][6:8] == [count(model.num_parameters()), count(model.state_bytes(64))]
