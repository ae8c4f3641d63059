"""Two columns of a study against each other: a dot for each row's mean, bars of one standard error.

cd experiments/hybrids; python frontier.py cells.csv reasoning_acc long_context_acc hybrids.png
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

COLOURS = {"LMM": "#1f5fb4", "MAC": "#b4471f", "MAG": "#2f7d4f", "MAL": "#7a4fa3", "Win": "#777777"}


def main(cells: Path, x: str, y: str, out: Path) -> None:
    """Draw the figure from a file of cells, whose columns begin with the names ``x`` and ``y``."""
    rows: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with cells.open(newline="") as file:
        reader = csv.DictReader(file)
        names = [next(n for n in reader.fieldnames or () if n.split(" ")[0] == key) for key in (x, y)]
        for line in reader:
            if line[names[0]] and line[names[1]]:
                rows[line["row"]].append((float(line[names[0]]), float(line[names[1]])))
    figure, axis = pyplot.subplots(figsize=(7.2, 4.6), layout="constrained")
    marks: list[tuple[str, tuple[float, float], str]] = []
    for name, points in rows.items():
        means, errors = zip(*(_mean(values) for values in zip(*points, strict=True)), strict=True)
        colour = COLOURS.get(name[:3], "#444444")
        axis.errorbar(*means, xerr=errors[0], yerr=errors[1], fmt="o", color=colour, ms=5, lw=0.9)
        marks.append((name, (means[0], means[1]), colour))
    axis.set(xlabel=names[0].replace("_acc", ""), ylabel=names[1].replace("_acc", "").replace("_", " "))
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    figure.canvas.draw()
    placed = []
    for name, means, colour in marks:
        for offset, side in (((5, 4), "left"), ((5, -11), "left"), ((-5, 4), "right"), ((-5, -11), "right")):
            text = axis.annotate(
                name, means, offset, textcoords="offset points", fontsize=8, color=colour, ha=side
            )
            box = text.get_window_extent()
            if not any(box.overlaps(other) for other in placed):
                break
            text.remove()
        else:
            continue
        placed.append(box)
    figure.savefig(out, dpi=150)


def _mean(values: tuple[float, ...]) -> tuple[float, float]:
    """Mean and standard error."""
    spread = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return statistics.mean(values), spread


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
