"""The kinds of panel: rows as dots, lines, heat-maps, and points against a field."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from titans_platform.report.palette import Ink
from titans_platform.report.series import Series, Value
from titans_platform.study.spec import Column

SMALL, TEXT = 7.0, 7.6
MIN_LOG_RATIO = 4.0
"""Largest over smallest number from which a scale is logarithmic."""


@dataclass(frozen=True)
class Line:
    """One line of a panel: where it goes, seed by seed, and how it is drawn."""

    label: str
    points: Mapping[float, tuple[float, ...]]
    colour: str = "accent"
    marker: str = "o"
    runs: Sequence[Sequence[tuple[float, float]]] = ()
    """Single runs, drawn thin below the mean."""
    printed: Mapping[float, float] = field(default_factory=dict)
    """The paper's numbers at the same places, drawn dashed."""
    spread: bool = True
    """Whether the standard deviation over seeds is shown."""


def plain(axis: Axes, ink: Ink, grid: str = "y") -> None:
    """No frame but the lower line, a pale grid, small grey numbers."""
    axis.set_facecolor("none")
    if grid:
        axis.grid(axis=grid, color=ink["faint"], linewidth=0.5)  # pyright: ignore[reportArgumentType]
    axis.set_axisbelow(True)
    axis.tick_params(length=0, labelsize=SMALL, labelcolor=ink["muted"], pad=2)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(ink["ghost"])
    axis.spines["bottom"].set_linewidth(0.6)


def labelled(axis: Axes, ink: Ink, title: str, x: str = "", y: str = "") -> None:
    """Title at the left, axis names in grey."""
    axis.set_title(title, loc="left", fontsize=TEXT + 0.4, color=ink["ink"], fontweight="bold", pad=5)
    axis.set_xlabel(x, fontsize=SMALL, color=ink["muted"], labelpad=2)
    axis.set_ylabel(y, fontsize=SMALL, color=ink["muted"], labelpad=2)


def dots(
    figure: FigureBase, ink: Ink, rows: Sequence[Series], key: str, column: Column, chance: float | None
) -> None:
    """A column's rows: mean and standard deviation, single seeds, and the paper's numbers beside."""
    printed = any(row.paper.get(key) is not None for row in rows)
    widths = (2.1, 1.0) if printed else (1.0,)
    axes = figure.subplots(1, len(widths), sharey=True, squeeze=False, width_ratios=widths)[0]
    for y, row in enumerate(rows):
        _dot(axes[0], ink, y, row, key)
        if printed and row.paper.get(key) is not None:
            colour = ink["reference" if row.reference else "paper"]
            axes[1].plot(row.paper[key], y, "D", color=colour, markersize=3.4)
    if chance is not None and column.higher_is_better:
        # where lower is better chance lies far away, and would squeeze the rows into one place
        axes[0].axvline(chance, color=ink["reference"], linestyle=(0, (1, 2)), linewidth=1)
    for axis, title, colour in zip(axes, ("ours", "paper"), ("accent", "paper"), strict=False):
        plain(axis, ink, "both")
        axis.set_title(title, loc="left", fontsize=TEXT, color=ink[colour], pad=3)
        axis.xaxis.set_major_locator(MaxNLocator(4 if axis is axes[0] else 2))
        axis.margins(x=0.1)
    if not any(row.values.get(key) for row in rows):
        axes[0].set_xticks([])
    axes[0].set_yticks(range(len(rows)), [row.name for row in rows])
    axes[0].set_ylim(len(rows) - 0.4, -0.6)
    for label, row in zip(axes[0].get_yticklabels(), rows, strict=True):
        label.set(color=ink["muted" if row.reference else "ink"], fontsize=TEXT)


def _dot(axis: Axes, ink: Ink, y: int, row: Series, key: str) -> None:
    values = row.values.get(key, ())
    colour = ink["reference" if row.reference else "accent"]
    if not values:
        text = "failed" if row.failed else "missing"
        axis.text(
            0.01,
            y,
            text,
            transform=axis.get_yaxis_transform(),
            fontsize=SMALL,
            color=ink["muted"],
            va="center",
        )
        return
    if len(values) > 1:
        axis.scatter(values, [y + 0.26] * len(values), s=5, color=colour, alpha=0.55, linewidths=0)
    spread = statistics.stdev(values) if len(values) > 1 else None
    axis.errorbar(
        statistics.fmean(values),
        y,
        xerr=spread,
        fmt="o",
        color=colour,
        markersize=4,
        elinewidth=1.2,
        capsize=1.8,
    )


def lines(
    axis: Axes, ink: Ink, shown: Sequence[Line], ghosts: Sequence[Line] = (), logarithmic: bool = False
) -> None:
    """Lines through the means with their standard deviations; other lines in pale grey behind."""
    plain(axis, ink)
    for line in ghosts:
        xs = sorted(line.points)
        axis.plot(
            xs, [statistics.fmean(line.points[x]) for x in xs], color=ink["ghost"], linewidth=0.7, zorder=1
        )
    for line in shown:
        for run in line.runs:
            axis.plot(*zip(*run, strict=True), color=ink[line.colour], linewidth=0.6, alpha=0.45, zorder=2)
        _mean(axis, ink, line)
        xs = sorted(line.printed)
        ys = [line.printed[x] for x in xs]
        axis.plot(xs, ys, color=ink[line.colour], linewidth=0.9, linestyle=(0, (3, 2)))
        if line.spread:
            _spread(axis, ink, line, band=len(shown) == 1)
    axis.yaxis.set_major_locator(MaxNLocator(5))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: short_tick(y)))
    if logarithmic:
        _lengths(axis, {x for line in (*shown, *ghosts) for x in line.points})


def _mean(axis: Axes, ink: Ink, line: Line) -> None:
    xs = sorted(line.points)
    means = [statistics.fmean(line.points[x]) for x in xs]
    marker = line.marker if len(xs) <= 12 else ""
    axis.plot(xs, means, color=ink[line.colour], linewidth=1.3, marker=marker, markersize=3.4, zorder=4)


def _spread(axis: Axes, ink: Ink, line: Line, band: bool) -> None:
    """A band around one line; bars where bands of several would cover each other."""
    xs = [x for x in sorted(line.points) if len(line.points[x]) > 1]
    means = [statistics.fmean(line.points[x]) for x in xs]
    sds = [statistics.stdev(line.points[x]) for x in xs]
    if not xs:
        return
    if not band:
        axis.errorbar(
            xs, means, yerr=sds, fmt="none", ecolor=ink[line.colour], elinewidth=0.7, capsize=1.5, zorder=3
        )
        return
    low, high = ([mean + sign * sd for mean, sd in zip(means, sds, strict=True)] for sign in (-1, 1))
    axis.fill_between(xs, low, high, color=ink[line.colour], alpha=0.14, linewidth=0, zorder=3)


def span(drawn: Sequence[Line], after: float = 0.0) -> tuple[float, float] | None:
    """One vertical scale for several panels: every seed's number beyond ``after``, and a margin."""
    values = [v for line in drawn for x, found in line.points.items() if x >= after for v in found]
    if not values:
        return None
    margin = 0.06 * ((max(values) - min(values)) or abs(max(values)) or 1.0)
    return min(values) - margin, max(values) + margin


def _lengths(axis: Axes, xs: set[float]) -> None:
    """A scale of powers of two with every measured length named."""
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(sorted(xs)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: tokens(x)))


def tokens(count: float) -> str:
    """A number of tokens as it is said: 512, 2K, 16K."""
    return f"{count / 1024:g}K" if count >= 1024 and count % 1024 == 0 else f"{count:g}"


def heat(
    axis: Axes,
    ink: Ink,
    tiles: Mapping[tuple[Value, Value], Series],
    across: Sequence[Value],
    down: Sequence[Value],
    key: str,
    column: Column,
    limits: tuple[float, float],
) -> None:
    """A tile for each pair of values with its number in it; the better, the stronger. Gaps are said."""
    plain(axis, ink, "")
    axis.spines["bottom"].set_visible(False)
    for i, y in enumerate(down):
        for j, x in enumerate(across):
            _tile(axis, ink, (j, i), tiles.get((x, y)), key, column, limits)
    axis.set_xticks(range(len(across)), [f"{x:g}" if isinstance(x, float) else str(x) for x in across])
    axis.set_yticks(range(len(down)), [f"{y:g}" if isinstance(y, float) else str(y) for y in down])
    axis.set_xlim(-0.5, len(across) - 0.5)
    axis.set_ylim(len(down) - 0.5, -0.5)


def _tile(
    axis: Axes,
    ink: Ink,
    at: tuple[int, int],
    row: Series | None,
    key: str,
    column: Column,
    limits: tuple[float, float],
) -> None:
    values = row.values.get(key, ()) if row else ()
    if not values:
        text = "" if row is None else "failed" if row.failed else "—"
        _square(axis, at, facecolor="none", edgecolor=ink["faint"], hatch="////" if row else None)
        axis.text(*at, text, ha="center", va="center", fontsize=SMALL, color=ink["muted"])
        return
    mean, (low, high) = statistics.fmean(values), limits
    share = (mean - low) / (high - low) if high > low else 0.5
    share = share if column.higher_is_better else 1 - share
    _square(axis, at, facecolor=ink.heat(share), edgecolor="none")
    text = short_number(mean, column.decimals)
    axis.text(*at, text, ha="center", va="center", fontsize=TEXT, color=ink.on_heat(share))


def _square(axis: Axes, at: tuple[int, int], **style: object) -> None:
    from matplotlib.patches import Rectangle

    axis.add_patch(Rectangle((at[0] - 0.475, at[1] - 0.47), 0.95, 0.94, linewidth=0.6, **style))  # pyright: ignore[reportArgumentType]


def short_number(value: float, decimals: int) -> str:
    """A number that fits into a tile."""
    if abs(value) >= 10_000:
        return f"{value / 1000:.0f}K"
    return f"{value:.{decimals}f}" if abs(value) < 1000 else f"{value:.0f}"


def short_tick(value: float) -> str:
    """A number on a scale: 50K, 1.5, 0."""
    return f"{value / 1000:g}K" if abs(value) >= 10_000 else f"{value:g}"


def points(
    axis: Axes, ink: Ink, shown: Sequence[tuple[Value, float]], ghosts: Sequence[tuple[Value, float]] = ()
) -> None:
    """Numbers against one field, on a logarithmic scale where its values need it; ghosts are pale."""
    plain(axis, ink, "both")
    for pairs, colour in ((ghosts, "ghost"), (shown, "accent")):
        axis.scatter(
            [float(x) for x, _ in pairs], [y for _, y in pairs], s=10, color=ink[colour], linewidths=0
        )
    xs = [float(x) for x, _ in (*shown, *ghosts)]
    if xs and min(xs) > 0 and max(xs) / min(xs) > 10:
        axis.set_xscale("log")
        axis.xaxis.set_minor_locator(NullLocator())
    else:
        axis.xaxis.set_major_locator(MaxNLocator(4))
