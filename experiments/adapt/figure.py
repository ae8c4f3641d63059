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
ALONE, KEPT = "LoRA 16", "LoRA 16, tuned with kept tokens"
"""Models of context.csv; the memory alone was measured at both lengths in its first training."""
BARS = (
    ("window of 256", KEPT, "window", "#c98b3f"),
    ("window of as many bytes", KEPT, "larger window", "#7f7f7f"),
    ("memory", ALONE, "memory", "#9dbad5"),
    ("memory and kept tokens", KEPT, "memory", "#2f6690"),
)


def main() -> None:
    """Draw one panel for each length of rows."""
    with (FOLDER / "context.csv").open(encoding="utf-8") as file:
        records = list(csv.DictReader(file))
    counts = sorted({record["rows"] for record in records if record["model"] == KEPT}, key=int, reverse=True)
    size = 4.6 * len(counts), 3.2
    figure, panels = pyplot.subplots(1, len(counts), figsize=size, sharey=True, squeeze=False)
    for panel, count in zip(panels[0], counts, strict=True):
        for i, (label, model, mode, colour) in enumerate(BARS):
            own = [x for x in records if (x["model"], x["rows"]) == (model, count)]
            parts = own[1:-1]  # beyond the window, without the mean of all
            lost = [float(part[mode]) - float(part["full"]) for part in parts]
            panel.bar([x + 0.2 * (i - 1.5) for x in range(len(parts))], lost, 0.2, label=label, color=colour)
            panel.set_xticks(range(len(parts)), [part["end"] for part in parts])
            panel.set_title(f"{count} rows of {own[-1]['end']} tokens", fontsize=10)
        panel.set_xlabel("tokens of a row, up to")
    panels[0][0].set_ylabel("nats a token above full attention")
    panels[0][0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(FOLDER / "context.png", dpi=110)


if __name__ == "__main__":
    main()
