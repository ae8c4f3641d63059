"""Which way rows go from the first one: paired, with intervals, beside the paper's direction."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from titans_platform.report.table import Entry
from titans_platform.report.verdict import LockIn, counted, difference, lock_in_lines, lock_ins, verdicts
from titans_platform.study.spec import Expectation, Row

COLUMNS = {
    "lm_ppl": SimpleNamespace(higher_is_better=False, factor=1),
    "reasoning_acc": SimpleNamespace(higher_is_better=True, factor=100),
}


def measures(columns) -> Any:
    """As much of a cell's config as says which columns it has."""
    return SimpleNamespace(eval=SimpleNamespace(columns=columns))


def row(
    name: str,
    columns: dict[str, list[float]],
    paper: dict[str, float],
    tasks=(),
    reference=False,
    expected=(),
):
    seeds = range(len(next(iter(columns.values()))))
    return SimpleNamespace(
        row=Row(name=name, reference=reference, expected=dict(expected)),
        cells=[SimpleNamespace(name=f"{name}-{seed}", seed=seed, config=measures(columns)) for seed in seeds],
        results=[
            {
                "cell": f"{name}-{seed}",
                "columns": {key: values[seed] for key, values in columns.items()},
                "tasks": {key: {"value": v[seed], "chance": 0.25} for key, v in dict(tasks).items()},
            }
            for seed in seeds
        ],
        entries={key: Entry((), len(seeds), paper.get(key)) for key in COLUMNS},
    )


def table(*rows) -> Any:
    return SimpleNamespace(rows=rows, columns=COLUMNS)


def test_a_difference_is_paired_by_seed():
    base = {0: 10.0, 1: 20.0, 2: 30.0}
    found = difference({2: 31.1, 0: 11.0, 1: 21.0, 7: 90.0}, base)  # seeds far apart, rows close
    assert found is not None
    assert (found.mean, len(found.pairs), found.resolved) == (pytest.approx(3.1 / 3), 3, True)
    low, high = found.interval
    assert 1.0 <= low <= found.mean <= high <= 1.1 + 1e-9
    # the same numbers in another order are not
    shuffled = difference({0: 31.1, 1: 11.0, 2: 21.0}, base)
    assert shuffled is not None
    assert not shuffled.resolved


def test_three_seeds_that_agree_in_sign_alone_resolve_nothing():
    found = difference({0: 0.1, 1: 1.0, 2: 5.0}, dict.fromkeys(range(3), 0.0))
    assert found is not None
    assert found.interval[0] > 0  # the bootstrap alone would have it
    assert not found.resolved


def test_one_seed_and_none():
    found = difference({0: 1.0}, {0: 0.0})
    assert found is not None
    assert (found.interval, found.resolved) == ((-math.inf, math.inf), False)
    assert difference({0: 1.0}, {1: 0.0}) is None


def test_agreement_is_of_directions_in_each_columns_own_sense():
    lmm = row(
        "LMM",
        {"lm_ppl": [5, 5.1, 5.2], "reasoning_acc": [0.4, 0.41, 0.42]},
        {"lm_ppl": 27, "reasoning_acc": 48},
    )
    worse = row(
        "A",
        {"lm_ppl": [6, 6.1, 6.2], "reasoning_acc": [0.5, 0.51, 0.53]},
        {"lm_ppl": 28, "reasoning_acc": 47},
    )
    near = row("B", {"lm_ppl": [5, 5.2, 5.1], "reasoning_acc": [0.4, 0.4, 0.43]}, {"lm_ppl": 26})
    apart = row("R", {"lm_ppl": [9, 9, 9], "reasoning_acc": [0, 0, 0]}, {"lm_ppl": 30}, reference=True)
    found = verdicts(table(lmm, worse, near, apart))
    assert [(v.row, v.column, v.outcome) for v in found] == [
        ("A", "lm_ppl", "agrees"),
        ("B", "lm_ppl", "not resolved"),
        ("A", "reasoning_acc", "disagrees"),
        ("B", "reasoning_acc", ""),  # no number in the paper
    ]
    assert found[0].ours.mean == pytest.approx(-1)  # positive is better
    assert found[2].ours.mean == pytest.approx(10 + 1 / 3)  # in the unit of the column
    assert (found[0].paper, found[0].baseline) == (-1, "LMM")
    assert counted(found) == {"agrees": 1, "disagrees": 1, "not resolved": 1}
    assert verdicts(table(apart)) == []


def test_lock_in_compares_rates_of_tasks_with_two_kinds_of_outcome():
    columns = {"lm_ppl": [5.0] * 5, "reasoning_acc": [0.5] * 5}
    solved, failed = [0.9] * 5, [0.3] * 5
    lmm = row("LMM", columns, {}, {"c/recall@64": solved, "c/easy@64": solved})
    none = row("A", columns, {}, {"c/recall@64": failed, "c/easy@64": solved})
    (found,) = lock_ins(table(lmm, none))
    assert found == LockIn("A", "c/recall@64", 0, 5, 5, 5, found.p)
    assert found.p == pytest.approx(2 / math.comb(10, 5))


def test_tasks_with_one_rate_share_a_line():
    columns = {"lm_ppl": [5.0] * 5, "reasoning_acc": [0.5] * 5}
    solved, failed = [0.9] * 5, [0.3] * 5
    tasks = ("c/recall@256", "c/recall@64", "d/counting")
    lmm = row("LMM", columns, {}, dict.fromkeys(tasks, solved))
    none = row("A", columns, {}, dict.fromkeys(tasks, failed))
    assert lock_in_lines(table(lmm, none)) == [
        "A solves 3 tasks in 0 of 5 seeds, the first row in 5 of 5 (p = 0.008 each): recall@64/256, counting"
    ]


def test_the_study_file_s_expectation_stands_where_the_paper_has_no_number():
    expected = {
        "reasoning_acc": Expectation(better=False, because="a derivation"),
        "lm_ppl": Expectation(better=True, because="the paper has a number here, which counts"),
    }
    same = {"lm_ppl": [9.0, 9.1, 9.2], "reasoning_acc": [0.5, 0.51, 0.52]}
    worse = {"lm_ppl": [10.0, 10.1, 10.2], "reasoning_acc": [0.4, 0.41, 0.42]}
    first = row("LMM", same, {"lm_ppl": 27.0})
    found = verdicts(table(first, row("Linear", worse, {"lm_ppl": 28.0}, expected=expected)))
    assert [verdict.outcome for verdict in found] == ["agrees", "agrees"]
    assert found[1].paper is None
    opposite = {"reasoning_acc": Expectation(better=True, because="another")}
    found = verdicts(table(first, row("Linear", worse, {}, expected=opposite)))
    assert [verdict.outcome for verdict in found] == ["", "disagrees"]
