"""Draw the rows' three columns, a point a seed: `python -m experiments.overnight.figure`.

Reads cells.csv and the floors from the page's table of seeds; writes seeds.png. Perplexity is divided by the
floor of its seed, since each seed has held-out documents of its own.
"""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from experiments.tables import section, table

FOLDER = Path(__file__).parent
COLUMNS = {
    "lm_ppl": "perplexity, 5-grams = 1",
    "reasoning_acc (%)": "reasoning (%)",
    "long_context_acc (%)": "needles by key (%)",
}
MARKERS = "o^s"
COLOURS = ("#1f4e73", "#c98b3f", "#8cc29a")


def main() -> None:
    """Draw a panel a column, with a line at the floor."""
    counting, *others = table(section(FOLDER / "README.md", "By seed"))["floor"]
    floors = [float(floor) for floor in counting.split(" / ")]
    with (FOLDER / "cells.csv").open(encoding="utf-8") as file:
        cells = list(csv.DictReader(file))
    rows = list(dict.fromkeys(cell["row"] for cell in cells))
    figure, panels = pyplot.subplots(1, len(COLUMNS), sharey=True, figsize=(10, 3.9), layout="constrained")
    for panel, column, floor in zip(panels, COLUMNS, [1.0, *map(float, others)], strict=True):
        for cell in cells:
            seed = int(cell["seed"])
            value = float(cell[column]) / (floors[seed] if column == "lm_ppl" else 1)
            at = rows.index(cell["row"]) + 0.2 * (seed - 1)
            panel.plot(value, at, MARKERS[seed], color=COLOURS[seed], markersize=5, label=f"seed {seed}")
        panel.axvline(floor, color="#7f7f7f", linestyle="--", linewidth=0.9, label="floor")
        panel.set_xlabel(COLUMNS[column])
        panel.grid(axis="y", color="#eeeeee")
    panels[0].set_yticks(range(len(rows)), rows, fontsize=8)
    panels[0].invert_yaxis()
    handles, labels = panels[0].get_legend_handles_labels()
    entries = dict(zip(labels, handles, strict=True))
    figure.legend(entries.values(), entries.keys(), loc="outside right center", fontsize=8, frameon=False)
    figure.savefig(FOLDER / "seeds.png", dpi=110)


if __name__ == "__main__":
    main()
