"""Rates of the ablation at `overnight` follow from the tuning cells by the rule that was committed before."""

import csv
from collections import defaultdict
from pathlib import Path

import pytest

from experiments.tables import section, table
from titans_platform.study.grid import load_study

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def perplexities() -> dict[str, dict[float, float]]:
    """By row and rate."""
    rows = defaultdict(dict)
    with (HERE / "overnight.csv").open() as file:
        for line in csv.DictReader(file):
            rows[line["row"].rpartition(" at ")[0]][float(line["lr"])] = float(line["lm_ppl"])
    return rows


def choice(by_rate: dict[float, float]) -> float:
    """Of the rates within 1% of the lowest perplexity, the one nearest to 4e-3."""
    close = [rate for rate, value in by_rate.items() if value <= 1.01 * min(by_rate.values())]
    return min(close, key=lambda rate: abs(rate - 4e-3))


def test_page_shows_every_cell_and_the_choice(perplexities):
    shown = table(section(HERE / "README.md", "At `overnight`"))
    for row, by_rate in perplexities.items():
        numbers = [f"{by_rate[rate]:.2f}" for rate in sorted(by_rate)]
        assert shown[row] == [*numbers, f"{choice(by_rate):g}"], row


def test_rows_of_the_ablation_train_at_the_rates_chosen(perplexities):
    study = load_study("ablation")
    scale = study.scales["overnight"]
    assert scale.tuned == "rates"
    for row in study.rows_at("overnight"):
        fields = scale.rows.get(row.name) or {}
        assert fields.get("optim.lr", scale.optim["lr"]) == choice(perplexities[row.name]), row.name
