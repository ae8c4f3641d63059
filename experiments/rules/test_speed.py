"""Rows of the table of rules, and the page that has it."""

from pathlib import Path

from experiments.rules import speed
from experiments.rules.names import RULES


def test_speed_row_has_paper_rule_beside_it():
    rows = speed.run(["mdn", "delta_ttt"], 1, 1, 40, lambda message: None)
    assert [(r["rule"], r["depth"], r["chunk"], r["form"]) for r in rows] == [
        ("paper", 1, 1, "online"), ("paper", 2, 1, rows[1]["form"]), ("paper", 2, 64, rows[2]["form"]),
        ("mdn", 1, 1, "generic"), ("delta_ttt", 2, 1, "generic"),
    ]  # fmt: skip
    assert all(r["tokens_per_second"] > 0 for r in rows)
    assert rows[0]["to_paper"] == 1
    assert len(speed.lines_of(rows)) == 7


def test_rules_page_lists_every_rule():
    text = (Path(__file__).parent / "README.md").read_text()
    assert [name for name, path in RULES.items() if path not in text] == []
