"""The kinds of panel: rows as dots, lines, and heat maps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.ticker import FixedLocator, FuncFormatter, Locator, LogLocator, MaxNLocator, NullLocator

from titans_platform.report.figure_data import Dimension, Series
from titans_platform.report.picture import HEAT, LIGHT, SMALL, TEXT, Line
from titans_platform.study.spec import Column
from titans_platform.text import short, tokens


def dots(
    axis: Axes, rows: Sequence[Series], key: str, column: Column, chance: float | None, comparable: bool
) -> None:
    """Draw a column's rows: mean and standard deviation, single seeds, and the paper's numbers.

    The paper's are on the same scale if they are ``comparable``, else on a scale of their own at the top.
    """
    printed = {y: number for y, row in enumerate(rows) if (number := row.paper.get(key)) is not None}
    papers = axis if comparable or not printed else axis.twiny()
    papers.plot([*printed.values()], [*printed], "D", color=LIGHT["paper"], markersize=3.4)
    for y, row in enumerate(rows):
        values, colour = row.values.get(key, ()), LIGHT["reference" if row.reference else "accent"]
        if not values:
            text, place = "failed" if row.failed else "missing", axis.get_yaxis_transform()
            axis.text(0.01, y, text, transform=place, fontsize=SMALL, color=LIGHT["muted"], va="center")
            continue
        if len(values) > 1:
            axis.scatter(values, [y + 0.26] * len(values), s=5, color=colour, alpha=0.55, linewidths=0)
        spread = statistics.stdev(values) if len(values) > 1 else None
        axis.errorbar(
            statistics.fmean(values), y, xerr=spread, fmt="o", color=colour, markersize=4, capsize=1.8
        )
    if chance is not None and column.higher_is_better:
        # of a perplexity chance is far away and would compress the rows
        axis.axvline(chance, color=LIGHT["reference"], linestyle=(0, (1, 2)), linewidth=1)
    for each, colour in ((papers, "paper"), (axis, "accent")):
        each.grid(axis="x", visible=each is axis)
        each.xaxis.set_major_locator(MaxNLocator(4))
        each.tick_params(axis="x", labelcolor=LIGHT[colour])
        each.margins(x=0.1)
    axis.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=TEXT)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    for label, row in zip(axis.get_yticklabels(), rows, strict=True):
        label.set_color(LIGHT["muted" if row.reference else "ink"])


def lines(
    axis: Axes, shown: Sequence[Line], grey: Sequence[Line] = (), logarithmic: bool = False,
    log_y: bool = False,
) -> None:  # fmt: skip
    """Lines through the means with bars of one standard deviation; ``grey`` lines behind them."""
    for line in grey:
        axis.plot([*line.means], [*line.means.values()], color=LIGHT["ghost"], linewidth=0.7, zorder=1)
    for line in shown:
        colour, means = LIGHT[line.colour], line.means
        bars = [
            statistics.stdev(line.points[x]) if line.spread and len(line.points[x]) > 1 else 0 for x in means
        ]
        axis.errorbar(
            [*means], [*means.values()], yerr=bars if any(bars) else None, color=colour, linewidth=1.3,
            elinewidth=0.7, capsize=1.5, marker=line.marker if len(means) <= 12 else "", markersize=3.4,
        )  # fmt: skip
    if log_y:
        axis.set_yscale("log")
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_locator(LogLocator(numticks=6))
    else:
        axis.yaxis.set_major_locator(MaxNLocator(5))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: short(y)))
    if logarithmic:
        # a tick for every measured length
        across_tokens(axis, FixedLocator(sorted({x for line in (*shown, *grey) for x in line.points})))


def across_tokens(axis: Axes, ticks: Locator) -> None:
    """Numbers of tokens on a logarithmic x axis."""
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(ticks)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: tokens(x)))


def by_position(axis: Axes, shown: Sequence[Line], row: int = 0) -> None:
    """Lines against the position in a text; dotted: the end of the first row of ``row`` tokens, or zero."""
    lines(axis, shown)
    dotted = {"color": LIGHT["reference"], "linestyle": (0, (1, 2)), "linewidth": 1}
    axis.axvline(row, **dotted) if row else axis.axhline(0, **dotted)
    across_tokens(axis, LogLocator(base=2, numticks=6))


def heat_scale(means: Sequence[float], column: Column, chance: float | None) -> Normalize:
    """Colour scale from the worst to the best mean; at chance level or worse, the worst colour."""
    sign = 1 if column.higher_is_better else -1
    ends = [mean for mean in means if chance is None or sign * (mean - chance) > 0]
    if chance is not None and len(ends) < len(means):
        ends = [*ends, chance] if ends else [chance, chance + sign]
    return Normalize(min(ends, default=0.0), max(ends, default=1.0), clip=True)


def heat(
    axis: Axes, tiles: Sequence[Sequence[float | str]], across: Dimension, down: Dimension, column: Column,
    scale: Normalize,
) -> None:  # fmt: skip
    """Draw a heat map with its numbers; the better, the stronger the colour. A tile with a text is
    hatched.
    """
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
