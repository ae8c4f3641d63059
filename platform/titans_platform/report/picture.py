"""What a figure of the report is made of, and the words and groupings that several kinds share."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.figure import FigureBase

from titans_platform.report import plot
from titans_platform.report.palette import Ink
from titans_platform.report.plot import Line
from titans_platform.report.series import Axis, Series, Sheet, Value
from titans_platform.study.spec import Column

ROWS = 24
"""Rows from which a panel a row, or a dot a row, says nothing any more."""
TOLD = 8
"""Lines that are told in words to those who do not see them."""
WIDE, NARROW = (3.5, 2.3), (1.9, 1.4)
"""Inches of a panel."""


@dataclass(frozen=True)
class Panel:
    """One drawing, whatever the format; ``alt`` says in words what is to be seen."""

    title: str
    alt: str
    draw: Callable[[FigureBase, Ink], None]


@dataclass(frozen=True)
class Picture:
    """A figure of the report: panels of one size under one caption."""

    key: str
    title: str
    caption: str
    panels: tuple[Panel, ...]
    size: tuple[float, float] = WIDE
    legend: tuple[Line, ...] = ()


def heading(column: Column) -> str:
    """A measure with its unit."""
    return f"{column.title} ({column.unit})" if column.unit else column.title


def arrow(column: Column) -> str:
    """A measure with its unit and the way that is better."""
    return f"{heading(column)} {'↑' if column.higher_is_better else '↓'}"


def better(column: Column) -> str:
    """The way that is better, in words."""
    return "higher is better" if column.higher_is_better else "lower is better"


def mean_of(row: Series, key: str) -> float | None:
    """A row's mean over seeds; None where no seed is done."""
    values = row.values.get(key, ())
    return statistics.fmean(values) if values else None


def best_row(sheet: Sheet, key: str) -> Series | None:
    """The row with the best mean of a measure; None where nothing is measured."""
    rows = [row for row in sheet.rows if row.values.get(key)]
    sign = 1 if sheet.measures[key].higher_is_better else -1
    return max(rows, key=lambda row: sign * statistics.fmean(row.values[key]), default=None)


def said(sheet: Sheet, key: str) -> str:
    """Best of a measure in a sentence, for those who do not see the figure."""
    best = best_row(sheet, key)
    column = sheet.measures[key]
    if best is None:
        return f"{column.title}: nothing measured yet."
    value = plot.short_number(statistics.fmean(best.values[key]), column.decimals)
    return f"{column.title}, {better(column)}: best is {best.name} with {value}{column.unit}."


def groups_of(sheet: Sheet, axes: Sequence[Axis]) -> list[tuple[str, list[Series]]]:
    """The rows in groups, one for each combination of values of these axes; reference rows left out."""
    groups = []
    for values in itertools.product(*(axis.values for axis in axes)):
        wanted = dict(zip((axis.key for axis in axes), values, strict=True))
        rows = [row for row in sheet.rows if not row.reference and wanted.items() <= dict(row.axes).items()]
        if rows:
            groups.append(
                (", ".join(say(axis, value) for axis, value in zip(axes, values, strict=True)), rows)
            )
    return groups


def say(axis: Axis, value: Value) -> str:
    """A value of an axis, with the axis' name where the value is a number."""
    return f"{axis.title} {value:g}" if isinstance(value, int | float) else str(value)


def ends(drawn: Sequence[Line], decimals: int) -> str:
    """Where each line begins and ends, in words."""
    drawn = [line for line in drawn if line.points]
    told = [
        f"{line.label} from {_mean_at(line, min(line.points), decimals)} "
        f"to {_mean_at(line, max(line.points), decimals)}"
        for line in drawn[:TOLD]
    ]
    more = [f"and {len(drawn) - TOLD} more"] if len(drawn) > TOLD else []
    return "; ".join(told + more) or "nothing measured yet"


def _mean_at(line: Line, x: float, decimals: int) -> str:
    return plot.short_number(statistics.fmean(line.points[x]), decimals)


def draw_lines(
    shown: Sequence[Line],
    ghosts: Sequence[Line],
    log: bool,
    title: str,
    x: str,
    figure: FigureBase,
    ink: Ink,
    limits: tuple[float, float] | None = None,
) -> None:
    """One panel of lines, ``shown`` before the ``ghosts``, on a scale of its own or within ``limits``."""
    axis = figure.subplots()
    plot.lines(axis, ink, shown, ghosts, log)
    if limits:
        axis.set_ylim(*limits)
    plot.labelled(axis, ink, title, x)
