"""Draw the loss against the history that a state has read: `python -m experiments.far_text.figure`.

Reads cells.csv and cells-large.csv, and the floor from the page's table; writes history.png. Intervals of
95% are over documents, by Student's t and the standard error of each cell; cells without one have a point
alone.
"""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from scipy.stats import t

from experiments.tables import section, table

FOLDER = Path(__file__).parent
FILES = {"cells.csv": ("0.95M", "In short, so far"), "cells-large.csv": ("4.5M", "4.5M parameters")}
"""Parameters of the models of a file's cells, and the page's section with their floors."""
READ = {"256": "read_256", "1K": "read_1k", "4K": "read_4k", "all": "read_all"}
COLOURS = {"Window": "#c98b3f", "LMM": "#9dbad5", "MAG": "#1f4e73", "Gated delta rule": "#8cc29a"}
TOKENS_A_STEP = 8 * 512
DOCUMENTS = 12
"""Held-out files that are read."""
APART = 0.09
"""Seeds and rows beside each other, in steps of the axis."""


def main() -> None:
    """Draw for each size and number of steps the losses, and what the whole file gains over 1K tokens."""
    drawn = [
        (size, steps, cells, table(section(FOLDER / "README.md", heading)))
        for file, (size, heading) in FILES.items()
        for steps, cells in sorted(by_steps(FOLDER / file).items())
    ]
    shape = {"figsize": (3.2 * len(drawn), 5.6), "height_ratios": [3, 2]}
    figure, panels = pyplot.subplots(2, len(drawn), sharey="row", squeeze=False, **shape)
    for losses, gains, (size, steps, cells, rows) in zip(*panels, drawn, strict=True):
        for i, (row, colour) in enumerate(COLOURS.items()):
            runs = [cell for cell in cells if cell["row"].startswith(f"{row} {steps} ")]
            if not runs:
                continue
            seeds = [[value(cell, column) for column in READ.values()] for cell in runs]
            losses.plot(list(READ), [fmean(x) for x in zip(*seeds, strict=True)], color=colour, label=row)
            for j, cell in enumerate(runs):
                for at, column in enumerate(READ.values()):
                    point(losses, at, cell, column, colour)
                point(gains, i + APART * (j - (len(runs) - 1) / 2), cell, "far_gain", colour)
        tokens = f"{steps * TOKENS_A_STEP / 1e6:.2f}M tokens"
        for name in rows:
            if name.startswith("floor") and name.endswith(tokens):
                floor = [float(loss) for loss in rows[name][: len(READ)]]
                losses.plot(list(READ), floor, "--", color="#7f7f7f", label="5-grams with a cache")
        losses.set_title(f"{tokens},\n{size} parameters", fontsize=10)
        losses.set_xlabel("tokens that the state has read")
        gains.set_xlim(-0.5, len(COLOURS) - 0.5)
        gains.axhline(0, color="#7f7f7f", linewidth=0.8)
        gains.set_xticks(
            range(len(COLOURS)), [name.replace(" delta ", "\ndelta ") for name in COLOURS], fontsize=7
        )
    panels[0][0].set_ylabel("nats a token beyond 4,096")
    panels[1][0].set_ylabel("nats gained,\nall for 1K")
    handles, labels = panels[0][0].get_legend_handles_labels()
    entries = dict(zip(labels, handles, strict=True))
    panels[0][-1].legend(
        entries.values(),
        entries.keys(),
        fontsize=8,
        frameon=False,
        loc="center left",
        bbox_to_anchor=(1, 0.5),
    )
    figure.tight_layout()
    figure.savefig(FOLDER / "history.png", dpi=110)


def by_steps(path: Path) -> dict[int, list[dict[str, str]]]:
    """Return the cells of a file by their optimiser steps, which end the names of rows: LMM 256 steps."""
    cells: dict[int, list[dict[str, str]]] = {}
    with path.open(encoding="utf-8") as file:
        for cell in csv.DictReader(file):
            cells.setdefault(int(cell["row"].split()[-2]), []).append(cell)
    return cells


def value(cell: dict[str, str], column: str) -> float:
    """Return a column of a cell, in nats."""
    return float(cell[f"{column} (nats)"])


def point(axes: Axes, at: float, cell: dict[str, str], column: str, colour: str) -> None:
    """Draw a cell's value, with its interval over documents if the cell has a standard error."""
    stderr = cell.get(f"{column} stderr (nats)")
    half = t.ppf(0.975, DOCUMENTS - 1) * float(stderr) if stderr else None
    axes.errorbar(at, value(cell, column), half, fmt="o", color=colour, markersize=3, elinewidth=0.9)


if __name__ == "__main__":
    main()
