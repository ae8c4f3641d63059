"""Comparisons of a table's rows: how far a column tells them apart, the best one, and the verdict.

The verdict says in which direction each row differs from the baseline row, and what was expected. The
expected direction is the paper's or, in a column that the paper does not report, the study file's. A
difference is a mean over seeds, paired by seed. It is resolved where the p value of the paired t test,
adjusted by Holm's method over all comparisons that have an expected direction, is below 0.05. What is printed
is what decides: the difference, its 95% Student interval, and that adjusted p value.
"""

from __future__ import annotations

import statistics
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from titans_platform.report.table import Table, TableRow, measured_by_seed
from titans_platform.study.spec import Column, Expectation
from titans_platform.text import NONE, plural

ALPHA = 0.05
AGREES, DISAGREES, UNRESOLVED, ONE_SEED = "agrees", "disagrees", "not resolved", "one seed"


@dataclass(frozen=True)
class Difference:
    """A row minus the baseline row, in a column's unit; positive is better."""

    pairs: tuple[float, ...]
    """The difference of each seed that both rows have."""

    @property
    def mean(self) -> float:
        """Over seeds."""
        return statistics.fmean(self.pairs)

    @cached_property
    def interval(self) -> tuple[float, float] | None:
        """Student's 95% interval of the mean; None for one seed."""
        if self._test is None:
            return None
        low, high = self._test.confidence_interval(1 - ALPHA)
        return float(low), float(high)

    @cached_property
    def p(self) -> float | None:
        """Two-sided p value of the paired t test, unadjusted; None for one seed, 1 where nothing differs."""
        return None if self._test is None else float(np.nan_to_num(self._test.pvalue, nan=1.0))

    @cached_property
    def _test(self) -> Any:
        if len(self.pairs) == 1:
            return None
        # scipy.stats takes a second to import
        from scipy.stats import ttest_rel

        with warnings.catch_warnings():
            # the same difference in every seed: t is infinite and p is 0, which is meant
            warnings.simplefilter("ignore", RuntimeWarning)
            return ttest_rel(self.pairs, [0.0] * len(self.pairs))


@dataclass(frozen=True)
class Comparison:
    """One row and column against the baseline row: the expected direction, and what was measured."""

    row: str
    column: str
    baseline: str
    paper: float | None
    """The paper's difference, in its own unit; positive is better. None where it prints no number."""
    ours: Difference
    expected: Expectation | None = None
    """What the study file expects, where the paper prints no number."""
    p: float | None = None
    """Holm-adjusted p value; None for one seed, and without an expected direction."""

    @property
    def better(self) -> bool | None:
        """Whether the row is expected to be better than the baseline; None without an expectation."""
        if self.paper:
            return self.paper > 0
        return self.expected.better if self.expected else None

    @property
    def outcome(self) -> str:
        """`agrees`, `disagrees`, `not resolved` or `one seed`; empty without an expected direction."""
        if self.better is None:
            return ""
        if len(self.ours.pairs) == 1:
            return ONE_SEED
        if self.p is None or self.p >= ALPHA:
            return UNRESOLVED
        return AGREES if self.better == (self.ours.mean > 0) else DISAGREES


def compare(table: Table) -> list[Comparison]:
    """Every row and column that has numbers against the table's first row; reference rows are left out."""
    rows, found = [row for row in table.rows if not row.row.reference], []
    if not rows:
        return []
    first, *others = rows
    for key, column in table.columns.items():
        sign, base = (1 if column.higher_is_better else -1), by_seed(first, key, column.factor)
        for row in others:
            ours = difference(by_seed(row, key, column.factor), base, sign)
            if ours:
                paper, reference = row.entries[key].paper, first.entries[key].paper
                theirs = None if paper is None or reference is None else sign * (paper - reference)
                expected = row.row.expected.get(key)
                found.append(Comparison(row.row.name, key, first.row.name, theirs, ours, expected))
    return adjust(found)


def by_seed(row: TableRow, key: str, factor: float = 1.0) -> dict[int, float]:
    """The column's value of each seed that has a finite one."""
    kept = measured_by_seed(row.cells, row.results, key)
    return {
        seed: factor * statistics.fmean(result.columns[key] for result in part) for seed, part in kept.items()
    }


def difference(ours: Mapping[int, float], base: Mapping[int, float], sign: int = 1) -> Difference | None:
    """Paired over the seeds that both have; None where there is none."""
    pairs = tuple(sign * (ours[seed] - base[seed]) for seed in sorted(ours.keys() & base.keys()))
    return Difference(pairs) if pairs else None


def adjust(found: Sequence[Comparison]) -> list[Comparison]:
    """The comparisons with Holm-adjusted p values; the family is those with a direction and two seeds."""
    family = [i for i, each in enumerate(found) if each.better is not None and each.ours.p is not None]
    adjusted = dict(zip(family, holm([found[i].ours.p or 0.0 for i in family]), strict=True))
    return [replace(each, p=adjusted.get(i)) for i, each in enumerate(found)]


def holm(ps: Sequence[float]) -> list[float]:
    """P values adjusted by Holm's step-down method (Scand. J. Statist. 6, 1979)."""
    adjusted, largest = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = largest
    return adjusted


def count_outcomes(found: Sequence[Comparison]) -> dict[str, int]:
    """How many comparisons have each outcome; those without an expected direction are left out."""
    counts = Counter(each.outcome for each in found)
    return {outcome: counts[outcome] for outcome in (AGREES, DISAGREES, UNRESOLVED, ONE_SEED)}


def tally(found: Sequence[Comparison]) -> str:
    """The counts in words."""
    agree, disagree, unresolved, single = count_outcomes(found).values()
    given = plural(agree + disagree + unresolved + single, "comparison")
    text = f"of {given} {agree} agree, {disagree} disagree, {unresolved} are not resolved"
    return f"{text}, {single} have one seed" if single else text


def method(found: Sequence[Comparison]) -> str:
    """What the numbers of a verdict are, in one sentence."""
    given = plural(sum(each.p is not None for each in found), "comparison")
    return (
        "Each number is the mean difference paired by seed (better is +), with its 95% Student interval and "
        f"the p value of the paired t test, Holm-adjusted over the {given}; it is resolved where p < {ALPHA}."
    )


class VerdictCell(NamedTuple):
    """One comparison as text."""

    difference: str
    interval: str
    p: str
    outcome: str

    def __str__(self) -> str:
        return " ".join(part for part in self if part)


@dataclass(frozen=True)
class VerdictTable:
    """The verdict as text, the same in every format."""

    sentence: str
    method: str
    heads: list[str]
    rows: list[tuple[str, list[VerdictCell]]]

    @property
    def body(self) -> list[list[str]]:
        """The lines as plain text."""
        return [[row, *map(str, cells)] for row, cells in self.rows]


def verdict_table(comparisons: Sequence[Comparison], columns: Mapping[str, Column]) -> VerdictTable | None:
    """The comparisons as text; None where nothing has an expected direction, or no row has two seeds."""
    found = [each for each in comparisons if each.better is not None]
    if not any(len(each.ours.pairs) > 1 for each in found):
        return None
    base, by_place = found[0].baseline, {(each.row, each.column): each for each in found}
    columns = {key: c for key, c in columns.items() if any(each.column == key for each in found)}
    lines = [
        (row, [cell(by_place.get((row, key)), c.decimals) for key, c in columns.items()])
        for row in dict.fromkeys(each.row for each in found)
    ]
    heads = [f"minus {base}, better is +", *(column.titled() for column in columns.values())]
    whose = "the paper's" if any(each.paper for each in found) else "the study file's"
    sentence = f"Against {base}, beside {whose} direction: {tally(found)}."
    return VerdictTable(sentence, method(found), heads, lines)


def cell(found: Comparison | None, decimals: int) -> VerdictCell:
    """`+0.35 [+0.24, +0.46] p=0.004 agrees` in parts; a dash where nothing was compared."""
    if found is None:
        return VerdictCell(NONE, "", "", "")
    signed, ours = f"+.{decimals}f", found.ours
    ends = "[{:{f}}, {:{f}}]".format(*ours.interval, f=signed) if ours.interval else ""
    p = "" if found.p is None else "p<0.001" if found.p < 0.001 else f"p={found.p:.3f}"
    return VerdictCell(f"{ours.mean:{signed}}", ends, p, found.outcome)


def best_rows(table: Table, key: str) -> set[str]:
    """The rows whose mean, as printed, is the best; none where it is not better than chance.

    Reference rows take no part, and there must be two different means to compare.
    """
    column = table.columns[key]
    sign = 1 if column.higher_is_better else -1
    means = {
        row.row.name: sign * round(mean, column.decimals)
        for row in table.rows
        if not row.row.reference and (mean := row.entries[key].mean) is not None
    }
    best, chance = max(means.values(), default=0.0), table.chance.get(key)
    if len(set(means.values())) < 2 or (chance is not None and best <= sign * chance):
        return set()
    return {name for name, mean in means.items() if mean == best}
