"""Draw the loss against the history that a state has read: `python -m experiments.far_text.figure`.

Reads cells.csv, and the floor from the page's table; writes history.png.
"""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from experiments.tables import section, table

FOLDER = Path(__file__).parent
READ = {"256": "read_256 (nats)", "1K": "read_1k (nats)", "4K": "read_4k (nats)", "all": "read_all (nats)"}
COLOURS = {"Window": "#c98b3f", "LMM": "#9dbad5", "MAG": "#1f4e73", "Gated delta rule": "#8cc29a"}
TOKENS_A_STEP = 8 * 512


def main() -> None:
    """Draw a panel for each number of steps: mean over seeds, each seed as a point, floors where counted."""
    with (FOLDER / "cells.csv").open(encoding="utf-8") as file:
        cells = [(*cell["row"].rsplit(" ", 2)[:2], cell) for cell in csv.DictReader(file)]
    steps = sorted({int(number) for _, number, _ in cells})
    rows = table(section(FOLDER / "README.md", "In short, so far"))
    size = (3.8 * len(steps), 3.4)
    figure, panels = pyplot.subplots(1, len(steps), figsize=size, sharey=True, squeeze=False)
    for panel, count in zip(panels[0], steps, strict=True):
        for row, colour in COLOURS.items():
            own = [cell for name, number, cell in cells if name == row and int(number) == count]
            seeds = [[float(cell[column]) for column in READ.values()] for cell in own]
            panel.plot(list(READ), [fmean(x) for x in zip(*seeds, strict=True)], color=colour, label=row)
            for losses in seeds:
                panel.plot(list(READ), losses, "o", color=colour, markersize=3)
        tokens = f"{count * TOKENS_A_STEP / 1e6:.2f}M tokens"
        for name in rows:
            if name.startswith("floor") and name.endswith(tokens):
                floor = [float(value) for value in rows[name][: len(READ)]]
                panel.plot(list(READ), floor, "--", color="#7f7f7f", label="5-grams with a cache")
        panel.set_title(tokens, fontsize=10)
        panel.set_xlabel("tokens that the state has read")
    panels[0][0].set_ylabel("nats a token beyond 4,096")
    panels[0][-1].legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(FOLDER / "history.png", dpi=110)


if __name__ == "__main__":
    main()
