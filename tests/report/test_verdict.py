"""Verdicts: paired differences from the first row, with intervals, beside the paper's direction."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from titans_platform.report import table as module
from titans_platform.report.table import Comparison, Entry, adjust, cell, compare, holm, tally
from titans_platform.runs.folder import Result
from titans_platform.study.spec import Expectation, Row

COLUMNS: Any = {
    "lm_ppl": SimpleNamespace(higher_is_better=False, factor=1),
    "reasoning_acc": SimpleNamespace(higher_is_better=True, factor=100),
}


def row(name: str, columns: dict[str, list[float]], paper: dict[str, float], reference=False, expected=()):
    seeds = range(len(next(iter(columns.values()))))
    config = SimpleNamespace(eval=SimpleNamespace(columns=columns))
    return SimpleNamespace(
        row=Row(name=name, reference=reference, expected=dict(expected)),
        cells=[SimpleNamespace(name=f"{name}-{seed}", seed=seed, config=config) for seed in seeds],
        results=[Result(cell=f"{name}-{s}", columns={k: x[s] for k, x in columns.items()}) for s in seeds],
        entries={key: Entry(COLUMNS[key], (), len(seeds), paper.get(key)) for key in COLUMNS},
        rates={1e-3},
    )


def table(*rows) -> Any:
    return SimpleNamespace(rows=rows, columns=COLUMNS, run=SimpleNamespace(scale=SimpleNamespace(tuned="")))


def measured(ppl: list[float], acc: list[float]) -> dict[str, list[float]]:
    return {"lm_ppl": ppl, "reasoning_acc": acc}


LMM = row("LMM", measured([5, 5.1, 5.2], [0.4, 0.41, 0.42]), {"lm_ppl": 27, "reasoning_acc": 48})


def test_difference_is_paired_by_seed():
    base = {0: 10.0, 1: 20.0, 2: 30.0}
    near = module.difference({2: 31.1, 0: 11.0, 1: 21.0, 7: 90.0}, base)  # seeds far apart, rows close
    assert near.pairs == pytest.approx((1.0, 1.0, 1.1))
    assert near.p < 0.002
    # the same numbers in another order
    assert module.difference({0: 31.1, 1: 11.0, 2: 21.0}, base).p > 0.9


def test_interval_p_and_holm_of_examples_worked_by_hand():
    # mean 2, sd 1, standard error 1/sqrt(3), t = 2 sqrt(3) = 3.4641 with 2 degrees of freedom
    worked = module.difference({0: 1.0, 1: 2.0, 2: 3.0}, dict.fromkeys(range(3), 0.0))
    # t's 97.5% quantile with 2 degrees of freedom is 4.30265
    assert worked.interval == pytest.approx((2 - 4.30265 / 3**0.5, 2 + 4.30265 / 3**0.5), abs=1e-4)
    # of two degrees of freedom the distribution is closed: p = 1 - t / sqrt(t^2 + 2)
    assert worked.p == pytest.approx(1 - 12**0.5 / 14**0.5)
    # ranks 1 to 4 are multiplied by 4, 3, 2, 1; none is below the one before it, none above 1
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert (holm([0.5, 0.9, 0.4]), holm([])) == (pytest.approx([1.0, 1.0, 1.0]), [])


def test_one_seed_has_no_interval_and_equal_differences_have_the_p_of_their_signs():
    one = module.difference({0: 1.0}, {0: 0.0})
    assert (one.interval, one.p) == (None, None)
    assert module.difference({0: 1.0}, {1: 0.0}) is None
    (alone,) = adjust([Comparison("A", "lm_ppl", "LMM", 1.0, one)])
    assert (alone.outcome, str(cell(alone, 2))) == ("one seed", "+1.00 one seed")
    assert tally([alone]) == "of 1 comparison 0 agree, 0 disagree, 0 are not resolved, 1 have one seed"
    half = dict.fromkeys(range(3), 0.5)
    # accuracies over few items: t is infinite
    assert module.difference(dict.fromkeys(range(3), 1.5), half).p == 0.25
    assert module.difference(dict.fromkeys(range(3), 0.3), dict.fromkeys(range(3), 0.1)).p == 0.25
    assert module.difference(half, half).p == 1.0


def test_holm_may_leave_unresolved_what_is_resolved_alone():
    # mean 2, standard error sqrt(0.5 / 5), t = 6.32 with 4 degrees of freedom
    five = module.difference({0: 1.0, 1: 2.0, 2: 3.0, 3: 2.0, 4: 2.0}, dict.fromkeys(range(5), 0.0))
    assert five.p == pytest.approx(0.0032, abs=1e-4)
    one = Comparison("A", "lm_ppl", "LMM", 1.0, five)
    (alone,) = adjust([one])
    assert (alone.p, alone.outcome) == (five.p, "agrees")
    assert {(each.p, each.outcome) for each in adjust([one] * 20)} == {(20 * five.p, "not resolved")}
    # a comparison without an expected direction is not in the family
    (judged, free) = adjust([one, Comparison("B", "lm_ppl", "LMM", None, five)])
    assert (judged.p, free.p, free.outcome) == (five.p, None, "")


def test_number_not_better_than_its_floor_counts_in_no_verdict():
    near = row("A", measured([4, 4.3, 4.2], [0.5, 0.51, 0.53]), {"lm_ppl": 26, "reasoning_acc": 49})
    near.entries["lm_ppl"] = replace(near.entries["lm_ppl"], values=(4.0, 4.3, 4.2), floor=4.1)
    at, above = compare(table(LMM, near))
    assert (at.outcome, at.p, above.outcome) == (module.AT_FLOOR, None, "agrees")
    # the other comparison is alone in its family
    assert above.p == above.ours.p
    assert tally([at, above]).startswith("of 1 comparison 1 agree")
    assert tally([at, above]).endswith("; 1 more are with a number that is not above its floor")
    near.entries["lm_ppl"] = replace(near.entries["lm_ppl"], floor=4.2)
    better, other = compare(table(LMM, near))
    assert (better.outcome, other.p) == ("agrees", pytest.approx(2 * (other.ours.p or 0)))


def test_rows_at_different_learning_rates_are_not_judged():
    apart = row("A", measured([4, 4.3, 4.2], [0.5, 0.51, 0.53]), {"lm_ppl": 26})
    equal, apart.rates = row("B", measured([4, 4.1, 4.21], [0.5, 0.51, 0.53]), {"lm_ppl": 26}), {2e-3}
    across, same, *_ = verdicts = compare(table(LMM, apart, equal))
    assert (across.outcome, across.p, same.outcome) == (module.RATES, None, "agrees")
    assert same.p == same.ours.p
    assert tally(verdicts).endswith("; 1 more are across learning rates")
    (tuned := table(LMM, apart, equal)).run.scale.tuned = "rates"
    assert [each.outcome for each in compare(tuned)][:2] == ["agrees", "agrees"]


def test_agreement_follows_each_columns_direction():
    worse = row("A", measured([6, 6.1, 6.21], [0.5, 0.51, 0.53]), {"lm_ppl": 28, "reasoning_acc": 47})
    near = row("B", measured([5, 5.2, 5.1], [0.4, 0.4, 0.43]), {"lm_ppl": 26})
    apart = row("R", measured([9, 9, 9], [0, 0, 0]), {"lm_ppl": 30}, reference=True)
    verdicts = compare(table(LMM, worse, near, apart))
    assert [(v.row, v.column, v.outcome) for v in verdicts] == [
        ("A", "lm_ppl", "agrees"), ("B", "lm_ppl", "not resolved"), ("A", "reasoning_acc", "disagrees"),
        ("B", "reasoning_acc", ""),  # no number in the paper
    ]  # fmt: skip
    assert verdicts[0].ours.mean == pytest.approx(-1 - 0.01 / 3)  # positive is better
    assert verdicts[2].ours.mean == pytest.approx(10 + 1 / 3)  # in the unit of the column
    assert (verdicts[0].paper, verdicts[0].baseline) == (-1, "LMM")
    assert tally(verdicts) == "of 3 comparisons 1 agree, 1 disagree, 1 are not resolved"
    assert compare(table(apart)) == []


@pytest.mark.parametrize("reference", [False, True])
def test_without_a_number_of_the_paper_the_study_files_expectation_counts(reference):
    expected = {
        "reasoning_acc": Expectation(better=False, because="a derivation"),
        "lm_ppl": Expectation(better=True, because="the paper has a number here, which counts"),
    }
    worse = measured([10.0, 10.1, 10.21], [0.4, 0.41, 0.421])
    first = row("LMM", measured([9.0, 9.1, 9.2], [0.5, 0.51, 0.52]), {"lm_ppl": 27.0})
    verdicts = compare(table(first, row("Linear", worse, {"lm_ppl": 28.0}, reference, expected)))
    assert [(verdict.outcome, verdict.paper) for verdict in verdicts] == [("agrees", -1.0), ("agrees", None)]
    opposite = {"reasoning_acc": Expectation(better=True, because="another")}
    verdicts = compare(table(first, row("Linear", worse, {}, expected=opposite)))
    assert [verdict.outcome for verdict in verdicts] == ["", "disagrees"]
