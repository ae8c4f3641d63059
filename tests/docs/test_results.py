"""The paper's tables in docs/results.md and README equal the cells in experiments/paper."""

from pathlib import Path

import pandas as pd
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
    first, second = (pd.read_csv(CELLS / f"ablation-workstation{part}.csv") for part in ("", "-second"))
    whole = table(section(RESULTS, "The ablation's table").partition("minus LMM")[0])
    readme = table(section(TOP / "README.md", "Results"))
    rows = {row for row in readme if row and "--" not in row}
    assert len(rows) > 8
    assert {row: whole[row][:6:2] for row in first["row"]} == means(first)
    ten_seeds = means(pd.concat([first, second]))
    assert {row: readme[row][:6:2] for row in rows} == {row: ten_seeds[row] for row in rows}
    larger = means(pd.read_csv(TOP / "experiments/overnight/cells.csv"))
    assert {row: readme[row][6] for row in rows} == {row: larger[row][0] for row in rows}


def means(cells: pd.DataFrame) -> dict[str, list[str]]:
    columns = {"lm_ppl": 2, "reasoning_acc (%)": 1, "long_context_acc (%)": 1}
    return {
        row: [f"{cell[name].mean():.{n}f}±{cell[name].std():.{n}f}" for name, n in columns.items()]
        for row, cell in cells.groupby("row")
    }
