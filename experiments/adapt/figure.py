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
BARS = (
    ("window of 256", "delta-kept", "window", "#c98b3f"),
    ("window of as many bytes", "delta-kept", "larger window", "#7f7f7f"),
    ("memory", "delta", "memory", "#9dbad5"),
    ("kept tokens", "kept", "memory", "#5f93bd"),
    ("memory and kept tokens", "delta-kept", "memory", "#1f4e73"),
)
"""Labels, arms of arms.py, columns of context.csv and colours."""


def main() -> None:
    """Draw the arms on rows of 8,192 tokens, by position."""
    with (FOLDER / "context.csv").open(encoding="utf-8") as file:
        records = list(csv.DictReader(file))
    figure, panel = pyplot.subplots(figsize=(7.5, 3.4))
    for i, (label, arm, mode, colour) in enumerate(BARS):
        lines = [x for x in records if x["model"] == f"{arm}-10-long"]
        parts = lines[1:-1]  # beyond the window, without the mean of all
        lost = [float(part[mode]) - float(part["full"]) for part in parts]
        panel.bar([x + 0.16 * (i - 2) for x in range(len(parts))], lost, 0.16, label=label, color=colour)
        panel.set_xticks(range(len(parts)), [f"{int(p['start']):,} to {int(p['end']):,}" for p in parts])
        panel.set_xlabel(f"tokens of a row, {lines[0]['rows']} rows")
    panel.set_ylabel("nats a token above full attention")
    panel.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(FOLDER / "context.png", dpi=110)


if __name__ == "__main__":
    main()
