"""Peak memory of each worker after each of its cells, and where the time of the cells went.

    python tools/rss.py ROOT [STUDY]

ROOT is a storage root; STUDY keeps the cells of one study (its name, without the scale).
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from pathlib import Path

from titans_platform.files import read_json

MIB = 2**20


def main(root: Path, study: str = "") -> None:
    """Print the tables."""
    workers: dict[int, list[tuple[float, float]]] = defaultdict(list)
    seconds: Counter[str] = Counter()
    count = 0
    for folder in (root / "cells").iterdir():
        result, span, state = (read_json(folder / f"{name}.json") for name in ("result", "time", "progress"))
        if not result or not span or not state or study not in ("", result["study"]):
            continue
        count += 1
        seconds.update(span["seconds"])
        seconds["all"] += span["ended"] - span["began"]
        if peak := result.get("peak_rss_bytes"):
            workers[state["pid"]].append((span["ended"], peak / MIB))
    print("| worker | cells | first, MiB | third | last | highest |\n|--:|--:|--:|--:|--:|--:|")
    for pid, cells in sorted(workers.items(), key=lambda item: min(item[1])):
        peaks = [peak for _, peak in sorted(cells)]
        chosen = (peaks[0], peaks[min(2, len(peaks) - 1)], peaks[-1], max(peaks))
        print(f"| {pid} | {len(peaks)} | " + " | ".join(f"{peak:,.0f}" for peak in chosen) + " |")
    for pid, cells in sorted(workers.items(), key=lambda item: min(item[1])):
        print(f"\n{pid}: " + ", ".join(f"{peak:,.0f}" for _, peak in sorted(cells)))
    parts = ", ".join(f"{name} {total / count:.2f}" for name, total in seconds.most_common()) if count else ""
    print(f"\nSeconds a cell ({count} cells): {parts}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3])
