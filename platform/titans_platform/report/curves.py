"""Learning curves: training loss by step, of every row."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from functools import partial

from titans_platform.report import plot
from titans_platform.report.palette import ordered
from titans_platform.report.picture import (
    NARROW,
    ROWS,
    Panel,
    Picture,
    best_row,
    draw_lines,
    ends,
    groups_of,
    say,
)
from titans_platform.report.plot import Line
from titans_platform.report.series import Axis, Curve, Series, Sheet


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
    draw = partial(draw_lines, shown, ghosts, False, title, "step", limits=plot.span(drawn, 0.05 * last))
    return Panel(title, _fall(shown), draw)


def _curves_of_the_best(sheet: Sheet, rows: Sequence[Series]) -> Picture:
    best = best_row(sheet, next(iter(sheet.measures)))
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
        for name, rows in groups_of(sheet, facets)
    ]
    drawn = [line for _, lines in groups for line in lines]
    panels = [_curve_panel(name, lines, (), drawn) for name, lines in groups]
    legend = tuple(Line(say(hue, value), {}, colour, "") for value, colour in shades.items())
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
    return f"Training loss: {ends(drawn, 2)}."
