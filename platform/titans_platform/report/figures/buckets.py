"""Figures of results that are kept in buckets: accuracy by a needle's depth, perplexity by position."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from titans_platform.evals.tasks.by_position import CARRIED, FRESH, WINDOW, ByPosition
from titans_platform.report.figures import plot
from titans_platform.report.figures.data import Axis, FigureData
from titans_platform.report.figures.picture import (
    KINDS,
    LIGHT,
    MARKERS,
    NARROW,
    SMALL,
    Line,
    Panel,
    Picture,
    ends,
    panel,
)
from titans_platform.report.table import TableRow, task_of
from titans_platform.text import plural

PER_ROW = 24
"""Maximum rows with a panel each; of more, the first ones."""
MANY = 6
"""Maximum coloured lines in one panel."""
LOOKS = {
    CARRIED: ("state carried from the start", "a", "o"),
    FRESH: ("new state every row", "b", "s"),
    WINDOW: ("best window", "c", "^"),
}
ALONE = (4.2, 3.0)
"""Width and height in inches of a single panel."""
X = "position (tokens read)"
CAPTION = (
    "Held-out texts read on the state carried from their start, on a new state every row and, where "
    "measured, on a new state every row after a window of rows before it. Dotted: the end of the first row."
)
GAIN = "What memory brings"
GAIN_CAPTION = (
    "Loss on a new state every row less loss on the carried state, from the second row on: above 0 what the "
    "state holds of earlier rows helps, below 0 it harms."
)
Places = Mapping[str, Mapping[float, tuple[float, ...]]]
"""By way of reading (carried, fresh, window) and position: a number for each seed."""


class Gain(NamedTuple):
    """Gain of the carried state by position, and the error of each mean."""

    line: Line
    errors: Sequence[float]


def middle(first: int, last: int) -> float:
    """Centre of a bucket of positions on a logarithmic scale."""
    return math.sqrt(first * last)


def loss_picture(found: ByPosition, key: str, title: str) -> Picture:
    """Loss by position of one run, and the gain of its carried state."""
    buckets = {middle(*bucket): bucket for bucket in found.buckets()}
    places = {}
    for way in found.shown:
        places[way.partition("-")[0]] = {x: (found.loss(way, *bucket)[0],) for x, bucket in buckets.items()}
    lines = _lines(places, found.best_window)
    gains = {x: found.gain(*bucket) for x, bucket in buckets.items() if x > found.row}
    line = Line("gain", {x: (mean,) for x, (mean, _) in gains.items()})
    gain = Gain(line, [error for _, error in gains.values()])
    panels = [_panel(title, lines, found.row, "nats a token"), _gain_panel([gain], "bars: standard error")]
    return Picture(key, title, f"{CAPTION} {GAIN_CAPTION}", panels, ALONE, lines)


def against_position(data: FigureData) -> Iterator[Picture]:
    """For each column with the task `by_position`: perplexity, a panel a row, and what memory brings."""
    for key, column in data.table.columns.items():
        shown = [(row, places) for row in data.table.rows if (places := _measured(row, key))]
        # without a second way of reading there is nothing to compare
        if not any(len(places) > 1 for _, places in shown):
            continue
        lines = [_lines(places) for _, places in shown[:PER_ROW]]
        limits = plot.span(itertools.chain.from_iterable(lines))
        drawn = zip((row for row, _ in shown), lines, strict=False)
        panels = [_panel(row.row.name, found, _trained(row), "perplexity", limits) for row, found in drawn]
        caption, legend = f"{CAPTION} Mean over seeds.", max(lines, key=len)
        yield Picture(f"position-{key}", f"{column.title}: by position", caption, panels, NARROW, legend)
        if gains := [_gain(row, places) for row, places in shown if FRESH in places]:
            yield _gain_picture(f"gain-{key}", gains)


def _gain_picture(key: str, gains: list[Gain]) -> Picture:
    """The gains of all rows in one panel; of many rows only the highest and the lowest are coloured."""
    coloured, others, caption = gains, [], GAIN_CAPTION
    if len(gains) > MANY:
        ordered = sorted(gains, key=lambda gain: -next(reversed(gain.line.means.values()), 0.0))
        half = MANY // 2
        coloured, others = ordered[:half] + ordered[-half:], ordered[half:-half]
        caption += f" Coloured: the {half} highest and the {half} lowest at the last position; "
        caption += "grey: the others."
    looks = zip(coloured, KINDS, MARKERS, strict=False)
    drawn = [gain._replace(line=replace(gain.line, colour=c, marker=m)) for gain, c, m in looks]
    panels = [_gain_panel(drawn, "bars: sd over seeds", others)]
    return Picture(key, f"{GAIN}, by position", caption, panels, ALONE, [gain.line for gain in drawn])


def _gain(row: TableRow, places: Places) -> Gain:
    """The gain of each seed from its own perplexities."""
    points: dict[float, tuple[float, ...]] = {}
    for x in sorted(places[CARRIED]):
        if x > _trained(row):
            pairs = zip(places[FRESH][x], places[CARRIED][x], strict=True)
            points[x] = tuple(math.log(fresh / carried) for fresh, carried in pairs)
    errors = [statistics.stdev(gains) if len(gains) > 1 else 0.0 for gains in points.values()]
    return Gain(Line(row.row.name, points), errors)


def _measured(row: TableRow, column: str) -> Places:
    """The perplexities of a row, from the longest texts of the column."""
    found: dict[int, dict[str, dict[float, tuple[float, ...]]]] = {}
    for result in row.results:
        for key, buckets in result.buckets.items():
            owner, task, length = task_of(key)
            if owner != column or not task.startswith("by_position"):
                continue
            for name, value in buckets.items():
                way, _, place = name.partition(" ")
                at = found.setdefault(length or 0, {}).setdefault(way.partition("-")[0], {})
                x = middle(*map(int, place.split("-")))
                at[x] = (*at.get(x, ()), float(value))
    return found[max(found)] if found else {}


def _trained(row: TableRow) -> int:
    return int(row.results[0].config["data"]["sequence_length"])


def _lines(places: Places, window: str | None = None) -> list[Line]:
    lines = []
    for way, (label, colour, marker) in LOOKS.items():
        if way in places:
            of = f" ({plural(int(window.partition('-')[2]), 'row')})" if window and way == WINDOW else ""
            # seeds differ more than the ways of reading do
            lines.append(Line(label + of, places[way], colour, marker, spread=False))
    return lines


def _panel(title: str, lines: Sequence[Line], row: int, y: str, limits: plot.Limits = None) -> Panel:
    alt = f"{title}: {y} from the first to the last position: {ends(lines, 3)}"
    return panel(title, alt, partial(_draw_lines, row=row, limits=limits), X, y, shown=lines)


def _gain_panel(gains: Sequence[Gain], bars: str, others: Sequence[Gain] = ()) -> Panel:
    """The gains in one panel, ``others`` behind them in grey."""
    alt = f"{GAIN}: nats from the first to the last position: {ends([gain.line for gain in gains], 3)}"
    return panel(f"{GAIN} ({bars})", alt, _draw_gains, X, "nats a token", gains=gains, others=others)


def _draw_lines(axis: Axes, shown: Sequence[Line], row: int, limits: plot.Limits) -> None:
    plot.lines(axis, shown, limits=limits)
    axis.axvline(row, color=LIGHT["reference"], linestyle=(0, (1, 2)), linewidth=1)
    above = axis.get_xaxis_transform()
    axis.text(row, 0.98, " end of row 1", transform=above, fontsize=SMALL, color=LIGHT["muted"], va="top")
    plot.across_tokens(axis, LogLocator(base=2, numticks=6))


def _draw_gains(axis: Axes, gains: Sequence[Gain], others: Sequence[Gain]) -> None:
    axis.axhline(0, color=LIGHT["reference"], linewidth=1)
    for means in (gain.line.means for gain in others):
        axis.plot([*means], [*means.values()], color=LIGHT["ghost"], linewidth=0.7)
    for line, errors in gains:
        style = {"color": LIGHT[line.colour], "marker": line.marker, "linewidth": 1.3, "markersize": 3.4}
        xs, means = [*line.means], [*line.means.values()]
        axis.errorbar(xs, means, yerr=errors, elinewidth=0.8, capsize=1.8, **style)
    plot.across_tokens(axis, LogLocator(base=2, numticks=6))


def depth_maps(data: FigureData) -> Iterator[Picture]:
    """A heat map of depth against length for each task that has buckets of depth."""
    keys = {key for result in data.table.results for key in result.buckets}
    found = {row.row.name: depths(row) for row in data.table.rows}
    for task in dict.fromkeys(task for by_task in found.values() for task in by_task):
        names = [name for name, by_task in found.items() if task in by_task]
        places = {place for name in names for place in found[name][task]}
        across = Axis("length", tuple(sorted({length for length, _ in places})), "tokens")
        order = sorted({depth for _, depth in places}, key=lambda depth: int(depth.partition("-")[0]))
        down = Axis("depth", tuple(order), "depth")
        owners = {task_of(key)[0] for key in keys if task_of(key)[1] == task}
        column = next(column for key, column in data.table.columns.items() if key in owners)
        scale, panels = plot.heat_scale([0.0, column.factor], column, None), []
        for name in names[:PER_ROW]:
            means = {at: column.factor * statistics.fmean(values) for at, values in found[name][task].items()}
            tiles = [[means.get((float(x), str(y)), "") for x in across.values] for y in down.values]
            draw = partial(plot.heat, tiles=tiles, column=column, scale=scale)
            alt = f"{name}: from {min(means.values()):.0f} to {max(means.values()):.0f} {column.unit}"
            panels.append(panel(name, alt, draw, across.title, down.title, across=across, down=down))
        caption = "Accuracy by the needle's depth in the context (0%: at its beginning) and the length in "
        caption += "tokens; mean over seeds."
        size = (0.9 + 0.52 * len(across.values), 0.75 + 0.3 * len(down.values))
        yield Picture(f"depth-{task}", f"{task} over depth and length", caption, panels, size)


def depths(row: TableRow) -> dict[str, dict[tuple[float, str], list[float]]]:
    """By task, accuracy at (tokens, depth), a number for each seed."""
    found: dict[str, dict[tuple[float, str], list[float]]] = {}
    for result in row.results:
        for key, buckets in result.buckets.items():
            _, task, length = task_of(key)
            for depth, value in buckets.items():
                if depth.endswith("%"):
                    at = float(length or 0), depth
                    found.setdefault(task, {}).setdefault(at, []).append(float(value))
    return found
