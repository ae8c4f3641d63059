"""Data of the figures: the rows with their axis values and, for each seed, every measure.

A row's axis values are its ``axes``; of a row without axes, the fields that it sets.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from titans_platform.report.table import Table, TableRow, task_of
from titans_platform.runs.folder import Result
from titans_platform.study.spec import Axis, Column, Row
from titans_platform.text import flatten

Value = float | str
Curve = Sequence[tuple[int, float]]
THROUGHPUT = "throughput"
LENGTH_FIELDS = ("sequence_length", "length", "tokens")


@dataclass(frozen=True)
class Dimension:
    """A field that the rows of a study vary."""

    key: str
    values: tuple[Value, ...]
    title: str

    @property
    def numeric(self) -> bool:
        """True if all values are numbers."""
        return all(isinstance(value, int | float) for value in self.values)

    @property
    def is_length(self) -> bool:
        """True if it is a context length in tokens, the natural x axis."""
        return self.numeric and self.key.rpartition(".")[2] in LENGTH_FIELDS


@dataclass(frozen=True)
class Series:
    """The data of one row."""

    name: str
    axes: Mapping[str, Value]
    values: Mapping[str, tuple[float, ...]]
    """By measure, a number for each finished seed."""
    lengths: Mapping[str, Mapping[float, tuple[float, ...]]]
    """By column that was measured at several lengths: the numbers at each length."""
    paper: Mapping[str, float | None] = field(default_factory=dict)
    curves: Sequence[Curve] = ()
    """Training loss by step, for each seed."""
    reference: bool = False
    failed: bool = False

    @property
    def means(self) -> dict[str, float]:
        """The mean over seeds of every measure that has numbers."""
        return {key: statistics.fmean(values) for key, values in self.values.items() if values}


@dataclass(frozen=True)
class FigureData:
    """The data of all figures of a study."""

    table: Table
    rows: tuple[Series, ...]
    axes: tuple[Dimension, ...]
    measures: Mapping[str, Column]
    """The columns of the table, and training throughput."""
    lengths: Mapping[str, Column]
    """Columns that were measured at several lengths."""
    trials: Sequence[Mapping[str, Any]] = ()
    """Trials of a search: params, steps and value of each."""


def figure_data(
    table: Table, curves: Mapping[str, Curve] | None = None, search: Mapping[str, Any] | None = None
) -> FigureData:
    """Collect the figure data of a table.

    ``curves`` are the training losses of cells by name, ``search`` is the record of the study's
    search: its trials with their params, steps and value.
    """
    rows = tuple(_series(table, row, curves or {}) for row in table.rows)
    measures = dict(table.columns)
    if any(row.values.get(THROUGHPUT) for row in rows):
        measures.setdefault(THROUGHPUT, Column(title="Training throughput", unit="tokens/s", decimals=0))
    lengths = {k: c for k, c in table.columns.items() if any(k in row.lengths for row in rows)}
    trials = [trial for trial in (search or {}).get("trials", ()) if trial.get("value") is not None]
    return FigureData(table, rows, _axes(rows, table.axes), measures, lengths, trials)


def _series(table: Table, row: TableRow, curves: Mapping[str, Curve]) -> Series:
    values = {key: entry.values for key, entry in row.entries.items()}
    lengths = {key: at for key, c in table.columns.items() if (at := _by_length(key, c.factor, row.results))}
    speeds = [(result.tokens, result.train_seconds) for result in row.results]
    throughput = tuple(tokens / seconds for tokens, seconds in speeds if tokens and seconds)
    kept = [curves[result.cell] for result in row.results if curves.get(result.cell)]
    return Series(
        row.row.name, axis_values(row.row), {THROUGHPUT: throughput} | values, lengths, row.row.paper,
        kept, row.row.reference, bool(row.failures),
    )  # fmt: skip


def axis_values(row: Row) -> dict[str, Value]:
    """Return a row's value on each axis of the study; without axes, the fields that it sets."""
    return {key: axis_value(value) for key, value in (row.axes or flatten(row.set)).items()}


def axis_value(value: Any) -> Value:
    """Return a setting as an axis value: a number, or a string."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _axes(rows: Iterable[Series], declared: Mapping[str, Axis]) -> tuple[Dimension, ...]:
    """Return the fields that every row sets, with at least two different values."""
    places = [row.axes for row in rows if not row.reference]
    axes = []
    for key in places[0] if places else ():
        values = tuple({at[key]: None for at in places if key in at})
        if len(values) > 1 and all(key in at for at in places):
            # the study's title, or the last part of the field's dotted name
            title = (declared[key].title if key in declared else "") or key.rpartition(".")[2].replace(
                "_", " "
            )
            axis = Dimension(key, values, title)
            axes.append(replace(axis, values=tuple(sorted(values, key=float))) if axis.numeric else axis)
    return tuple(axes)


def _by_length(column: str, factor: float, results: Iterable[Result]) -> dict[float, tuple[float, ...]]:
    """Return a column's value at each length: the mean of its tasks that were measured at several lengths."""
    by_length: dict[float, list[float]] = {}
    for result in results:
        by_task: dict[str, dict[float, float]] = {}
        for key, measured in result.tasks.items():
            owner, task, length = task_of(key)
            if owner == column and length is not None and math.isfinite(float(measured.value)):
                by_task.setdefault(task, {})[length] = float(measured.value)
        several = [values for values in by_task.values() if len(values) > 1]
        for length in set.intersection(*map(set, several)) if several else ():
            mean = statistics.fmean(values[length] for values in several)
            by_length.setdefault(length, []).append(factor * mean)
    return {length: tuple(values) for length, values in sorted(by_length.items())}
