"""The paper's tables in docs/results.md and README equal the cells in experiments/paper."""

import csv
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

from experiments.tables import check_table, section, table

TOP = Path(__file__).parents[2]
RESULTS, CELLS = TOP / "docs/results.md", TOP / "experiments/paper"


@pytest.mark.parametrize(("cells", "heading"), [
    ("babilong.csv", "Questions to a book"), ("dna.csv", "DNA: two tasks of GUE"),
    ("forecasting.csv", "Forecasting: ETTh1 and ETTm1"),
    ("language.csv", "Language: the Titans and their eleven baselines"),
    ("throughput.csv", "Throughput: fifteen models, 1K to 32K tokens"),
])  # fmt: skip
def test_table_equals_its_cells(cells, heading):
    check_table(section(RESULTS, heading), CELLS / cells)


def test_ablation_in_results_and_readme_equals_its_cells():
    """README repeats rows; the verdicts are recomputed by experiments/paper/test_ablation.py."""
    first = ablation_cells("ablation-workstation.csv")
    second = ablation_cells("ablation-workstation-second.csv")
    whole = table(section(RESULTS, "The ablation's table").partition("minus LMM")[0])
    readme = table(section(TOP / "README.md", "Results"))
    rows = {row for row in readme if row and "--" not in row}
    assert rows <= set(first)
    assert len(rows) > 8
    for row, columns in first.items():
        assert whole[row][:6:2] == means(columns), row
        if row in rows:
            # README has all ten seeds of a row
            both = {column: [*seeds, *second[row][column]] for column, seeds in columns.items()}
            assert readme[row][:6:2] == means(both), row


def ablation_cells(name: str) -> dict[str, dict[str, list[float]]]:
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with (CELLS / name).open() as file:
        for line in csv.DictReader(file):
            for column in ("lm_ppl", "reasoning_acc (%)", "long_context_acc (%)"):
                values[line["row"]][column].append(float(line[column]))
    return values


def means(columns: dict[str, list[float]]) -> list[str]:
    return [
        f"{statistics.mean(column):.{places}f}±{statistics.stdev(column):.{places}f}"
        for column, places in zip(columns.values(), (2, 1, 1), strict=True)
    ]
