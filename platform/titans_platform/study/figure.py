"""The table as a picture: a pair of panels a column, ours with error bars, the paper's beside."""

from __future__ import annotations

import os
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from titans_platform.study.render import title
from titans_platform.study.table import Table

INK, FAINT = "#22272e", "#d5dae1"
OURS, PAPER, REFERENCE = "#1f6feb", "#9a6700", "#8b949e"


def draw(table: Table, path: Path) -> Path:
    """Write the figure as PNG; a half-written one is never seen. Returns the path."""
    columns = list(table.study.columns)
    figure = Figure(figsize=(1.6 + 4.1 * len(columns), 1.7 + 0.34 * len(table.rows)), layout="constrained")
    axes = figure.subplots(
        1, 2 * len(columns), sharey=True, squeeze=False, width_ratios=[1.75, 1] * len(columns)
    )[0]
    for i, column in enumerate(columns):
        _ours(axes[2 * i], table, column)
        _paper(axes[2 * i + 1], table, column)
    _rows(axes[0], table)
    figure.suptitle(title(table), x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    figure.supxlabel(_caption(table), x=0.01, ha="left", fontsize=8, color="#57606a")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    figure.savefig(temporary, dpi=160, facecolor="white")
    os.replace(temporary, path)
    return path


def _caption(table: Table) -> str:
    bars = "Large dot and bar: mean ± one standard deviation over seeds; small dots: seeds; dotted: chance."
    if table.scale.comparable:
        return bars
    return f"{bars}\nThe columns are small substitutes: compare the order of rows, not the numbers."


def _rows(axis: Axes, table: Table) -> None:
    axis.set_yticks(range(len(table.rows)), [row.row.name for row in table.rows])
    axis.set_ylim(len(table.rows) - 0.4, -0.6)
    for label, row in zip(axis.get_yticklabels(), table.rows, strict=True):
        label.set_color(REFERENCE if row.row.reference else INK)


def _plain(axis: Axes) -> None:
    axis.grid(axis="y", color=FAINT, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", labelsize=8, colors="#57606a")
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(FAINT)
    axis.locator_params(axis="x", nbins=4)
    axis.margins(x=0.08)


def _ours(axis: Axes, table: Table, key: str) -> None:
    column = table.study.columns[key]
    level = table.chance.get(key)
    # where lower is better chance lies far away, and would squeeze the rows into one place
    if level is not None and column.higher_is_better:
        axis.axvline(level, color=REFERENCE, linestyle=":", linewidth=1.2)
    for y, row in enumerate(table.rows):
        entry = row.entries[key]
        if entry.mean is None:
            continue
        colour = REFERENCE if row.row.reference else OURS
        if len(entry.values) > 1:
            axis.scatter(
                entry.values, [y + 0.22] * len(entry.values), s=8, color=colour, alpha=0.6, linewidths=0
            )
        axis.errorbar(
            entry.mean, y, xerr=entry.sd, fmt="o", color=colour, markersize=6, elinewidth=1.6, capsize=2.5
        )
    better = "higher is better" if column.higher_is_better else "lower is better"
    unit = f" ({column.unit})" if column.unit else ""
    axis.set_title(f"{column.title}{unit}, ours", loc="left", fontsize=10, color=INK)
    axis.set_xlabel(better, fontsize=8, color="#57606a", loc="left")
    _plain(axis)


def _paper(axis: Axes, table: Table, key: str) -> None:
    for y, row in enumerate(table.rows):
        value = row.entries[key].paper
        if value is not None:
            axis.plot(value, y, "D", color=REFERENCE if row.row.reference else PAPER, markersize=5)
    axis.set_title("the paper's", loc="left", fontsize=10, color=PAPER)
    _plain(axis)
    axis.set_facecolor("#fbf8f1")
    # half as wide as ours: fewer numbers fit below it
    axis.locator_params(axis="x", nbins=3)
    if not axis.lines:
        axis.set_xticks([])
