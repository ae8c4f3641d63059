"""Figures of a report: their data, colours, the kinds of panel (dots, lines, heat maps); as SVG, PNG and PDF.

The data are the rows with their axis values and, for each seed, every measure. A row's axis values are its
``axes``; of a row without axes, the fields that it sets.
"""

from __future__ import annotations

import io
import math
import os
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, Normalize, to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, Locator, LogLocator, MaxNLocator, NullLocator

from titans_platform.report.table import Table, TableRow, deviation, task_of
from titans_platform.runs.folder import Result
from titans_platform.study.spec import Axis, Column
from titans_platform.text import flatten, short, tokens

Value = float | str
Curve = Sequence[tuple[int, float]]
THROUGHPUT = "throughput"
LENGTH_FIELDS = ("sequence_length", "length", "tokens")


@dataclass(frozen=True)
class Dimension:
    """A field that the rows of a study vary."""

    key: str
    values: tuple[Value, ...]
    title: str

    @property
    def numeric(self) -> bool:
        """True if all values are numbers."""
        return all(isinstance(value, int | float) for value in self.values)

    @property
    def is_length(self) -> bool:
        """True if it is a context length in tokens, the natural x axis."""
        return self.numeric and self.key.rpartition(".")[2] in LENGTH_FIELDS


@dataclass(frozen=True)
class Series:
    """The data of one row."""

    name: str
    axes: Mapping[str, Value]
    values: Mapping[str, tuple[float, ...]]
    """By measure, a number for each finished seed."""
    lengths: Mapping[str, Mapping[float, tuple[float, ...]]]
    """By column that was measured at several lengths: the numbers at each length."""
    paper: Mapping[str, float | None] = field(default_factory=dict)
    curves: Sequence[Curve] = ()
    """Training loss by step, for each seed."""
    reference: bool = False
    failed: bool = False

    @property
    def means(self) -> dict[str, float]:
        """The mean over seeds of every measure that has numbers."""
        return {key: statistics.fmean(values) for key, values in self.values.items() if values}


@dataclass(frozen=True)
class FigureData:
    """The data of all figures of a study."""

    table: Table
    rows: tuple[Series, ...]
    axes: tuple[Dimension, ...]
    measures: Mapping[str, Column]
    """The columns of the table, and training throughput."""
    trials: Sequence[Mapping[str, Any]] = ()
    """Trials of a search: params, steps and value of each."""


def figure_data(
    table: Table, curves: Mapping[str, Curve] | None = None, search: Mapping[str, Any] | None = None
) -> FigureData:
    """Collect the figure data of a table.

    ``curves`` are the training losses of cells by name, ``search`` is the record of the study's
    search: its trials with their params, steps and value.
    """
    rows = tuple(_series(table, row, curves or {}) for row in table.rows)
    measures = dict(table.columns)
    if any(row.values.get(THROUGHPUT) for row in rows):
        measures.setdefault(THROUGHPUT, Column(title="Training throughput", unit="tokens/s", decimals=0))
    trials = [trial for trial in (search or {}).get("trials", ()) if trial.get("value") is not None]
    axes = _axes(rows, table.run.study.axes_at(table.run.scale_name))
    return FigureData(table, rows, axes, measures, trials)


def _series(table: Table, row: TableRow, curves: Mapping[str, Curve]) -> Series:
    values = {key: entry.values for key, entry in row.entries.items()}
    lengths = {key: at for key, c in table.columns.items() if (at := _by_length(key, c.factor, row.results))}
    speeds = [(result.tokens, result.train_seconds) for result in row.results]
    throughput = tuple(tokens / seconds for tokens, seconds in speeds if tokens and seconds)
    kept = [curves[result.cell] for result in row.results if curves.get(result.cell)]
    axes = {key: axis_value(value) for key, value in (row.row.axes or flatten(row.row.set)).items()}
    return Series(
        row.row.name, axes, {THROUGHPUT: throughput} | values, lengths, row.row.paper,
        kept, row.row.reference, bool(row.failures),
    )  # fmt: skip


def axis_value(value: Any) -> Value:
    """Return a setting as an axis value: a number, or a string."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _axes(rows: Iterable[Series], declared: Mapping[str, Axis]) -> tuple[Dimension, ...]:
    """Return the fields that every row sets, with at least two different values."""
    places = [row.axes for row in rows if not row.reference]
    axes = []
    for key in places[0] if places else ():
        values = tuple({at[key]: None for at in places if key in at})
        if len(values) > 1 and all(key in at for at in places):
            # the study's title, or the last part of the field's dotted name
            title = declared[key].title if key in declared else ""
            axis = Dimension(key, values, title or key.rpartition(".")[2].replace("_", " "))
            axes.append(replace(axis, values=tuple(sorted(values, key=float))) if axis.numeric else axis)
    return tuple(axes)


def _by_length(column: str, factor: float, results: Iterable[Result]) -> dict[float, tuple[float, ...]]:
    """Return a column's value at each length: the mean of its tasks that were measured at several lengths."""
    by_length: dict[float, list[float]] = {}
    for result in results:
        by_task: dict[str, dict[float, float]] = {}
        for key, measured in result.tasks.items():
            owner, task, length = task_of(key)
            if owner == column and length is not None and math.isfinite(float(measured.value)):
                by_task.setdefault(task, {})[length] = float(measured.value)
        several = [values for values in by_task.values() if len(values) > 1]
        for length in set.intersection(*map(set, several)) if several else ():
            mean = statistics.fmean(values[length] for values in several)
            by_length.setdefault(length, []).append(factor * mean)
    return {length: tuple(values) for length, values in sorted(by_length.items())}


COLOURS = {
    "page": ("#ffffff", "#14171b"), "ink": ("#1f2328", "#e4e7ea"), "muted": ("#57606a", "#9da7b2"),
    "faint": ("#dbe0e6", "#343b44"), "ghost": ("#c3cad2", "#4a535e"), "accent": ("#1a5fb4", "#7db8ff"),
    "paper": ("#8f5f00", "#dba63c"), "reference": ("#79828d", "#8b949f"), "heat": ("#0b4f9e", "#8cc4ff"),
    "a": ("#1b69c8", "#6cb0fe"), "b": ("#c2410d", "#ff9b6b"), "c": ("#0e7a5e", "#4cc9a3"),
    "d": ("#8a3eb4", "#cf9bf1"), "e": ("#996600", "#e0b041"), "f": ("#bf257d", "#ff8ac5"),
    "s1": ("#4a8fce", "#3d7fc1"), "s2": ("#2e77c3", "#66a7e5"), "s3": ("#1b549b", "#9ccbf6"),
    "s4": ("#0d3165", "#dbeefe"),
}  # fmt: skip
LIGHT, DARK = ({name: pair[i] for name, pair in COLOURS.items()} for i in (0, 1))
KINDS, STEPS = ("a", "b", "c", "d", "e", "f"), ("s1", "s2", "s3", "s4")
MARKERS = ("o", "s", "^", "D", "v", "P")
SMALL, TEXT = 7.0, 7.6
MANY = 6
"""Maximum coloured lines in one panel."""

PERCENT = range(5, 93)
"""Percentages of the heat colour in a tile, from worst to best."""
_MIXED = LinearSegmentedColormap.from_list("mixed", [LIGHT["page"], LIGHT["heat"]], 101)(PERCENT)
HEAT = ListedColormap(_MIXED, "heat")
NAMES = {
    to_hex(colour): f"color-mix(in srgb, var(--heat) {percent}%, var(--page))"
    for colour, percent in zip(_MIXED, PERCENT, strict=True)
} | {value: f"var(--{name})" for name, value in LIGHT.items()}
"""CSS variable of each drawn colour; the page has another value for it in dark mode."""

STYLE: list[Any] = [
    Path(__file__).with_name("report.mplstyle"),
    {"text.color": LIGHT["ink"], "axes.edgecolor": LIGHT["ghost"], "grid.color": LIGHT["faint"]},
    dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), LIGHT["muted"]),
]
"""Style sheet and colours of every panel."""

WIDE, NARROW = (3.5, 2.3), (1.9, 1.4)
"""Width and height of a panel in inches."""
ACROSS_WIDE, ACROSS_NARROW = 3, 5
"""Panels side by side."""
Draw = Callable[[Axes], None]
"""Draws one panel."""


def ordered(count: int) -> tuple[str, ...]:
    """``count`` (at most four) colour names for ordered values, light to dark."""
    return tuple(STEPS[i] for i in {1: (2,), 2: (0, 3), 3: (0, 2, 3)}.get(count, range(4)))


@dataclass(frozen=True)
class Line:
    """One line of a panel: its values for each seed, and its style."""

    label: str
    points: Mapping[float, tuple[float, ...]]
    colour: str = "accent"
    marker: str = "o"

    @property
    def means(self) -> dict[float, float]:
        """The mean over seeds by x, sorted."""
        return {x: statistics.fmean(self.points[x]) for x in sorted(self.points)}


def coloured(lines: Sequence[Line]) -> tuple[list[Line], list[Line]]:
    """Return the lines in colours of their own, and the grey ones.

    Of more than ``MANY`` lines, the highest and the lowest at their last points are coloured.
    """
    shown, half = [line for line in lines if line.points], MANY // 2
    if len(shown) > MANY:
        shown.sort(key=lambda line: -next(reversed(line.means.values())))
        shown = shown[:half] + shown[-half:]
    grey = [line for line in lines if line not in shown]
    looks = zip(shown, KINDS, MARKERS, strict=False)
    return [replace(line, colour=colour, marker=marker) for line, colour, marker in looks], grey


@dataclass(frozen=True)
class Picture:
    """A figure of the report: panels of equal size under one caption."""

    key: str
    title: str
    caption: str
    panels: Sequence[Draw]
    size: tuple[float, float] = WIDE
    """Width and height of a panel in inches."""
    legend: Sequence[Line] = ()

    @property
    def file(self) -> str:
        """Stem of its files; the name of a column, which a key may hold, may have any sign."""
        return re.sub(r"[^\w.@+-]+", "-", self.key)

    @property
    def across(self) -> int:
        """Panels side by side."""
        return min(len(self.panels), ACROSS_NARROW if self.size[0] < 3 else ACROSS_WIDE)

    @property
    def width(self) -> float:
        """Width of the whole figure in inches."""
        return self.size[0] * self.across

    def draw(self) -> Figure:
        """Draw the figure, in the colours of print."""
        # inches of the longest entry of the legend: its mark, and letters of 7.5 points
        entry = 0.5 + 0.065 * max((len(line.label) for line in self.legend), default=0)
        columns = max(1, min(6, int(self.width / entry)))
        down, below = math.ceil(len(self.panels) / self.across), 0.3 * math.ceil(len(self.legend) / columns)
        with style.context(STYLE):
            figure = Figure(figsize=(self.width, self.size[1] * down + below), layout="constrained")
            axes = figure.subplots(down, self.across, squeeze=False).flatten()
            for axis in axes[len(self.panels) :]:
                axis.remove()
            for axis, draw in zip(axes, self.panels, strict=False):
                draw(axis)
            if self.legend:
                handles = [
                    Line2D([], [], color=LIGHT[line.colour], marker=line.marker, label=line.label)
                    for line in self.legend
                ]
                figure.legend(handles=handles, loc="outside lower left", ncols=columns)
        return figure


def panel(title: str, draw: Callable[..., object], x: str = "", y: str = "", **drawn: Any) -> Draw:
    """Return a panel with its labels; calls ``draw(axis, **drawn)``."""

    def paint(axis: Axes) -> None:
        draw(axis, **drawn)
        # 13 characters of a title fit into an inch; a longer one would run into the next panel's
        inches = axis.get_window_extent().width / axis.figure.get_dpi()
        axis.set(title=fill(title, max(10, round(13 * inches))), xlabel=x, ylabel=y)

    return paint


def svg(picture: Picture) -> str:
    """Render the figure as inline SVG with the page's font, its CSS colour variables and a title."""
    out, ident = io.StringIO(), f"figure-{picture.file}"
    # ids come from the salt: unique on a page, the same in every run
    with style.context([*STYLE, {"svg.hashsalt": ident}]):
        picture.draw().savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    head, _, body = out.getvalue().partition("<svg")[2].partition(">")
    view = re.findall(r'viewBox="[^"]+"', head)[0]
    body = re.sub(r"<metadata>.*?</metadata>|font-family: [^;\"]*; ?", "", body, flags=re.S)
    # ids of groups are the same in every drawing, so they are removed
    for pattern, new in ((r'<g id="[^"]*"', "<g"), (r"xlink:href=", "href="), (r">\s+<", "><")):
        body = re.sub(pattern, new, body)
    body = re.sub("#[0-9a-f]{6}", lambda match: NAMES.get(match[0], match[0]), body).strip()
    title = f'<title id="{ident}-title">{escape(picture.title)}</title>'
    return f'<svg {view} role="img" aria-labelledby="{ident}-title">{title}{body}'


def save(picture: Picture, folder: Path) -> list[Path]:
    """Write the figure as PNG and PDF, named by its key, atomically; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{picture.file}.{kind}" for kind in ("png", "pdf")]
    with style.context(STYLE):
        figure = picture.draw()
        for path in paths:
            temporary = path.with_name(f".{os.getpid()}.{path.name}")
            # no date, so that the same table gives the same bytes
            metadata: dict[str, Any] = {"CreationDate": None} if path.suffix == ".pdf" else {}
            figure.savefig(temporary, dpi=140, facecolor="white", metadata=metadata)
            os.replace(temporary, path)
            # the layout is computed once for both formats
            figure.set_layout_engine("none")
    return paths


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
        mean, spread = statistics.fmean(values), deviation(values)
        axis.errorbar(mean, y, xerr=spread, fmt="o", color=colour, markersize=4, capsize=1.8)
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
        bars = [deviation(line.points[x]) or 0 for x in means]
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
    draw_line = axis.axvline if row else axis.axhline
    draw_line(row, **dotted)
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
    """Draw a heat map with its numbers: the better, the stronger the colour. A tile with text is hatched."""
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
