"""The verdict: which way each row goes from the row it is compared with, as was said before and here.

What was said is the paper's numbers or, of a column that it has not, the study file's expectation.

A difference is of means over seeds, paired by seed. It is resolved where two intervals at 95% leave out zero:
the bootstrap's, and Student's, since a bootstrap of three to five seeds alone is too narrow.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from titans_platform.report.table import Table, TableRow, finite
from titans_platform.study.spec import Expectation
from titans_platform.text import NONE, plural

LEVEL = 0.95
RESAMPLES = 10_000
AGREES, DISAGREES, UNRESOLVED = "agrees", "disagrees", "not resolved"


@dataclass(frozen=True)
class Difference:
    """A row minus the row it is compared with, in a column's unit; positive is better."""

    pairs: tuple[float, ...]
    """One of each seed that both rows have."""

    @property
    def mean(self) -> float:
        """Over seeds."""
        return statistics.fmean(self.pairs)

    @cached_property
    def interval(self) -> tuple[float, float]:
        """The bootstrap's: quantiles of the mean of as many pairs drawn again, from one fixed stream."""
        if len(self.pairs) == 1:
            return -math.inf, math.inf
        drawn = np.random.default_rng(0).choice(np.array(self.pairs), (RESAMPLES, len(self.pairs))).mean(1)
        low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return float(low), float(high)

    @cached_property
    def resolved(self) -> bool:
        """Whether the bootstrap's interval and Student's leave out zero on one side; never with one pair."""
        if len(self.pairs) == 1:
            return False
        from scipy.stats import t  # which takes a second to import

        error = statistics.stdev(self.pairs) / math.sqrt(len(self.pairs))
        reach = float(t.ppf((1 + LEVEL) / 2, len(self.pairs) - 1)) * error
        (low, high), mean = self.interval, self.mean
        return min(low, mean - reach) > 0 or max(high, mean + reach) < 0


@dataclass(frozen=True)
class Verdict:
    """What the paper says of a row and column, and what the seeds here say."""

    row: str
    column: str
    baseline: str
    paper: float | None
    """The paper's difference, in its own unit; positive is better. None where it prints no number."""
    ours: Difference
    expected: Expectation | None = None
    """What the study file expects, where the paper prints no number."""

    @property
    def better(self) -> bool | None:
        """Whether the row should be better than the baseline; None where nobody says."""
        if self.paper:
            return self.paper > 0
        return self.expected.better if self.expected else None

    @property
    def outcome(self) -> str:
        """`agrees`, `disagrees` or `not resolved`; empty where no direction is said."""
        if self.better is None:
            return ""
        if not self.ours.resolved:
            return UNRESOLVED
        return AGREES if self.better == (self.ours.mean > 0) else DISAGREES


def verdicts(table: Table) -> list[Verdict]:
    """One a row and column that has numbers; the first row of the table is the one compared with."""
    rows, found = compared(table), []
    if not rows:
        return []
    first, *others = rows
    for key, column in table.columns.items():
        sign, before = (1 if column.higher_is_better else -1), by_seed(first, key, column.factor)
        for row in others:
            ours = difference(by_seed(row, key, column.factor), before, sign)
            if ours:
                paper = _paper(row, first, key, sign)
                expected = row.row.expected.get(key)
                found.append(Verdict(row.row.name, key, first.row.name, paper, ours, expected))
    return found


def compared(table: Table) -> list[TableRow]:
    """The rows of the paper's table: those that are there for reference are not compared."""
    return [row for row in table.rows if not row.row.reference]


def _paper(row: TableRow, first: TableRow, key: str, sign: int) -> float | None:
    theirs, base = row.entries[key].paper, first.entries[key].paper
    return None if theirs is None or base is None else sign * (theirs - base)


def by_seed(row: TableRow, key: str, factor: float = 1.0) -> dict[int, float]:
    """The column's value of each seed that has a finite one."""
    seeds = {cell.name: cell.seed for cell in row.cells}
    values = {seeds[result["cell"]]: result["columns"].get(key) for result in row.results}
    return {seed: factor * value for seed, value in values.items() if finite(value)}


def difference(ours: Mapping[int, float], base: Mapping[int, float], sign: int = 1) -> Difference | None:
    """Paired over the seeds that both have; None where there is none."""
    pairs = tuple(sign * (ours[seed] - base[seed]) for seed in sorted(ours.keys() & base.keys()))
    return Difference(pairs) if pairs else None


def counted(found: Sequence[Verdict]) -> dict[str, int]:
    """How many comparisons end in each way; those of which no direction is said left out."""
    counts = Counter(verdict.outcome for verdict in found)
    return {outcome: counts[outcome] for outcome in (AGREES, DISAGREES, UNRESOLVED)}


def tally(found: Sequence[Verdict]) -> str:
    """The counts in words."""
    agree, disagree, unresolved = counted(found).values()
    given = plural(agree + disagree + unresolved, "comparison")
    return f"of {given} {agree} agree, {disagree} disagree, {unresolved} are not resolved"


class Judged(NamedTuple):
    """One comparison as text."""

    difference: str
    interval: str
    outcome: str

    def __str__(self) -> str:
        return " ".join(part for part in self if part)


@dataclass(frozen=True)
class Verdicts:
    """The verdict as every view of a table shows it: a sentence, headings, a line a row."""

    sentence: str
    heads: list[str]
    rows: list[tuple[str, list[Judged]]]

    @property
    def body(self) -> list[list[str]]:
        """The lines as plain text."""
        return [[row, *map(str, cells)] for row, cells in self.rows]


def shown(table: Table, intervals: bool = True) -> Verdicts | None:
    """Differences as text, positive is better, with what they mean for the paper's direction.

    None where no direction is said, or where one seed cannot resolve any.
    """
    found = [verdict for verdict in verdicts(table) if verdict.better is not None]
    if not any(len(verdict.ours.pairs) > 1 for verdict in found):
        return None
    base, by_place = found[0].baseline, {(verdict.row, verdict.column): verdict for verdict in found}
    columns = {key: c for key, c in table.columns.items() if any(v.column == key for v in found)}
    lines = [
        (row, [_judged(by_place.get((row, key)), c.decimals, intervals) for key, c in columns.items()])
        for row in dict.fromkeys(verdict.row for verdict in found)
    ]
    heads = [f"minus {base}, better is +", *(column.titled() for column in columns.values())]
    whose = "the paper's" if any(verdict.paper for verdict in found) else "the study file's"
    return Verdicts(f"Against {base}, beside {whose} direction: {tally(found)}.", heads, lines)


def _judged(verdict: Verdict | None, decimals: int, intervals: bool) -> Judged:
    if verdict is None:
        return Judged(NONE, "", "")
    ours, signed = verdict.ours, f"+.{decimals}f"
    low, high = ours.interval
    ends = f"[{low:{signed}}, {high:{signed}}]" if intervals and len(ours.pairs) > 1 else ""
    return Judged(f"{ours.mean:{signed}}", ends, verdict.outcome)


def verdict_rows(table: Table) -> list[list[object]]:
    """For a spreadsheet: a heading, then a line a row and column, in the column's unit."""
    heads: list[object] = ["row", "column", "baseline", "difference", "low", "high", "pairs", "resolved"]
    lines = []
    for found in verdicts(table):
        ours = found.ours
        numbers = [ours.mean, *ours.interval, len(ours.pairs), ours.resolved, found.paper, found.outcome]
        why = found.expected.because if found.expected else None
        lines.append([found.row, found.column, found.baseline, *numbers, why])
    return [[*heads, "paper difference", "verdict", "expected because"], *lines]


@dataclass(frozen=True)
class LockIn:
    """How many seeds of a row solve a task, and of the row it is compared with."""

    row: str
    task: str
    solved: int
    seeds: int
    baseline_solved: int
    baseline_seeds: int
    p: float
    """Fisher's exact test, two-sided, of the two rates."""


def lock_ins(table: Table) -> list[LockIn]:
    """Of each task with two kinds of outcome, solved and not: rates of the rows, beside the first row's.

    A seed solves a task where its accuracy is above the middle between chance and all right.
    """
    from scipy.stats import fisher_exact

    rows, found = compared(table), []
    tasks = dict.fromkeys(key for row in rows for result in row.results for key in result.get("tasks", {}))
    for task in tasks:
        rates = {row.row.name: _solved(row, task) for row in rows}
        if len({outcome for outcomes in rates.values() for outcome in outcomes}) < 2:
            continue
        (_, base), *others = rates.items()
        for name, own in others:
            if own and base:
                sides = [[sum(own), len(own) - sum(own)], [sum(base), len(base) - sum(base)]]
                p = float(fisher_exact(sides).pvalue)  # pyright: ignore[reportAttributeAccessIssue]
                found.append(LockIn(name, task, sum(own), len(own), sum(base), len(base), p))
    return found


def _solved(row: TableRow, task: str) -> list[bool]:
    measured = [result["tasks"][task] for result in row.results if task in result.get("tasks", {})]
    return [
        m["value"] > (1 + m["chance"]) / 2
        for m in measured
        if m.get("chance") is not None and 0 <= m["chance"] < 1 and 0 <= m.get("value", -1) <= 1
    ]


def lock_in_lines(table: Table) -> list[str]:
    """A sentence for each row that solves tasks at another rate than the first row, by Fisher's test."""
    rates: dict[tuple[str, tuple[int, ...], float], list[str]] = {}
    for found in lock_ins(table):
        if found.p < 1 - LEVEL:
            counts = (found.solved, found.seeds, found.baseline_solved, found.baseline_seeds)
            # without the column, which a task's name begins with
            rates.setdefault((found.row, counts, found.p), []).append(found.task.partition("/")[2])
    return [
        f"{row} solves {plural(len(tasks), 'task')} in {own} of {seeds} seeds, the first row in {base} of "
        f"{of} (p = {p:.3f}{' each' if len(tasks) > 1 else ''}): {', '.join(_gathered(tasks))}"
        for (row, (own, seeds, base, of), p), tasks in rates.items()
    ]


def _gathered(tasks: Sequence[str]) -> list[str]:
    """``a@1, a@2`` as one ``a@1/2``."""
    lengths: dict[str, list[str]] = {}
    for task in tasks:
        name, _, length = task.partition("@")
        lengths.setdefault(name, []).append(length)
    by_size = {
        name: sorted(found, key=lambda length: (len(length), length)) for name, found in lengths.items()
    }
    return [f"{name}@{'/'.join(found)}".rstrip("@") for name, found in by_size.items()]
