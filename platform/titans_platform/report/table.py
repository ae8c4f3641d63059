"""A study's results as a table: means and standard deviations over seeds, chance."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeGuard

from titans_platform.files import read_json
from titans_platform.runs.folder import TIME, Result
from titans_platform.study.grid import Cell, StudyRun
from titans_platform.study.spec import Axis, Column, Row
from titans_platform.study.status import CellStatus, cell_statuses


@dataclass(frozen=True)
class Entry:
    """One number of the table: a column's value over the seeds of a row."""

    values: tuple[float, ...]
    wanted: int
    paper: float | None = None

    @property
    def mean(self) -> float | None:
        """Mean over the finished seeds; None without any."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def sd(self) -> float | None:
        """Sample standard deviation over seeds; None for fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class TableRow:
    """A row: its entries by column, its cells and their results."""

    row: Row
    cells: tuple[Cell, ...]
    results: tuple[Result, ...]
    unfinished: tuple[CellStatus, ...] = ()
    """Status of the cells without a result."""
    entries: dict[str, Entry] = field(default_factory=dict)
    stale: tuple[str, ...] = ()
    """Commits, other than the current one, that made some of its cells."""

    @property
    def failures(self) -> tuple[str, ...]:
        """Why cells failed."""
        return tuple(cell.reason for cell in self.unfinished if cell.reason)

    def size_of(self, key: str) -> int | None:
        """``parameters`` or ``state_bytes`` of the row's model, from its results."""
        return next((size for each in self.results if (size := getattr(each, key)) is not None), None)


@dataclass(frozen=True)
class Table:
    """A study at one scale, from its finished cells."""

    study: str
    scale: str
    label: str
    """Name of the study's folder and of its MLflow run."""
    description: str
    note: str
    """What the study file says of the scale's numbers."""
    comparable: bool
    """Whether the numbers can be compared with the paper's, not only the order of the rows."""
    axes: Mapping[str, Axis]
    columns: Mapping[str, Column]
    rows: tuple[TableRow, ...]
    chance: Mapping[str, float]
    """By column, in its unit; only of those that have a chance level."""
    side_by_side: bool
    """Whether cells ran at the same time on one machine, so that none was timed alone."""
    commit: str
    """The commit of the code that reads the results."""
    command: str
    """The command that reproduces the table."""
    unfinished: int
    """Cells asked for that have no result."""

    @property
    def results(self) -> list[Result]:
        """The results of all finished cells, row by row."""
        return [result for row in self.rows for result in row.results]

    @property
    def seeds(self) -> list[int]:
        """All seeds of the table's cells."""
        return sorted({cell.seed for row in self.rows for cell in row.cells})

    @property
    def timed(self) -> list[str]:
        """The columns that were timed."""
        tasks = {task_of(key)[:2] for result in self.results for key in result.tasks}
        return [key for key in self.columns if (key, "throughput") in tasks]

    @property
    def missing(self) -> int:
        """Cells that have no result."""
        return sum(len(row.cells) - len(row.results) for row in self.rows)


def build_table(run: StudyRun) -> Table:
    """Read the results of a study's cells into a table, in the order of its rows."""
    columns, rows = run.columns, []
    parts: dict[str, list[Row]] = {}
    for row in run.rows:
        parts.setdefault(row.as_line().name, []).append(row)
    for first, *others in parts.values():
        names = {row.name for row in (first, *others)}
        if cells := [cell for cell in run.whole if cell.row in names]:
            rows.append(_table_row(run, first.as_line(), cells))
    levels: dict[str, set[float]] = {}
    for result in (result for row in rows for result in row.results):
        for key in columns:
            if finite(level := result.chance.get(key)):
                levels.setdefault(key, set()).add(level)
    finished = {result.cell for row in rows for result in row.results}
    seeds = ",".join(map(str, sorted({cell.seed for row in rows for cell in row.cells})))
    changed = "".join(f" --set {shlex.quote(override)}" for override in run.overrides)
    study, scale = run.study, run.study.scales[run.scale_name]
    return Table(
        study=study.name,
        scale=run.scale_name,
        label=run.label,
        description=" ".join(study.description.split()),
        note=" ".join(scale.note.split()),
        comparable=scale.comparable,
        axes=study.axes,
        columns=columns,
        rows=tuple(rows),
        # cells of one row may have different levels
        chance={key: columns[key].factor * statistics.fmean(levels[key]) for key in levels},
        side_by_side=_side_by_side(run),
        commit=run.commit,
        command=f"titans sweep run {study.name} --scale {run.scale_name} --seeds {seeds}{changed}",
        unfinished=len({cell.name for cell in run.cells} - finished),
    )


def _side_by_side(run: StudyRun) -> bool:
    found = [span for cell in run.whole if (span := read_json(cell.folder(run.root).path / TIME))]
    spans = sorted((str(span.get("host")), span["began"], span["ended"]) for span in found)
    return any(one[0] == two[0] and two[1] < one[2] for one, two in pairwise(spans))


def _table_row(run: StudyRun, row: Row, cells: Sequence[Cell]) -> TableRow:
    found = [(cell, cell.folder(run.root).shown_result()) for cell in cells]
    results = [result for _, result in found if result is not None]
    unfinished = cell_statuses([cell for cell, result in found if result is None], run.root)
    entries = {}
    for key, column in run.columns.items():
        kept = measured_by_seed(cells, results, key).values()
        means = [[result.columns[key] for result in part] for part in kept]
        values = tuple(column.factor * statistics.fmean(part) for part in means)
        wanted = len({cell.seed for cell in cells if key in cell.config.eval.columns})
        entries[key] = Entry(values, wanted, row.paper.get(key))
    stale = sorted({result.commit for result in results} - {run.commit})
    return TableRow(row, tuple(cells), tuple(results), tuple(unfinished), entries, tuple(stale))


def measured_by_seed(cells: Sequence[Cell], results: Sequence[Result], key: str) -> dict[int, list[Result]]:
    """By seed, the results whose mean is a row's value in a column; only seeds whose results are complete.

    They are several where cells of one line at other points of the axes measure the same column.
    """
    done = {result.cell: result for result in results if finite(result.columns.get(key))}
    wanted: dict[int, list[str | None]] = {}
    for cell in cells:
        if key in cell.config.eval.columns or cell.name in done:
            wanted.setdefault(cell.seed, []).append(cell.name)
    return {
        seed: [done[name] for name in names if name]
        for seed, names in wanted.items()
        if all(name in done for name in names)
    }


def finite(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def task_of(key: str) -> tuple[str, str, int | None]:
    """`column/task@tokens` in its parts; None where there is no length."""
    owner, _, rest = key.partition("/")
    task, at, length = rest.rpartition("@")
    return (owner, task, int(length)) if at and length.isdigit() else (owner, rest, None)
