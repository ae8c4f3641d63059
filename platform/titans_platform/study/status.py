"""How a study stands, read from its files alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from titans_platform.config import RunConfig
from titans_platform.errors import UsageError
from titans_platform.loading import validate
from titans_platform.study.cells import is_locked, read_json
from titans_platform.study.progress import clock, counts, look, running_line
from titans_platform.study.spec import Cell, load_study


def read_status(study: str, scale: str, root: Path) -> dict[str, Any]:
    """Counts and, for every cell that is not done, what is known of it. Raises UsageError."""
    found = load_study(study)
    label = f"{found.name}-{found.scale_name(scale)}"
    folder = root / "studies" / label
    manifest = read_json(folder / "cells.json")
    if manifest is None:
        raise UsageError(f"{label}: nothing has run under {root}; start with titans sweep run")
    seen = look([_cell(entry) for entry in manifest["cells"]], root)
    return {
        "study": label,
        "running": is_locked(folder / "lock"),
        "counts": counts(seen),
        "cells": [
            {
                "cell": item.cell.name,
                "row": item.cell.row,
                "seed": item.cell.seed,
                "state": item.state,
                "reason": item.reason or None,
                "progress": item.progress or None,
                "shown": running_line(item) if item.state == "running" else None,
            }
            for item in seen
        ],
    }


def _cell(entry: dict[str, Any]) -> Cell:
    return Cell(entry["row"], entry["seed"], validate(RunConfig, entry["config"]), entry["cell"])


def print_status(status: dict[str, Any], console: Console) -> None:
    """The status for a person."""
    total = sum(status["counts"].values())
    counted = ", ".join(f"{n} {state}" for state, n in status["counts"].items() if n)
    driver = "a sweep run is working on it" if status["running"] else "no sweep run is working on it"
    console.print(f"[bold]{status['study']}[/]: {total} cells, {counted}; {driver}", highlight=False)
    grid = RichTable.grid(padding=(0, 2, 0, 0))
    for cell in status["cells"]:
        if cell["state"] == "running":
            age = f"{clock((cell['progress'] or {}).get('age'))} ago"
            grid.add_row("running", *cell["shown"], age)
        elif cell["state"] == "interrupted":
            at = f"{cell['progress'].get('step', 0)}/{cell['progress'].get('steps', '?')}"
            grid.add_row("interrupted", cell["row"], f"seed {cell['seed']}", at)
    console.print(grid)
    for cell in status["cells"]:
        if cell["state"] == "failed":
            line = f"failed  {cell['row']}, seed {cell['seed']} ({cell['cell']}): {cell['reason']}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
