"""Perplexity by position in long texts: the memory as the paper prints it, and as this project trains it.

    python experiments/carried/positions.py ROOT experiments/carried/carried.png

ROOT is a storage root with the cells of the study `carried`. Means over seeds.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from titans_platform.files import read_json

LINES = {
    ("LMM, forgets to zero, shuffled rows", "carried"): (
        "decay towards zero, shuffled rows: state carried",
        "#b4471f",
        "-",
    ),
    ("LMM, forgets to zero, shuffled rows", "fresh"): (
        "the same, a new state every 64 bytes",
        "#b4471f",
        ":",
    ),
    ("LMM", "carried"): ("decay towards M_0, streams: state carried", "#1f5fb4", "-"),
    ("LMM", "fresh"): ("the same, a new state every 64 bytes", "#1f5fb4", ":"),
}
"""By row and way of reading: label, colour, style."""


def main(root: Path, out: Path) -> None:
    """Draw the figure from the results under ``root``."""
    points: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted((root / "cells").glob("*/result.json")):
        result = read_json(path) or {}
        if result["study"] != "carried":
            continue
        for task, buckets in result["buckets"].items():
            for name, value in buckets.items() if task.startswith("gain/") else ():
                way, _, positions = name.partition(" ")
                points[result["row"], way][int(positions.partition("-")[2])].append(value)
    figure, axis = pyplot.subplots(figsize=(7.2, 3.6), layout="constrained")
    for key, (label, colour, style) in LINES.items():
        means = {position: statistics.mean(values) for position, values in sorted(points[key].items())}
        axis.plot(list(means), list(means.values()), style, color=colour, lw=1.8, label=label)
    axis.set(xscale="log", yscale="log", xlabel="position (bytes read)", ylabel="perplexity per byte")
    axis.set_xticks(ticks := [8, 64, 256, 1024, 4096], [f"{tick:,}" for tick in ticks])
    axis.set_yticks(ticks := [5, 6, 8, 12, 16], [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.axvline(64, color="#999999", lw=0.8, ls="--")
    axis.annotate(" training row", (64, axis.get_ylim()[1]), va="top", fontsize=8, color="#666666")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(0.36, 0.9))
    figure.savefig(out, dpi=150)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
