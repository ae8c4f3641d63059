"""A study's results as a table: means and standard deviations over seeds, chance, the best rows, the verdict.

The verdict says in which direction each row differs from the baseline row, and what was expected. The
expected direction is the paper's or, in a column that the paper does not report, the study file's. A
difference is a mean over seeds, paired by seed. It is resolved where the p value of the paired t test,
adjusted by Holm's method over all comparisons that have an expected direction, is below 0.05. What is printed
is what decides: the difference, its 95% Student interval, and that adjusted p value.
"""

from __future__ import annotations

import math
import shlex
import statistics
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeGuard

import numpy as np

from titans_platform.runs.folder import Result
from titans_platform.study.grid import Cell, StudyRun
from titans_platform.study.spec import Column, Expectation, Row
from titans_platform.study.status import CellStatus, cell_statuses
from titans_platform.text import NONE, number, plural


@dataclass(frozen=True)
class Entry:
    """One number of the table: a column's value over the seeds of a row.

    As a text: mean±sd, in parentheses if it is not better than its floor.
    """

    column: Column
    values: tuple[float, ...]
    wanted: int
    """Number of seeds, finished or not."""
    paper: float | None = None
    failed: bool = False
    """A cell of the row has failed."""
    floor: float | None = None
    """Score of counting or of the best heuristic on the same items, or chance; in the column's unit."""

    @property
    def above_floor(self) -> bool:
        """False if the mean is not better than the floor: such a number counts in no verdict."""
        sign = 1 if self.column.higher_is_better else -1
        return self.mean is None or self.floor is None or sign * (self.mean - self.floor) > 0

    @property
    def mean(self) -> float | None:
        """Mean over the finished seeds; None without any."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def sd(self) -> float | None:
        """Sample standard deviation over seeds; None for fewer than two."""
        return deviation(self.values)

    @property
    def mean_text(self) -> str:
        """The mean; `failed` or a dash where there is none."""
        return "failed" if self.failed and not self.values else number(self.mean, self.column.decimals)

    @property
    def sd_text(self) -> str:
        """The standard deviation; empty where there is none."""
        return "" if self.sd is None else number(self.sd, self.column.decimals)

    @property
    def seeds_text(self) -> str:
        """`2/3` where seeds are missing, else empty."""
        return f"{len(self.values)}/{self.wanted}" if len(self.values) < self.wanted else ""

    @property
    def paper_text(self) -> str:
        """The paper's number, or a dash."""
        return number(self.paper, max(2, self.column.decimals))

    def __str__(self) -> str:
        spread = f"±{self.sd_text}" if self.sd_text else ""
        value = f"{self.mean_text}{spread}" if self.above_floor else f"({self.mean_text}{spread})"
        return f"{value} {self.seeds_text}".rstrip()


@dataclass(frozen=True)
class TableRow:
    """A row: its entries by column, its cells and their results."""

    row: Row
    cells: tuple[Cell, ...]
    statuses: tuple[CellStatus, ...]
    """The state of each of its cells."""
    results: tuple[Result, ...]
    """Results of the finished ones."""
    entries: dict[str, Entry] = field(default_factory=dict)
    stale: tuple[str, ...] = ()
    """Commits, other than the current one, that made some of its cells."""

    @property
    def failures(self) -> list[CellStatus]:
        """The cells whose last run failed; one that ran again keeps the result before."""
        return [cell for cell in self.statuses if cell.reason]

    @property
    def lines(self) -> list[tuple[CellStatus, Result | None]]:
        """Each cell with its result."""
        results = {result.cell: result for result in self.results}
        return [(cell, results.get(cell.cell or "")) for cell in self.statuses]

    def runs(self, key: str) -> list[str]:
        """MLflow ids of the runs that measured a column."""
        return [r.mlflow_run_id for r in self.results if r.mlflow_run_id and key in r.columns]

    @property
    def rates(self) -> set[float]:
        """Learning rates of its cells."""
        return {cell.config.optim.lr for cell in self.cells}

    @property
    def sizes(self) -> dict[str, float | None]:
        """Parameters and state bytes of its model, tokens and learning rate of a run; None if runs differ."""
        sizes: dict[str, set[Any]] = {
            key: {size for r in self.results if (size := getattr(r, key)) is not None}
            for key in ("parameters", "state_bytes")
        }
        sizes |= {"tokens": {cell.config.tokens for cell in self.cells}, "rate": self.rates}
        return {key: next(iter(values)) if len(values) == 1 else None for key, values in sizes.items()}


@dataclass(frozen=True)
class Table:
    """A study at one scale, from its finished cells."""

    run: StudyRun
    columns: Mapping[str, Column]
    rows: tuple[TableRow, ...]
    chance: Mapping[str, float]
    """By column, in its unit; columns without a chance level are left out."""
    floors: Mapping[str, float]
    """By column, in its unit: the mean of its rows' floors."""
    side_by_side: bool
    """True if cells ran at the same time on one machine, so that none was timed alone."""

    @property
    def results(self) -> list[Result]:
        """The results of all finished cells, row by row."""
        return [result for row in self.rows for result in row.results]

    @property
    def seeds(self) -> list[int]:
        """All seeds of the table's cells."""
        return sorted({cell.seed for row in self.rows for cell in row.cells})

    @property
    def other_seeds(self) -> list[int]:
        """Seeds of the table that are not the scale's, such as the seeds a recipe was tuned on."""
        return [seed for seed in self.seeds if seed not in self.run.scale.seeds]

    @property
    def command(self) -> str:
        """The command that reproduces the table."""
        run, seeds = self.run, ",".join(map(str, self.seeds))
        changed = "".join(f" --set {shlex.quote(override)}" for override in run.overrides)
        return f"titans sweep run {run.study.name} --scale {run.scale_name} --seeds {seeds}{changed}"

    @property
    def timed(self) -> list[str]:
        """The columns that were timed."""
        tasks = {task_of(key)[:2] for result in self.results for key in result.tasks}
        return [key for key in self.columns if (key, "throughput") in tasks]

    @property
    def missing(self) -> int:
        """Cells that are not done: without a result, or with a former one that is to be replaced."""
        return sum(cell.state != "done" for row in self.rows for cell in row.statuses)

    @property
    def unfinished(self) -> int:
        """Requested cells that have no result."""
        done = {cell.cell for row in self.rows for cell in row.statuses if cell.state == "done"}
        return len({cell.name for cell in self.run.cells} - done)


def build_table(run: StudyRun) -> Table:
    """Read the results of a study's cells into a table, in the order of its rows."""
    columns, rows = run.columns, []
    parts: dict[str, list[Row]] = {}
    for row in run.rows:
        parts.setdefault(row.as_line().name, []).append(row)
    for part in parts.values():
        names = {row.name for row in part}
        if cells := [cell for cell in run.whole if cell.row in names]:
            rows.append(_table_row(run, part[0].as_line(), cells))
    results = [result for row in rows for result in row.results]
    levels = {key: [x for x in {r.chance.get(key) for r in results} if finite(x)] for key in columns}
    floors = {key: [x for row in rows if (x := row.entries[key].floor) is not None] for key in columns}
    times = [span for cell in run.whole if (span := cell.folder(run.root).record().get("attempt"))]
    spans = sorted((str(span.get("host")), span["began"], span["ended"]) for span in times)
    return Table(
        run=run, columns=columns, rows=tuple(rows),
        # cells of one row may have different levels
        chance={key: columns[key].factor * statistics.fmean(level) for key, level in levels.items() if level},
        floors={key: statistics.fmean(floor) for key, floor in floors.items() if floor},
        side_by_side=any(one[0] == two[0] and two[1] < one[2] for one, two in pairwise(spans)),
    )  # fmt: skip


def _table_row(run: StudyRun, row: Row, cells: Sequence[Cell]) -> TableRow:
    results = tuple(r for cell in cells if (r := cell.folder(run.root).shown_result()) is not None)
    stale = tuple(sorted({result.commit for result in results} - {run.commit}))
    table_row = TableRow(row, tuple(cells), tuple(cell_statuses(cells, run.root)), results, stale=stale)
    entries = {}
    for key, column in run.columns.items():
        values = by_seed(table_row, key, column.factor).values()
        wanted = len({cell.seed for cell in cells if key in cell.config.eval.columns})
        floors = [column.factor * x for r in results if (x := floor_of(r, key)) is not None]
        floor = statistics.fmean(floors) if floors else None
        failed = bool(table_row.failures)
        entries[key] = Entry(column, tuple(values), wanted, row.paper.get(key), failed, floor)
    return replace(table_row, entries=entries)


def floor_of(result: Result, key: str) -> float | None:
    """Return a column's floor: the mean over its tasks, of a task without a floor its chance.

    Returns:
        None if the column has neither.
    """
    tasks: dict[str, list[float | None]] = {}
    for name, score in result.tasks.items():
        column, task, _ = task_of(name)
        if column == key:
            tasks.setdefault(task, []).append(score.chance if score.floor is None else score.floor)
    levels = [level for task in tasks.values() for level in task]
    if not levels or None in levels:
        return result.chance.get(key)
    return statistics.fmean(statistics.fmean(filter(finite, task)) for task in tasks.values())


def deviation(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation; None for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None


def finite(value: Any) -> TypeGuard[float]:
    """Return True if a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def task_of(key: str) -> tuple[str, str, int | None]:
    """Split `column/task@tokens` into its parts; None without a length."""
    owner, _, rest = key.partition("/")
    task, at, length = rest.rpartition("@")
    return (owner, task, int(length)) if at and length.isdigit() else (owner, rest, None)


SIZES = {"parameters": "parameters", "state_bytes": "state bytes", "tokens": "tokens", "rate": "rate"}
"""Headings of `TableRow.sizes`."""
ALPHA = 0.05
AGREES, DISAGREES, UNRESOLVED, ONE_SEED = "agrees", "disagrees", "not resolved", "one seed"
AT_FLOOR, RATES = "not above the floor", "rates differ"


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
        if len(self.pairs) < 2:
            return None
        low, high = self._test.confidence_interval(1 - ALPHA)
        return float(low), float(high)

    @cached_property
    def p(self) -> float | None:
        """Two-sided p value of the paired t test, unadjusted; None for one seed, 1 where nothing differs.

        Where all seeds differ by the same number, as accuracies over few items may, t is infinite; p is then
        the smallest p value of a sign-flip test, 2^(1 - n).
        """
        if len(self.pairs) < 2:
            return None
        if np.ptp(self.pairs) <= 1e-9 * abs(self.mean):
            return 2.0 ** (1 - len(self.pairs)) if self.mean else 1.0
        return float(self._test.pvalue)

    @cached_property
    def _test(self) -> Any:
        # scipy.stats takes a second to import
        from scipy.stats import ttest_rel

        with warnings.catch_warnings():
            # the same difference in every seed: t is infinite, and `p` does not use it
            warnings.simplefilter("ignore", RuntimeWarning)
            return ttest_rel(self.pairs, [0.0] * len(self.pairs))


@dataclass(frozen=True)
class Comparison:
    """One row and column against the baseline row: the expected direction, and what was measured."""

    row: str
    column: str
    baseline: str
    paper: float | None
    """The paper's difference, in its own unit; positive is better. None if it prints no number."""
    ours: Difference
    expected: Expectation | None = None
    """The study file's expectation, if the paper prints no number."""
    p: float | None = None
    """Holm-adjusted p value; None for one seed, and without an expected direction."""
    above_floor: bool = True
    """False if the row or the baseline row is not better than its floor."""
    same_rate: bool = True
    """False if its learning rate is another than the baseline row's, and no study chose both."""

    @property
    def better(self) -> bool | None:
        """True if the row is expected to be better than the baseline; None without an expectation."""
        if self.paper:
            return self.paper > 0
        return self.expected.better if self.expected else None

    @property
    def outcome(self) -> str:
        """`agrees`, `disagrees`, `not resolved`, `one seed`, `not above the floor` or `rates differ`.

        Empty without an expected direction.
        """
        if self.better is None:
            return ""
        if not self.above_floor:
            return AT_FLOOR
        if not self.same_rate:
            return RATES
        if len(self.ours.pairs) == 1:
            return ONE_SEED
        if self.p is None or self.p >= ALPHA:
            return UNRESOLVED
        return AGREES if self.better == (self.ours.mean > 0) else DISAGREES


def compare(table: Table) -> list[Comparison]:
    """Compare every row that has numbers with the table's first row.

    Reference rows are compared where the study expects a direction.
    """
    if not (first := next((row for row in table.rows if not row.row.reference), None)):
        return []
    comparisons = []
    for key, column in table.columns.items():
        sign, base = 1 if column.higher_is_better else -1, by_seed(first, key, column.factor)
        for row in table.rows:
            expected = row.row.expected.get(key)
            compared = row is not first and (expected or not row.row.reference)
            if compared and (ours := difference(by_seed(row, key, column.factor), base, sign)):
                paper, reference = row.entries[key].paper, first.entries[key].paper
                printed = None
                if paper is not None and reference is not None:
                    printed = sign * (paper - reference)
                comparisons.append(Comparison(
                    row.row.name, key, first.row.name, printed, ours, expected,
                    above_floor=first.entries[key].above_floor and row.entries[key].above_floor,
                    same_rate=bool(table.run.scale.tuned) or row.rates == first.rates,
                ))  # fmt: skip
    return adjust(comparisons)


def by_seed(row: TableRow, key: str, factor: float = 1.0) -> dict[int, float]:
    """Return the column's value of each seed; only of seeds with all their results.

    Cells of one line at other points of the axes may measure the same column: the value is their mean.
    """
    measured = ((result.cell, result.columns.get(key)) for result in row.results)
    values: dict[str | None, float] = {name: value for name, value in measured if finite(value)}
    cells: dict[int, list[str | None]] = {}
    for cell in row.cells:
        if key in cell.config.eval.columns or cell.name in values:
            cells.setdefault(cell.seed, []).append(cell.name)
    complete = {seed: names for seed, names in cells.items() if all(name in values for name in names)}
    return {seed: factor * statistics.fmean(values[n] for n in names) for seed, names in complete.items()}


def difference(ours: Mapping[int, float], base: Mapping[int, float], sign: int = 1) -> Difference | None:
    """Pair over the seeds that both have; None without any."""
    pairs = tuple(sign * (ours[seed] - base[seed]) for seed in sorted(ours.keys() & base.keys()))
    return Difference(pairs) if pairs else None


def adjust(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Add Holm-adjusted p values to the comparisons.

    The family has an expected direction, at least two seeds, both numbers above their floors, and one rate.
    """
    family = [i for i, each in enumerate(comparisons) if each.outcome in (AGREES, DISAGREES, UNRESOLVED)]
    adjusted = dict(zip(family, holm([comparisons[i].ours.p or 0.0 for i in family]), strict=True))
    return [replace(each, p=adjusted.get(i)) for i, each in enumerate(comparisons)]


def holm(ps: Sequence[float]) -> list[float]:
    """P values adjusted by Holm's step-down method (Scand. J. Statist. 6, 1979)."""
    # scipy, which MLflow brings, has Benjamini-Hochberg only; statsmodels would be a dependency for six lines
    adjusted, largest = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = largest
    return adjusted


def tally(comparisons: Sequence[Comparison]) -> str:
    """Describe the counts in words."""
    counts = Counter(each.outcome for each in comparisons)
    outcomes = AGREES, DISAGREES, UNRESOLVED, ONE_SEED, AT_FLOOR, RATES
    agree, disagree, unresolved, single, floor, rates = map(counts.__getitem__, outcomes)
    total = plural(agree + disagree + unresolved + single, "comparison")
    text = f"of {total} {agree} agree, {disagree} disagree, {unresolved} are not resolved"
    text += f", {single} have one seed" if single else ""
    text += f"; {floor} more are with a number that is not above its floor" if floor else ""
    return f"{text}; {rates} more are across learning rates" if rates else text


def method(comparisons: Sequence[Comparison]) -> str:
    """Describe the numbers of a verdict in one sentence."""
    total = plural(sum(each.p is not None for each in comparisons), "comparison")
    return (
        "Each number is the mean difference paired by seed (better is +), with its 95% Student interval and "
        f"the p value of the paired t test, Holm-adjusted over the {total}; it is resolved where p < {ALPHA}."
    )


def cell(comparison: Comparison | None, decimals: int) -> str:
    """`+0.35 [+0.24, +0.46] p=0.004 agrees`; a dash where nothing was compared."""
    if comparison is None:
        return NONE
    signed, ours = f"+.{decimals}f", comparison.ours
    ends = "[{:{f}}, {:{f}}]".format(*ours.interval, f=signed) if ours.interval else ""
    p = ""
    if comparison.p is not None:
        # 0.0497 would print as 0.050, which is not below the level
        digits = 4 if round(comparison.p, 3) == ALPHA else 3
        p = "p<0.001" if comparison.p < 0.001 else f"p={comparison.p:.{digits}f}"
    return " ".join(part for part in (f"{ours.mean:{signed}}", ends, p, comparison.outcome) if part)


def best_rows(table: Table, key: str) -> set[str]:
    """Return the rows whose mean, as printed, is the best; none if it is not better than its floor.

    Reference rows take no part, and there must be two different means to compare.
    """
    column = table.columns[key]
    sign = 1 if column.higher_is_better else -1
    entries = {row.row.name: row.entries[key] for row in table.rows if not row.row.reference}
    means = {
        name: sign * round(entry.mean, column.decimals)
        for name, entry in entries.items() if entry.mean is not None
    }  # fmt: skip
    best = max(means.values(), default=0.0)
    if len(set(means.values())) < 2:
        return set()
    return {name for name, mean in means.items() if mean == best and entries[name].above_floor}
