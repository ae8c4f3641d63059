"""Draw what the window loses and what the memory brings back: `python experiments/adapt/figure.py`.

Reads context.csv, writes context.png.
"""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

FOLDER = Path(__file__).parent
COLOURS = ("#b0413e", "#c98b3f", "#7f7f7f", "#2f6690")


def main() -> None:
    """Draw one panel for each model and length."""
    with (FOLDER / "context.csv").open(encoding="utf-8") as file:
        records = list(csv.DictReader(file))
    runs: list[list[dict[str, str]]] = []
    for record in records:
        if record["start"] == "0":
            runs.append([])
        runs[-1].append(record)
    figure, panels = pyplot.subplots(1, len(runs), figsize=(4.6 * len(runs), 3.2), sharey=True, squeeze=False)
    for panel, run in zip(panels[0], runs, strict=True):
        parts = run[1:-1]  # beyond the window, without the mean of all
        modes = [mode for mode in parts[0] if "window" in mode] + ["memory"]
        for i, mode in enumerate(modes):
            lost = [float(part[mode]) - float(part["full"]) for part in parts]
            places = [x + 0.2 * (i - 1.5) for x in range(len(parts))]
            panel.bar(places, lost, 0.2, label=mode, color=COLOURS[i])
        panel.set_xticks(range(len(parts)), [part["end"] for part in parts])
        panel.set_title(f"{run[0]['model']}, {run[0]['rows']} rows", fontsize=10)
        panel.set_xlabel("tokens of a row, up to")
    panels[0][0].set_ylabel("nats a token above full attention")
    panels[0][0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(FOLDER / "context.png", dpi=110)


if __name__ == "__main__":
    main()
