"""Which figures a study gets: they follow from its axes and from what was measured, by the rules below.

A rule looks at the sheet and gives pictures, or none where it does not apply. A new kind of figure is one
function with ``@rule`` above it; no study names its figures.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from matplotlib.figure import FigureBase

from titans_platform.study import plot
from titans_platform.study.palette import KINDS, MARKERS, Ink, ordered
from titans_platform.study.plot import Line
from titans_platform.study.series import Axis, Curve, Series, Sheet, Value
from titans_platform.study.spec import Column

MANY = 6
"""Lines from which each gets a panel of its own, before the others in grey."""
ROWS = 24
"""Rows from which a panel a row, or a dot a row, says nothing any more."""
WIDE, NARROW = (3.5, 2.3), (1.9, 1.4)


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


Rule = Callable[[Sheet], Iterable[Picture]]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    """Register a rule; the order of rules is that of the figures."""
    RULES.append(function)
    return function


def pictures(sheet: Sheet) -> list[Picture]:
    """Every figure of a study, in the order of the report."""
    return [picture for each in RULES for picture in each(sheet)]


def _heading(column: Column) -> str:
    return f"{column.title} ({column.unit})" if column.unit else column.title


def _arrow(column: Column) -> str:
    return f"{_heading(column)} {'↑' if column.higher_is_better else '↓'}"


def _better(column: Column) -> str:
    return "higher is better" if column.higher_is_better else "lower is better"


def _means(row: Series, key: str) -> float | None:
    values = row.values.get(key, ())
    return statistics.fmean(values) if values else None


def _best(sheet: Sheet, key: str) -> Series | None:
    rows = [row for row in sheet.rows if row.values.get(key)]
    sign = 1 if sheet.measures[key].higher_is_better else -1
    return max(rows, key=lambda row: sign * statistics.fmean(row.values[key]), default=None)


def _said(sheet: Sheet, key: str) -> str:
    """Best of a measure in a sentence, for those who do not see the figure."""
    best = _best(sheet, key)
    column = sheet.measures[key]
    if best is None:
        return f"{column.title}: nothing measured yet."
    value = plot.short_number(statistics.fmean(best.values[key]), column.decimals)
    return f"{column.title}, {_better(column)}: best is {best.name} with {value}{column.unit}."


@rule
def rows_side_by_side(sheet: Sheet) -> Iterator[Picture]:
    """Rows without an order: a panel of dots a column, the paper's numbers beside ours."""
    if sheet.axes or len(sheet.rows) > ROWS:
        return
    panels = [
        Panel(_heading(column), _said(sheet, key), partial(_dots, sheet, key))
        for key, column in sheet.columns.items()
    ]
    yield Picture(
        "columns",
        "The columns of the table",
        "Large dot and bar: mean and one standard deviation over seeds; small dots: single seeds; diamonds: the "
        "paper's numbers, on a scale of their own; dotted line: chance.",
        tuple(panels),
        (3.7, 0.75 + 0.2 * len(sheet.rows)),
    )


def _dots(sheet: Sheet, key: str, figure: FigureBase, ink: Ink) -> None:
    column = sheet.measures[key]
    plot.dots(figure, ink, sheet.rows, key, column, sheet.chance.get(key))
    figure.suptitle(_heading(column), x=0.01, ha="left", fontsize=8, fontweight="bold", color=ink["ink"])
    figure.supxlabel(_better(column), x=0.01, ha="left", fontsize=plot.SMALL, color=ink["muted"])


@rule
def heat_maps(sheet: Sheet) -> Iterator[Picture]:
    """Two fields with an order: a tile for each pair, a panel for each value of the other fields."""
    grid = [axis for axis in sheet.axes if axis.numeric and not axis.is_length]
    if len(grid) != 2 or any(axis.is_length for axis in sheet.axes):
        return
    down, across = grid
    rest = [axis for axis in sheet.axes if axis not in grid]
    for key, column in sheet.measures.items():
        means = [mean for row in sheet.rows if (mean := _means(row, key)) is not None]
        limits = (min(means), max(means)) if means else (0.0, 1.0)
        panels = [
            Panel(name, f"{name or column.title}: {_said(_only(sheet, rows), key)}",
                  partial(_heat, key, column, limits, down, across, name, rows))
            for name, rows in _facets(sheet, rest)
        ]  # fmt: skip
        yield Picture(
            f"grid-{key}",
            f"{_heading(column)} over {down.title} and {across.title}",
            f"Mean over seeds; stronger colour is better, on one scale over all panels ({_better(column)}). "
            "Hatched: no number.",
            tuple(panels),
            (0.5 + 0.52 * len(across.values), 0.75 + 0.3 * len(down.values)),
        )


def _heat(
    key: str,
    column: Column,
    limits: tuple[float, float],
    down: Axis,
    across: Axis,
    name: str,
    rows: Sequence[Series],
    figure: FigureBase,
    ink: Ink,
) -> None:
    axis = figure.subplots()
    tiles = {(row.axes[across.key], row.axes[down.key]): row for row in rows}
    plot.heat(axis, ink, tiles, across.values, down.values, key, column, limits)
    plot.labelled(axis, ink, name, across.title, down.title)


def _facets(sheet: Sheet, axes: Sequence[Axis]) -> list[tuple[str, list[Series]]]:
    """The rows in groups, one for each combination of values of these axes; reference rows left out."""
    groups = []
    for values in itertools.product(*(axis.values for axis in axes)):
        wanted = dict(zip((axis.key for axis in axes), values, strict=True))
        rows = [row for row in sheet.rows if not row.reference and wanted.items() <= dict(row.axes).items()]
        if rows:
            groups.append((", ".join(_say(axis, value) for axis, value in zip(axes, values, strict=True)), rows))
    return groups


def _say(axis: Axis, value: Value) -> str:
    return f"{axis.title} {value:g}" if isinstance(value, int | float) else str(value)


def _only(sheet: Sheet, rows: Sequence[Series]) -> Sheet:
    return replace(sheet, rows=tuple(rows))


@rule
def against_a_field(sheet: Sheet) -> Iterator[Picture]:
    """One field with an order, or a length among others: every measure as lines against it."""
    lengths = [axis for axis in sheet.axes if axis.is_length]
    numeric = [axis for axis in sheet.axes if axis.numeric]
    if not lengths and len(numeric) != 1:
        return
    x = (lengths or numeric)[0]
    rest = [axis for axis in sheet.axes if axis is not x]
    groups = _facets(sheet, rest)
    colours = _colours(rest, len(groups))
    panels, legend = [], ()
    for key, column in sheet.measures.items():
        drawn = [
            Line(name or column.title, _against(rows, x.key, key), colour, marker)
            for (name, rows), (colour, marker) in zip(groups, colours, strict=True)
        ]
        legend = legend or tuple(drawn)
        panels.append(Panel(column.title, _trend(column, x.title, drawn), partial(_lines, column, x, drawn)))
    yield Picture(
        f"against-{x.key.rpartition('.')[2]}",
        f"Every measure against {x.title}",
        "Mean over seeds; bars: one standard deviation.",
        tuple(panels),
        legend=legend if len(legend) > 1 else (),
    )


def _colours(axes: Sequence[Axis], count: int) -> list[tuple[str, str]]:
    """Colour and marker of each line: shades where what tells them apart has an order."""
    names = ordered(count) if len(axes) == 1 and axes[0].numeric and count <= 4 else KINDS
    pairs = zip(itertools.cycle(names), itertools.cycle(MARKERS), strict=False)
    return list(itertools.islice(pairs, count))


def _against(rows: Iterable[Series], field: str, key: str) -> Mapping[float, tuple[float, ...]]:
    return {float(row.axes[field]): row.values[key] for row in rows if row.values.get(key)}


def _trend(column: Column, x: str, drawn: Sequence[Line]) -> str:
    ends = [
        f"{line.label} from {plot.short_number(statistics.fmean(line.points[min(line.points)]), column.decimals)} "
        f"to {plot.short_number(statistics.fmean(line.points[max(line.points)]), column.decimals)}"
        for line in drawn
        if line.points
    ]
    return f"{_heading(column)} from the smallest to the largest {x}: {'; '.join(ends) or 'nothing measured yet'}."


def _lines(column: Column, x: Axis, drawn: Sequence[Line], figure: FigureBase, ink: Ink) -> None:
    axis = figure.subplots()
    numbers = [value for value in x.values if isinstance(value, int | float)]
    spread = min(numbers) > 0 and max(numbers) / min(numbers) >= plot.MIN_LOG_RATIO
    plot.lines(axis, ink, drawn, logarithmic=x.is_length or spread)
    plot.labelled(axis, ink, _arrow(column), x.title)


@rule
def against_measured_length(sheet: Sheet) -> Iterator[Picture]:
    """What was taken at several lengths, against tokens: few rows in one panel, of many each its own."""
    taken = {
        key: [Line(row.name, row.lengths[key]) for row in sheet.rows if row.lengths.get(key)]
        for key in sheet.measures
    }
    few = {key: drawn for key, drawn in taken.items() if 0 < len(drawn) <= MANY}
    if few:
        yield _side_by_side(sheet, few)
    for key, drawn in taken.items():
        if MANY < len(drawn) <= ROWS:
            yield _one_by_one(sheet.measures[key], key, drawn)


def _side_by_side(sheet: Sheet, few: Mapping[str, Sequence[Line]]) -> Picture:
    """A panel a measure, the rows in colours."""
    names = list(dict.fromkeys(line.label for drawn in few.values() for line in drawn))
    looks = dict(zip(names, _colours(sheet.axes, len(names)), strict=True))
    panels, legend = [], [Line(name, {}, *look) for name, look in looks.items()]
    for key, drawn in few.items():
        column = sheet.measures[key]
        coloured = [Line(line.label, line.points, *looks[line.label]) for line in drawn]
        draw = partial(_one, coloured, (), True, _arrow(column), "tokens")
        panels.append(Panel(column.title, _trend(column, "length", drawn), draw))
    caption = "Measured at each length in tokens; mean over seeds, bars: one standard deviation."
    return Picture("length", "Against the length that is read", caption, tuple(panels), legend=tuple(legend))


def _one_by_one(column: Column, key: str, drawn: Sequence[Line]) -> Picture:
    """A panel a row, the other rows in grey."""
    limits = plot.span(drawn)
    panels = [
        Panel(
            line.label,
            _trend(column, "length", [line]),
            partial(_one, [line], drawn, True, line.label, "tokens", limits=limits),
        )
        for line in drawn
    ]
    caption = f"Measured at each length in tokens; {_better(column)}. Band: one standard deviation over seeds; grey: the other rows."
    return Picture(f"length-{key}", f"{_heading(column)} against length", caption, tuple(panels), NARROW)


def _one(
    shown: Sequence[Line],
    ghosts: Sequence[Line],
    log: bool,
    title: str,
    x: str,
    figure: FigureBase,
    ink: Ink,
    limits: tuple[float, float] | None = None,
) -> None:
    axis = figure.subplots()
    plot.lines(axis, ink, shown, ghosts, log)
    if limits:
        axis.set_ylim(*limits)
    plot.labelled(axis, ink, title, x)


@rule
def against_every_field(sheet: Sheet) -> Iterator[Picture]:
    """Three fields or more, as in a search: the first column's points against each."""
    numeric = [axis for axis in sheet.axes if axis.numeric and not axis.is_length]
    if len(numeric) < 3:
        return
    key, column = next(iter(sheet.measures.items()))
    panels = [Panel(axis.title, _said(sheet, key), partial(_points, sheet, axis, key)) for axis in numeric]
    yield Picture(
        "fields",
        f"{_heading(column)} against each field",
        f"A point for each run; {_better(column)}.",
        tuple(panels),
        NARROW,
    )


def _points(sheet: Sheet, field: Axis, key: str, figure: FigureBase, ink: Ink) -> None:
    axis = figure.subplots()
    plot.points(axis, ink, [row for row in sheet.rows if field.key in row.axes], field.key, key)
    plot.labelled(axis, ink, "", field.title, sheet.measures[key].title)


@rule
def learning_curves(sheet: Sheet) -> Iterator[Picture]:
    """Training loss by step, of every row."""
    rows = [row for row in sheet.rows if row.curves]
    if not rows:
        return
    hues = [axis for axis in sheet.axes if axis.numeric and len(axis.values) <= 4]
    if len(rows) > 12 and hues:
        yield _curves_by(sheet, hues[0])
    elif len(rows) > ROWS:
        yield _curves_of_the_best(sheet, rows)
    else:
        drawn = [_curve(row, runs=True) for row in rows]
        panels = [_curve_panel(line.label, [line], drawn, drawn) for line in drawn]
        yield _curves(panels, "thin: single seeds; grey: the other rows.")


def _curves(panels: Sequence[Panel], rest: str, legend: tuple[Line, ...] = ()) -> Picture:
    caption = f"Training loss (nats), a running mean over a twentieth of the steps; {rest}"
    return Picture("curves", "Learning curves", caption, tuple(panels), NARROW, legend)


def _curve_panel(title: str, shown: Sequence[Line], ghosts: Sequence[Line], drawn: Sequence[Line]) -> Panel:
    """A panel of curves on the scale of all that are ``drawn``, the steep fall of the first steps cut off."""
    last = max((x for line in drawn for x in line.points), default=0.0)
    draw = partial(_one, shown, ghosts, False, title, "step", limits=plot.span(drawn, 0.05 * last))
    return Panel(title, _fall(shown), draw)


def _curves_of_the_best(sheet: Sheet, rows: Sequence[Series]) -> Picture:
    best = _best(sheet, next(iter(sheet.measures)))
    drawn = [_curve(row) for row in rows]
    shown = [line for line in drawn if best is not None and line.label == best.name]
    panel = _curve_panel(shown[0].label if shown else "", shown, drawn, drawn)
    return _curves([panel], "blue: the best row; grey: the others.")


def _curves_by(sheet: Sheet, hue: Axis) -> Picture:
    """A panel for each value of what has no order, its lines in the shades of one field."""
    shades = dict(zip(hue.values, ordered(len(hue.values)), strict=True))
    rest = [axis for axis in sheet.axes if axis is not hue]
    facets = [axis for axis in rest if not axis.numeric] or rest[:1]
    groups = [
        (name, [_curve(row, shades[row.axes[hue.key]]) for row in rows if row.curves])
        for name, rows in _facets(sheet, facets)
    ]
    drawn = [line for _, lines in groups for line in lines]
    panels = [_curve_panel(name, lines, (), drawn) for name, lines in groups]
    legend = tuple(Line(_say(hue, value), {}, colour, "") for value, colour in shades.items())
    return _curves(panels, f"a line for each row, coloured by {hue.title}.", legend)


def _curve(row: Series, colour: str = "accent", runs: bool = False) -> Line:
    smooth = [[(float(step), loss) for step, loss in smoothed(curve)] for curve in row.curves]
    by_step: dict[float, list[float]] = {}
    for step, loss in itertools.chain.from_iterable(smooth):
        by_step.setdefault(step, []).append(loss)
    whole = {step: tuple(values) for step, values in by_step.items() if len(values) == len(smooth)}
    return Line(row.name, whole, colour, runs=smooth if runs and len(smooth) > 1 else (), spread=False)


def smoothed(curve: Curve, points: int = 60) -> list[tuple[int, float]]:
    """A running mean over a twentieth of the points, thinned to what a small panel can show."""
    values, half = [loss for _, loss in curve], max(1, len(curve) // 40)
    means = [
        (step, statistics.fmean(values[max(0, i - half) : i + half + 1])) for i, (step, _) in enumerate(curve)
    ]
    stride = max(1, len(means) // points)
    # the last point is where the loss ended, and is always shown
    return means[:-1][::stride] + means[-1:]


def _fall(drawn: Sequence[Line]) -> str:
    ends = [
        f"{line.label} from {statistics.fmean(line.points[min(line.points)]):.2f} "
        f"to {statistics.fmean(line.points[max(line.points)]):.2f}"
        for line in drawn
        if line.points
    ]
    return f"Training loss: {'; '.join(ends)}."
