"""The kinds of panel: rows as dots, lines, heat-maps, and points against a field."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import FigureBase
from matplotlib.ticker import FixedLocator, FuncFormatter, Locator, LogLocator, MaxNLocator, NullLocator

from titans_platform.report.figures.data import Axis, Series, Value
from titans_platform.report.figures.picture import ANY, HEAT, LIGHT, SMALL, TEXT, Line
from titans_platform.study.spec import Column
from titans_platform.text import short, tokens

Limits = tuple[float, float] | None


def bounds(column: Column) -> tuple[float, float]:
    """Range of a measure: 0 to 100 for a percentage."""
    return (0.0, 100.0) if column.unit == "%" else ANY


def within(values: Sequence[float], limits: tuple[float, float]) -> tuple[float, float]:
    """Mean minus and plus one standard deviation, clipped to ``limits``."""
    mean, sd = statistics.fmean(values), statistics.stdev(values)
    return max(mean - sd, limits[0]), min(mean + sd, limits[1])


def dots(
    figure: FigureBase, rows: Sequence[Series], key: str, column: Column, chance: float | None,
    comparable: bool,
) -> None:  # fmt: skip
    """A column's rows: mean and standard deviation, single seeds, and the paper's numbers.

    The paper's are on the same scale where they are ``comparable``, else in a frame of their own.
    """
    apart = not comparable and any(row.paper.get(key) is not None for row in rows)
    widths = (2.1, 1.0) if apart else (1.0,)
    axes = figure.subplots(1, len(widths), sharey=True, squeeze=False, width_ratios=widths)[0]
    for y, row in enumerate(rows):
        _dot(axes[0], y, row, key, bounds(column))
        if row.paper.get(key) is not None:
            axes[-1].plot(row.paper[key], y, "D", color=_colour(row, "paper"), markersize=3.4)
    if chance is not None and column.higher_is_better:
        # of a perplexity chance is far away and would compress the rows
        axes[0].axvline(chance, color=LIGHT["reference"], linestyle=(0, (1, 2)), linewidth=1)
    titles = ("ours", "accent", 4), ("the paper's", "paper", 2)
    for axis, (title, colour, ticks) in zip(axes, titles, strict=False):
        axis.grid(axis="x")
        axis.set_title(title, fontsize=TEXT, fontweight="normal", color=LIGHT[colour], pad=3)
        axis.xaxis.set_major_locator(MaxNLocator(ticks))
        axis.margins(x=0.1)
    if apart:
        # a closed frame: this scale has nothing to do with the one beside it
        axes[1].spines[:].set(visible=True, color=LIGHT["paper"], linewidth=0.7)
        axes[1].tick_params(axis="x", labelcolor=LIGHT["paper"])
    if not any(row.values.get(key) for row in rows):
        axes[0].set_xticks([])
    axes[0].set_yticks(range(len(rows)), [row.name for row in rows], fontsize=TEXT)
    axes[0].set_ylim(len(rows) - 0.4, -0.6)
    for label, row in zip(axes[0].get_yticklabels(), rows, strict=True):
        label.set_color(LIGHT["muted" if row.reference else "ink"])
    figure.suptitle(column.titled(), x=0.01, ha="left", fontsize=8, fontweight="bold")
    figure.supxlabel(column.better, x=0.01, ha="left", fontsize=SMALL, color=LIGHT["muted"])


def _colour(row: Series, name: str) -> str:
    return LIGHT["reference" if row.reference else name]


def _dot(axis: Axes, y: int, row: Series, key: str, limits: tuple[float, float]) -> None:
    values, colour = row.values.get(key, ()), _colour(row, "accent")
    if not values:
        text, place = "failed" if row.failed else "missing", axis.get_yaxis_transform()
        axis.text(0.01, y, text, transform=place, fontsize=SMALL, color=LIGHT["muted"], va="center")
        return
    if len(values) > 1:
        axis.scatter(values, [y + 0.26] * len(values), s=5, color=colour, alpha=0.55, linewidths=0)
        low, high = within(values, limits)
        style = {"fmt": "none", "color": colour, "elinewidth": 1.2, "capsize": 1.8}
        axis.errorbar((low + high) / 2, y, xerr=(high - low) / 2, **style)
    axis.plot(statistics.fmean(values), y, "o", color=colour, markersize=4)


def lines(
    axis: Axes, shown: Sequence[Line], ghosts: Sequence[Line] = (), logarithmic: bool = False,
    limits: Limits = None, log_y: bool = False,
) -> None:  # fmt: skip
    """Lines through the means with their standard deviations; ``ghosts`` in light grey behind.

    The scale is their own, or ``limits``.
    """
    for line in ghosts:
        axis.plot([*line.means], [*line.means.values()], color=LIGHT["ghost"], linewidth=0.7, zorder=1)
    for line in shown:
        _line(axis, line, band=len(shown) == 1)
    if log_y:
        axis.set_yscale("log")
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_locator(LogLocator(numticks=6))
    else:
        axis.yaxis.set_major_locator(MaxNLocator(5))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: short(y)))
    if limits:
        axis.set_ylim(*limits)
    if logarithmic:
        # a tick for every measured length
        across_tokens(axis, FixedLocator(sorted({x for line in (*shown, *ghosts) for x in line.points})))


def across_tokens(axis: Axes, ticks: Locator) -> None:
    """Numbers of tokens on a logarithmic x axis."""
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(ticks)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: tokens(x)))


def _line(axis: Axes, line: Line, band: bool) -> None:
    """The mean, single runs and the paper's numbers; the spread as a band, or as bars among several lines."""
    colour, means = LIGHT[line.colour], line.means
    for run in line.runs:
        axis.plot(*zip(*run, strict=True), color=colour, linewidth=0.6, alpha=0.45, zorder=2)
    axis.plot([*means], [*means.values()], color=colour, linewidth=1.3, zorder=4,
              marker=line.marker if len(means) <= 12 else "", markersize=3.4)  # fmt: skip
    dashed = {"linewidth": 0.9, "linestyle": (0, (3, 2))}
    axis.plot([*line.printed], [*line.printed.values()], color=colour, **dashed)
    xs = [x for x in means if line.spread and len(line.points[x]) > 1]
    if not xs:
        return
    low, high = np.array([within(line.points[x], line.bounds) for x in xs]).T
    if band:
        axis.fill_between(xs, low, high, color=colour, alpha=0.14, linewidth=0, zorder=3)
    else:
        axis.errorbar(xs, (low + high) / 2, yerr=(high - low) / 2, fmt="none", color=colour, elinewidth=0.7,
                      capsize=1.5, zorder=3)  # fmt: skip


def span(drawn: Iterable[Line], after: float = 0.0) -> Limits:
    """Shared y limits of several panels: all values at x >= ``after``, and a margin."""
    values = [v for line in drawn for x, found in line.points.items() if x >= after for v in found]
    if not values:
        return None
    margin = 0.06 * ((max(values) - min(values)) or abs(max(values)) or 1.0)
    return min(values) - margin, max(values) + margin


def heat_scale(means: Sequence[float], column: Column, chance: float | None) -> Normalize:
    """Colour scale from the worst to the best mean; at chance level or worse, the worst colour."""
    sign = 1 if column.higher_is_better else -1
    ends = [mean for mean in means if chance is None or sign * (mean - chance) > 0]
    if chance is not None and len(ends) < len(means):
        ends = [*ends, chance] if ends else [chance, chance + sign]
    return Normalize(min(ends, default=0.0), max(ends, default=1.0), clip=True)


def heat(
    axis: Axes, tiles: Sequence[Sequence[float | str]], across: Axis, down: Axis, column: Column,
    scale: Normalize,
) -> None:  # fmt: skip
    """A heat map with its numbers; the better, the stronger the colour. A tile with a text is hatched."""
    means = np.array([[np.nan if isinstance(tile, str) else tile for tile in line] for line in tiles])
    shades = np.ma.filled(scale(np.ma.masked_invalid(means)), np.nan)
    shades = 0.5 + 0 * means if scale.vmin == scale.vmax else shades
    shades = shades if column.higher_is_better else 1 - shades
    axis.grid(False)
    axis.spines["bottom"].set_visible(False)
    axis.patch.set(hatch="////", edgecolor=LIGHT["faint"])
    filled = np.ma.masked_invalid(shades)
    axis.pcolormesh(filled, cmap=HEAT, vmin=0, vmax=1, edgecolors=LIGHT["page"], linewidth=2)
    for (i, j), shade in np.ndenumerate(shades):
        text, colour, size = tiles[i][j], "muted", SMALL
        if not isinstance(text, str):
            text, colour, size = short(text, column.decimals), "page" if shade > 0.68 else "ink", TEXT
        style = {"ha": "center", "va": "center", "fontsize": size, "color": LIGHT[colour]}
        axis.text(j + 0.5, i + 0.5, text, **style)
    for place, ticks in ((axis.xaxis, across.values), (axis.yaxis, down.values)):
        names = [f"{value:g}" if isinstance(value, float) else str(value) for value in ticks]
        place.set_ticks(np.arange(len(ticks)) + 0.5, names)
    axis.invert_yaxis()


Points = Sequence[tuple[Value, float]]


def points(axis: Axes, shown: Points, ghosts: Points = ()) -> None:
    """Points against one field, on a logarithmic scale where its range needs it; ``ghosts`` in grey."""
    axis.grid(axis="x")
    for pairs, colour in ((ghosts, "ghost"), (shown, "accent")):
        places = [float(x) for x, _ in pairs]
        axis.scatter(places, [y for _, y in pairs], s=10, color=LIGHT[colour], linewidths=0)
    xs = [float(x) for x, _ in (*shown, *ghosts)]
    if xs and min(xs) > 0 and max(xs) / min(xs) > 10:
        axis.set_xscale("log")
        axis.xaxis.set_minor_locator(NullLocator())
    else:
        axis.xaxis.set_major_locator(MaxNLocator(4))
