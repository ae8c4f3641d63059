"""Figures by rules on a study's axes and on what was measured.

A rule looks at the data and yields pictures, none where it does not apply; `figures.RULES` lists all rules.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from titans_platform.report.figures import plot
from titans_platform.report.figures.data import THROUGHPUT, Axis, Curve, FigureData, Series, Value, axis_value
from titans_platform.report.figures.picture import (
    KINDS,
    MARKERS,
    NARROW,
    STEPS,
    Line,
    Panel,
    Picture,
    ends,
    ordered,
    panel,
)
from titans_platform.study.spec import Column
from titans_platform.text import NONE, short

ROWS = 24
"""Maximum rows with a panel or a dot each."""
MANY = 6
"""Maximum lines in one panel; of more, each has its own panel with the others in grey."""
MIN_LOG_RATIO = 4.0
"""Ratio of largest to smallest value from which a scale is logarithmic."""


def rows_side_by_side(data: FigureData) -> Iterator[Picture]:
    """No axes: for each column a panel with a dot per row, and the paper's numbers."""
    columns, chance = data.table.columns, data.table.chance
    if data.axes or len(data.rows) > ROWS or len(columns) > MANY:
        return
    panels = []
    for key, column in columns.items():
        of = {"rows": data.rows, "key": key, "column": column, "chance": chance.get(key)}
        draw = partial(plot.dots, **of, comparable=data.table.comparable)
        panels.append(Panel(_best_in_words(data, key), draw))
    caption = "Large dot and bar: mean and one standard deviation over seeds; small dots: single seeds; "
    caption += "dotted line: chance."
    if any(row.paper.get(key) is not None for row in data.rows for key in columns):
        where = "on the same scale" if data.table.comparable else "in a frame and on a scale of their own"
        caption += f" Diamonds: the paper's numbers, {where}."
    yield Picture("columns", "The columns of the table", caption, panels, (3.7, 0.75 + 0.2 * len(data.rows)))


def heat_maps(data: FigureData) -> Iterator[Picture]:
    """Two numeric axes: a heat map for each value of the other axes."""
    grid = [axis for axis in data.axes if axis.numeric and not axis.is_length]
    if len(grid) != 2 or any(axis.is_length for axis in data.axes):
        return
    down, across = grid
    groups = groups_of(data, [axis for axis in data.axes if axis not in grid])
    size = (0.5 + 0.52 * len(across.values), 0.75 + 0.3 * len(down.values))
    for key, column in data.measures.items():
        means = [row.means[key] for row in data.rows if key in row.means]
        scale, panels = plot.heat_scale(means, column, data.table.chance.get(key)), []
        for name, rows in groups:
            at = {}
            for row in rows:
                missing = "failed" if row.failed else NONE
                at[row.axes[across.key], row.axes[down.key]] = row.means.get(key, missing)
            tiles = [[at.get((x, y), "") for x in across.values] for y in down.values]
            draw = partial(plot.heat, tiles=tiles, column=column, scale=scale)
            alt = f"{name or column.title}: {_best_in_words(replace(data, rows=tuple(rows)), key)}"
            panels.append(panel(name, alt, draw, across.title, down.title, across=across, down=down))
        caption = (
            f"Mean over seeds; stronger colour is better, on one scale over all panels ({column.better}); "
            f"what is no better than chance is palest. Hatched: no number.{_timing(data, [key])}"
        )
        title = f"{column.titled()} over {down.title} and {across.title}"
        yield Picture(f"grid-{key}", title, caption, panels, size)


def against_a_field(data: FigureData) -> Iterator[Picture]:
    """One numeric axis, or a length among others: every measure as lines against it."""
    lengths = [axis for axis in data.axes if axis.is_length]
    numeric = [axis for axis in data.axes if axis.numeric]
    if not lengths and len(numeric) != 1:
        return
    x = (lengths or numeric)[0]
    rest = [axis for axis in data.axes if axis is not x]
    groups = groups_of(data, rest)
    looks = _looks(rest, len(groups))
    low, high = float(x.values[0]), float(x.values[-1])
    draw = partial(plot.lines, logarithmic=x.is_length or (low > 0 and high / low >= MIN_LOG_RATIO))
    panels, shown = [], []
    for key, column in data.measures.items():
        shown = []
        for (name, rows), look in zip(groups, looks, strict=True):
            points = {float(row.axes[x.key]): row.values[key] for row in rows if row.values.get(key)}
            shown.append(Line(name or column.title, points, *look, bounds=plot.bounds(column)))
        panels.append(panel(column.heading, _trend(column, x.title, shown), draw, x.title, shown=shown))
    caption = f"Mean over seeds; bars: one standard deviation.{_timing(data, data.measures)}"
    legend = shown if len(shown) > 1 else ()
    key = f"against-{x.key.rpartition('.')[2]}"
    yield Picture(key, f"Every measure against {x.title}", caption, panels, legend=legend)


def against_measured_length(data: FigureData) -> Iterator[Picture]:
    """Measures at several lengths against tokens: few rows in one panel, many in a panel each."""
    taken = {key: [row for row in data.rows if row.lengths.get(key)] for key in data.lengths}
    together = [key for key, rows in taken.items() if 0 < len(rows) <= MANY]
    names = dict.fromkeys(row.name for key in together for row in taken[key])
    looks = dict(zip(names, _looks(data.axes, len(names)), strict=True))
    few, many, dashed = [], [], False
    for key, column in data.lengths.items():
        lines = [
            Line(row.name, row.lengths[key], printed=row.printed.get(key, {}), bounds=plot.bounds(column))
            for row in taken[key]
        ]
        draw = partial(plot.lines, logarithmic=True)
        if key in together:
            styled = ((line, *looks[line.label]) for line in lines)
            shown = [replace(line, colour=colour, marker=marker) for line, colour, marker in styled]
            few.append(panel(column.heading, _trend(column, "length", lines), draw, "tokens", shown=shown))
            dashed |= any(line.printed for line in lines)
        elif len(lines) <= ROWS:
            draw = partial(draw, ghosts=lines, limits=plot.span(lines))
            named = ((line, _trend(column, "length", [line])) for line in lines)
            panels = [panel(x.label, alt, draw, "tokens", shown=[x]) for x, alt in named]
            caption = f"Measured at each length in tokens; {column.better}. "
            caption += "Band: one standard deviation over seeds; grey: the other rows."
            title = f"{column.titled()} against length"
            many.append(Picture(f"length-{key}", title, caption, panels, NARROW))
    if few:
        caption = "Measured at each length in tokens; mean over seeds, bars: one standard deviation."
        caption += " Dashed: the paper's." * dashed
        legend = [Line(name, {}, *look) for name, look in looks.items()]
        yield Picture("length", "Against the length that is read", caption, few, legend=legend)
    yield from many


def against_every_field(data: FigureData) -> Iterator[Picture]:
    """Three numeric axes or more: the first column as points against each."""
    numeric = [axis for axis in data.axes if axis.numeric and not axis.is_length]
    if len(numeric) < 3:
        return
    key, column = next(iter(data.measures.items()))
    alt, panels = _best_in_words(data, key), []
    for axis in numeric:
        rows = [row for row in data.rows if axis.key in row.axes]
        pairs = [(row.axes[axis.key], value) for row in rows for value in row.values[key]]
        panels.append(panel("", alt, plot.points, axis.title, column.title, shown=pairs))
    caption = f"A point for each run; {column.better}."
    yield Picture("fields", f"{column.titled()} against each field", caption, panels, NARROW)


def trials_of_a_search(data: FigureData) -> Iterator[Picture]:
    """The trials of a search: the objective against each searched field."""
    given = {key: value for trial in data.trials for key, value in trial["params"].items()}
    numeric = [key for key, value in given.items() if not isinstance(axis_value(value), str)]
    if not numeric:
        return
    whole, panels = max(trial["steps"] for trial in data.trials), []
    for key in numeric:
        trials = [trial for trial in data.trials if key in trial["params"]]
        points = [((trial["params"][key], trial["value"]), trial["steps"] == whole) for trial in trials]
        shown, ghosts = ([point for point, full in points if full is ended] for ended in (True, False))
        alt, title = f"{len(data.trials)} trials against {key}.", key.rpartition(".")[2].replace("_", " ")
        panels.append(panel(title, alt, plot.points, shown=shown, ghosts=ghosts))
    caption = "The objective of the search at each trial's last step, against each searched field; "
    caption += "dark: trained to the end, pale: stopped early."
    yield Picture("search", "The trials of the search", caption, panels, NARROW)


def learning_curves(data: FigureData) -> Iterator[Picture]:
    """Training loss by step: a panel a row, or the rows of a grid in the shades of one of its fields."""
    rows = [row for row in data.rows if row.curves]
    hues = [axis for axis in data.axes if axis.numeric and len(axis.values) <= len(STEPS)]
    if not rows:
        return
    legend, ghosts = [], [_curve(row, runs=True) for row in rows]
    if len(rows) > 12 and hues:
        groups, legend = _shaded(data, hues[0])
        ghosts, rest = [], f"a line for each row, coloured by {hues[0].title}."
    elif len(rows) > ROWS:
        best = best_row(data, next(iter(data.measures)))
        found = [line for line in ghosts if best and line.label == best.name]
        groups, rest = [(found[0].label if found else "", found)], "blue: the best row; grey: the others."
    else:
        groups = [(line.label, [line]) for line in ghosts]
        rest = "thin: single seeds; grey: the other rows."
    drawn = ghosts or [line for _, lines in groups for line in lines]
    # one scale for all, without the steep fall of the first steps
    last = max((x for line in drawn for x in line.points), default=0.0)
    draw = partial(plot.lines, ghosts=ghosts, limits=plot.span(drawn, 0.05 * last))
    alts = (f"Training loss: {ends(lines, 2)}." for _, lines in groups)
    panels = [panel(name, next(alts), draw, "step", shown=lines) for name, lines in groups]
    caption = f"Training loss (nats), a running mean over a twentieth of the steps; {rest}"
    yield Picture("curves", "Learning curves", caption, panels, NARROW, legend)


def _shaded(data: FigureData, hue: Axis) -> tuple[list[tuple[str, list[Line]]], list[Line]]:
    """A panel for each value of the other axes, its lines in shades of ``hue``; and the legend."""
    shades = dict(zip(hue.values, ordered(len(hue.values)), strict=True))
    rest = [axis for axis in data.axes if axis is not hue]
    groups = groups_of(data, [axis for axis in rest if not axis.numeric] or rest[:1])
    panels = []
    for name, rows in groups:
        panels.append((name, [_curve(row, shades[row.axes[hue.key]]) for row in rows if row.curves]))
    return panels, [Line(_named(hue, value), {}, shade, "") for value, shade in shades.items()]


def _curve(row: Series, colour: str = "accent", runs: bool = False) -> Line:
    smooth = [smoothed(curve) for curve in row.curves]
    by_step: dict[float, list[float]] = {}
    for step, loss in itertools.chain.from_iterable(smooth):
        by_step.setdefault(step, []).append(loss)
    whole = {step: tuple(values) for step, values in by_step.items() if len(values) == len(smooth)}
    return Line(row.name, whole, colour, runs=smooth if runs and len(smooth) > 1 else (), spread=False)


def smoothed(curve: Curve, points: int = 60) -> list[tuple[float, float]]:
    """A running mean over a twentieth of the points, thinned to ``points``."""
    values, half = [loss for _, loss in curve], max(1, len(curve) // 40)
    around = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    means = [(float(step), statistics.fmean(near)) for (step, _), near in zip(curve, around, strict=True)]
    # the last point, the final loss, is always kept
    return means[:-1][:: max(1, len(means) // points)] + means[-1:]


def best_row(data: FigureData, key: str) -> Series | None:
    """The row with the best mean of a measure; None without numbers."""
    sign = 1 if data.measures[key].higher_is_better else -1
    rows = [row for row in data.rows if key in row.means]
    return max(rows, key=lambda row: sign * row.means[key], default=None)


def groups_of(data: FigureData, axes: Sequence[Axis]) -> list[tuple[str, list[Series]]]:
    """The rows grouped by their values on these axes; reference rows are left out."""
    groups = []
    for values in itertools.product(*(axis.values for axis in axes)):
        wanted = dict(zip((axis.key for axis in axes), values, strict=True))
        rows = [row for row in data.rows if not row.reference and wanted.items() <= dict(row.axes).items()]
        if rows:
            groups.append((", ".join(map(_named, axes, values)), rows))
    return groups


def _named(axis: Axis, value: Value) -> str:
    """An axis value as text, after the axis' title where it is a number."""
    return str(value) if isinstance(value, str) else f"{axis.title} {value:g}"


def _looks(axes: Sequence[Axis], count: int) -> list[tuple[str, str]]:
    """Colour and marker of each line: shades for a numeric axis."""
    names = ordered(count) if len(axes) == 1 and axes[0].numeric and count <= len(STEPS) else KINDS
    return list(itertools.islice(zip(itertools.cycle(names), itertools.cycle(MARKERS), strict=False), count))


def _timing(data: FigureData, keys: Iterable[str]) -> str:
    """Caption's note on throughput that was timed while other cells ran."""
    beside = [THROUGHPUT, *data.table.timed] if data.table.side_by_side else []
    timed = [data.measures[key].title for key in keys if key in beside]
    return f" {', '.join(timed)}: timed while other cells ran on the same machine." if timed else ""


def _best_in_words(data: FigureData, key: str) -> str:
    """The best row of a measure in a sentence, as text alternative."""
    best, column = best_row(data, key), data.measures[key]
    if best is None:
        return f"{column.title}: nothing measured yet."
    value = short(best.means[key], column.decimals)
    return f"{column.title}, {column.better}: best is {best.name} with {value}{column.unit}."


def _trend(column: Column, x: str, drawn: Sequence[Line]) -> str:
    return f"{column.titled()} from the smallest to the largest {x}: {ends(drawn, column.decimals)}."
