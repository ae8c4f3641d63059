"""Every rule of the registry is within 1e-9 of the reference, and has a row on the page."""

from pathlib import Path

import pytest

from experiments.rules import speed
from titans_kernels import RULES

PAGE = Path(__file__).parent / "README.md"


@pytest.mark.parametrize("case", speed.cases(), ids=lambda c: f"{c.name}-{c.depth}-{c.chunk_size}")
def test_every_rule_is_its_recurrence_in_the_form_that_auto_takes(case):
    form, error = case.error()
    assert form not in ("reference", "autograd")
    assert error < 1e-9


def test_a_row_has_the_paper_s_rule_beside_it():
    rows = speed.run(["mdn", "delta_ttt"], 1, 1, 40, lambda message: None)
    assert [(r["rule"], r["depth"], r["chunk"]) for r in rows] == [
        ("paper", 1, 1), ("paper", 2, 1), ("paper", 2, 64), ("mdn", 1, 1), ("delta_ttt", 2, 1),
    ]  # fmt: skip
    assert all(r["tokens_per_second"] > 0 for r in rows)
    assert rows[0]["to_paper"] == 1
    assert len(speed.lines_of(rows)) == 7


def test_the_page_has_every_rule():
    text = PAGE.read_text()
    assert [name for name in RULES if f"`{name}`" not in text and f"rule: {name}`" not in text] == []
