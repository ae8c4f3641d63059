"""Figures of results that are kept in buckets: accuracy by a needle's depth, perplexity by position."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from titans_platform.evals.tasks.by_position import CARRIED, FRESH, WINDOW, ByPosition
from titans_platform.report.figures import plot
from titans_platform.report.figures.data import Axis, FigureData, Series
from titans_platform.report.figures.picture import (
    KINDS,
    LIGHT,
    MARKERS,
    NARROW,
    SMALL,
    Line,
    Panel,
    Picture,
    panel,
)
from titans_platform.report.table import TableRow, task_of
from titans_platform.text import plural, short, tokens

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
    """Gain of the carried state by position: mean and error."""

    look: Line
    points: Mapping[float, tuple[float, float]]


def middle(first: int, last: int) -> float:
    """Centre of a bucket of positions on a logarithmic scale."""
    return math.sqrt(first * last)


def loss_picture(found: ByPosition, key: str, title: str) -> Picture:
    """Loss by position of one run, and the gain of its carried state."""
    buckets = {middle(*bucket): bucket for bucket in found.buckets()}
    places = {
        way.partition("-")[0]: {x: (found.loss(way, *bucket)[0],) for x, bucket in buckets.items()}
        for way in found.shown
    }
    lines = _lines(places, found.best_window)
    gains = {x: found.gain(*bucket) for x, bucket in buckets.items() if x > found.row}
    panels = [
        _panel(title, lines, found.row, "nats a token"),
        _gain_panel([Gain(Line("gain", {}), gains)], "bars: standard error"),
    ]
    return Picture(key, title, f"{CAPTION} {GAIN_CAPTION}", panels, ALONE, lines)


def against_position(data: FigureData) -> Iterator[Picture]:
    """For each column with the task `by_position`: perplexity, a panel a row, and what memory brings."""
    for key, column in data.table.columns.items():
        shown = [(row, places) for row in data.table.rows if (places := _measured(row, key))]
        # without a second way of reading there is nothing to compare
        if not any(len(places) > 1 for _, places in shown):
            continue
        lines = [_lines(places) for _, places in shown[:PER_ROW]]
        limits = plot.span(line for drawn in lines for line in drawn)
        panels = [
            _panel(row.row.name, drawn, _trained(row), "perplexity", limits)
            for (row, _), drawn in zip(shown, lines, strict=False)
        ]
        caption, legend = f"{CAPTION} Mean over seeds.", max(lines, key=len)
        yield Picture(f"position-{key}", f"{column.title}: by position", caption, panels, NARROW, legend)
        gains = [_gain(row, places) for row, places in shown if FRESH in places]
        if gains:
            yield _gain_picture(f"gain-{key}", gains)


def _gain_picture(key: str, gains: list[Gain]) -> Picture:
    """The gains of all rows in one panel; of many rows only the highest and the lowest are coloured."""
    coloured, others, caption = gains, [], GAIN_CAPTION
    if len(gains) > MANY:
        ordered = sorted(gains, key=lambda gain: -list(gain.points.values())[-1][0] if gain.points else 0.0)
        ends = MANY // 2
        coloured, others = ordered[:ends] + ordered[-ends:], ordered[ends:-ends]
        caption += (
            f" Coloured: the {ends} highest and the {ends} lowest at the last position; grey: the others."
        )
    looks = zip(coloured, KINDS, MARKERS, strict=False)
    drawn = [gain._replace(look=replace(gain.look, colour=c, marker=m)) for gain, c, m in looks]
    panels = [_gain_panel(drawn, "bars: sd over seeds", others)]
    return Picture(key, f"{GAIN}, by position", caption, panels, ALONE, [gain.look for gain in drawn])


def _gain(row: TableRow, places: Places) -> Gain:
    """The gain of each seed from its own perplexities."""
    points = {}
    for x in sorted(places[CARRIED]):
        pairs = zip(places[FRESH][x], places[CARRIED][x], strict=True)
        gains = [math.log(fresh / carried) for fresh, carried in pairs]
        if x > _trained(row):
            points[x] = statistics.fmean(gains), statistics.stdev(gains) if len(gains) > 1 else 0.0
    return Gain(Line(row.row.name, {}), points)


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


def _panel(
    title: str, lines: Sequence[Line], row: int, y: str, limits: tuple[float, float] | None = None
) -> Panel:
    ends = [(line.label, list(line.means.values())) for line in lines]
    draw = partial(_draw_lines, row=row, limits=limits)
    return panel(title, f"{title}: {_in_words(ends, y)}", draw, X, y, shown=lines)


def _gain_panel(gains: Sequence[Gain], bars: str, others: Sequence[Gain] = ()) -> Panel:
    """The gains in one panel, ``others`` behind them in grey."""
    ends = [(gain.look.label, [mean for mean, _ in gain.points.values()]) for gain in gains]
    title = f"{GAIN} ({bars})"
    alt, draw = f"{GAIN}: {_in_words(ends, 'nats')}", partial(_draw_gains, others=others)
    return panel(title, alt, draw, X, "nats a token", gains=gains)


def _in_words(ends: Sequence[tuple[str, Sequence[float]]], unit: str) -> str:
    told = [f"{label} {short(of[0], 3)} to {short(of[-1], 3)}" for label, of in ends if of]
    return f"{unit} from the first to the last position: {'; '.join(told) or 'nothing measured yet'}"


def _draw_lines(axis: Axes, shown: Sequence[Line], row: int, limits: tuple[float, float] | None) -> None:
    plot.lines(axis, shown, limits=limits)
    axis.axvline(row, color=LIGHT["reference"], linestyle=(0, (1, 2)), linewidth=1)
    above = axis.get_xaxis_transform()
    axis.text(row, 0.98, " end of row 1", transform=above, fontsize=SMALL, color=LIGHT["muted"], va="top")
    _logarithmic(axis)


def _draw_gains(axis: Axes, gains: Sequence[Gain], others: Sequence[Gain] = ()) -> None:
    axis.axhline(0, color=LIGHT["reference"], linewidth=1)
    for _, points in others:
        axis.plot([*points], [mean for mean, _ in points.values()], color=LIGHT["ghost"], linewidth=0.7)
    for look, points in gains:
        means, errors = zip(*points.values(), strict=True) if points else ((), ())
        axis.errorbar([*points], means, yerr=errors, color=LIGHT[look.colour], marker=look.marker,
                      linewidth=1.3, markersize=3.4, elinewidth=0.8, capsize=1.8)  # fmt: skip
    _logarithmic(axis)


def _logarithmic(axis: Axes) -> None:
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(LogLocator(base=2, numticks=6))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: tokens(x)))


def depth_maps(data: FigureData) -> Iterator[Picture]:
    """A heat map of depth against length for each task that has buckets of depth."""
    rows = [row for row in data.table.rows if row.results]
    found = {row.row.name: depths(row) for row in rows}
    for task in dict.fromkeys(task for tiles in found.values() for task in tiles):
        shown = {name: tiles[task] for name, tiles in found.items() if task in tiles}
        owner = next(key for key in data.table.columns if _has(rows, key, task))
        places = [place for tiles in shown.values() for place in tiles]
        across = Axis("length", tuple(sorted({length for length, _ in places})), "tokens")
        down = Axis("depth", tuple(sorted({depth for _, depth in places}, key=_start)), "depth")
        shown = dict(list(shown.items())[:PER_ROW])
        column = data.table.columns[owner]
        scale = plot.heat_scale([0.0, column.factor], column, None)
        panels = []
        for name, tiles in shown.items():
            at = {
                place: Series(name, {}, {task: tuple(column.factor * value for value in values)}, {})
                for place, values in tiles.items()
            }
            grid = [[at.get((float(x), str(y))) for x in across.values] for y in down.values]
            draw = partial(plot.heat, tiles=grid, key=task, column=column, scale=scale)
            means = [series.means[task] for series in at.values()]
            alt = f"{name}: from {min(means):.0f} to {max(means):.0f} {column.unit}"
            panels.append(panel(name, alt, draw, across.title, down.title, across=across, down=down))
        caption = (
            "Accuracy by the needle's depth in the context (0%: at its beginning) and the length in tokens; "
            "mean over seeds."
        )
        size = (0.9 + 0.52 * len(across.values), 0.75 + 0.3 * len(down.values))
        yield Picture(f"depth-{task}", f"{task} over depth and length", caption, panels, size)


def depths(row: TableRow) -> dict[str, dict[tuple[float, str], tuple[float, ...]]]:
    """By task, accuracy at (tokens, depth), a number for each seed."""
    found: dict[str, dict[tuple[float, str], tuple[float, ...]]] = {}
    for result in row.results:
        for key, buckets in result.buckets.items():
            _, task, length = task_of(key)
            for depth, value in _by_depth(buckets).items():
                places = found.setdefault(task, {})
                places[float(length or 0), depth] = (
                    *places.get((float(length or 0), depth), ()),
                    float(value),
                )
    return found


def _by_depth(buckets: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in buckets.items() if name.endswith("%")}


def _has(rows: list[TableRow], column: str, task: str) -> bool:
    keys = (task_of(key) for row in rows for result in row.results for key in result.buckets)
    return any(owner == column and name == task for owner, name, _ in keys)


def _start(depth: str) -> int:
    return int(depth.partition("-")[0])
