"""What figures are drawn of: the rows with their axis values and, seed by seed, every measure.

Nothing here knows how a study file spells its axes: a row's ``axes`` if it has them, otherwise the fields
that every row sets.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from titans_platform.study.spec import Column, Row, overlay
from titans_platform.study.table import Table, TableRow, task_of

Value = float | str
Curve = Sequence[tuple[int, float]]
THROUGHPUT = "throughput"
LENGTH_FIELDS = ("sequence_length", "length", "tokens")


@dataclass(frozen=True)
class Axis:
    """A field that the rows of a study vary."""

    key: str
    values: tuple[Value, ...]
    title: str

    @property
    def numeric(self) -> bool:
        """Whether its values can be placed on a scale."""
        return all(isinstance(value, int | float) for value in self.values)

    @property
    def is_length(self) -> bool:
        """Whether it is a number of tokens of context, which others are drawn against."""
        return self.numeric and self.key.rpartition(".")[2] in LENGTH_FIELDS


@dataclass(frozen=True)
class Series:
    """A row as figures see it."""

    name: str
    axes: Mapping[str, Value]
    values: Mapping[str, tuple[float, ...]]
    """Every measure, a number for each seed that is done."""
    lengths: Mapping[str, Mapping[float, tuple[float, ...]]]
    """Every measure that was taken at several lengths: the numbers at each of them."""
    paper: Mapping[str, float | None] = field(default_factory=dict)
    curves: Sequence[Curve] = ()
    """Training loss by step, for each seed."""
    reference: bool = False
    failed: bool = False


@dataclass(frozen=True)
class Sheet:
    """All that a study's figures are drawn of."""

    rows: tuple[Series, ...]
    axes: tuple[Axis, ...]
    columns: Mapping[str, Column]
    """The columns of the table."""
    measures: Mapping[str, Column]
    """The columns, and what is known of every run besides."""
    chance: Mapping[str, float]

    def axis(self, key: str) -> Axis:
        """An axis by its key."""
        return next(axis for axis in self.axes if axis.key == key)


def sheet(table: Table, curves: Mapping[str, Curve] | None = None) -> Sheet:
    """A table's rows as series; ``curves`` are the training losses of MLflow runs by run id."""
    rows = tuple(_series(table, row, curves or {}) for row in table.rows)
    measures = dict(table.study.columns)
    if any(row.values.get(THROUGHPUT) for row in rows):
        measures.setdefault(THROUGHPUT, Column(title="Training throughput", unit="tokens/s", decimals=0))
    return Sheet(
        rows, _axes(rows, getattr(table.study, "axes", {})), table.study.columns, measures, table.chance
    )


def _series(table: Table, row: TableRow, curves: Mapping[str, Curve]) -> Series:
    runs = [str(result.get("mlflow_run_id")) for result in row.results]
    values = {key: entry.values for key, entry in row.entries.items()}
    return Series(
        row.row.name,
        axis_values(row.row),
        {THROUGHPUT: _throughput(row.results), **values},
        {
            key: found
            for key, column in table.study.columns.items()
            if (found := _by_length(key, column.factor, row.results))
        },
        row.row.paper,
        [curves[run] for run in runs if curves.get(run)],
        row.row.reference,
        bool(row.failures),
    )


def axis_values(row: Row) -> dict[str, Value]:
    """Where a row stands on the study's axes; what it sets where it does not say."""
    given = getattr(row, "axes", None)
    return {key: _value(value) for key, value in (given or flat(row.set)).items()}


def _value(value: Any) -> Value:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def flat(fragment: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested fragment as dotted fields."""
    fields: dict[str, Any] = {}
    for key, value in overlay({}, fragment).items():
        name = f"{prefix}{key}"
        fields |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return fields


def _axes(rows: Iterable[Series], given: Mapping[str, Any]) -> tuple[Axis, ...]:
    """The fields that every row has a value for, and not all of them the same."""
    placed = [row.axes for row in rows if not row.reference]
    axes = []
    for key in placed[0] if placed else ():
        values = {at[key]: None for at in placed if key in at}
        if len(values) > 1 and all(key in at for at in placed):
            axis = Axis(key, tuple(values), _title(key, given))
            axes.append(replace(axis, values=tuple(sorted(values, key=float))) if axis.numeric else axis)
    return tuple(axes)


def _title(key: str, given: Mapping[str, Any]) -> str:
    """The study's own word for an axis, or the field's name without the config's path to it."""
    return getattr(given.get(key), "title", "") or key.rpartition(".")[2].replace("_", " ")


def _throughput(results: Iterable[Mapping[str, Any]]) -> tuple[float, ...]:
    return tuple(
        float(result["tokens"]) / float(result["train_seconds"])
        for result in results
        if result.get("tokens") and result.get("train_seconds")
    )


def _by_length(
    column: str, factor: float, results: Iterable[Mapping[str, Any]]
) -> dict[float, tuple[float, ...]]:
    """A column's value at each length, from the tasks in it that were taken at all of them."""
    found: dict[float, list[float]] = {}
    for result in results:
        for length, value in _lengths(column, result.get("tasks", {})).items():
            found.setdefault(length, []).append(factor * value)
    return {length: tuple(values) for length, values in sorted(found.items())}


def _lengths(column: str, tasks: Mapping[str, Mapping[str, Any]]) -> dict[int, float]:
    by_task: dict[str, dict[int, float]] = {}
    for key, measured in tasks.items():
        owner, task, length = task_of(key)
        if owner == column and length is not None and math.isfinite(float(measured["value"])):
            by_task.setdefault(task, {})[length] = float(measured["value"])
    several = [values for values in by_task.values() if len(values) > 1]
    shared = set.intersection(*map(set, several)) if several else set()
    return {length: statistics.fmean(values[length] for values in several) for length in shared}
