"""How a study stands, read from its files alone."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from titans_platform.config import RunConfig
from titans_platform.errors import UsageError
from titans_platform.files import is_locked, read_json
from titans_platform.loading import validate
from titans_platform.study.ledger import LEDGER, ledger_line
from titans_platform.study.progress import counts, look, running_line
from titans_platform.study.schedule import MANIFEST, STUDY, StudyRun
from titans_platform.study.search import Searched, read_search, search_record
from titans_platform.study.spec import Cell, Study, load_study
from titans_platform.text import clock


def studies_under(root: Path) -> list[str]:
    """The names of all studies that have run under a storage root."""
    return sorted(path.parent.name for path in (root / "studies").glob(f"*/{MANIFEST}"))


def read_status(study: str, scale: str, root: Path) -> dict[str, Any]:
    """Counts and, for every cell that is not done, what is known of it. Raises UsageError.

    The folder of a study that has run says all that is needed: the study's own file need not be at hand.
    """
    known = {label.casefold(): label for label in studies_under(root)}
    label = known.get(f"{study}-{scale}".casefold())
    if label is None:
        found = load_study(study)
        label = f"{found.name}-{found.scale_name(scale)}"
    return status_of(label, root)


def status_of(label: str, root: Path) -> dict[str, Any]:
    """The status of the study in a folder of ``root/studies``. Raises UsageError."""
    folder = root / "studies" / label
    manifest = read_json(folder / MANIFEST)
    if manifest is None:
        raise UsageError(f"{label}: nothing has run under {root}; start with titans sweep run")
    seen = look([_cell(entry) for entry in manifest["cells"]], root)
    search = _search(folder, manifest, root)
    # the lock of a driver on another machine may not be seen here; what its cells write is
    elsewhere = manifest.get("host", platform.node()) != platform.node()
    return {
        "study": label,
        "running": is_locked(folder / "lock") or (elsewhere and counts(seen)["running"] > 0),
        "host": manifest.get("host"),
        "counts": counts(seen),
        "overhead": read_json(folder / LEDGER),
        "search": search and search_record(search),
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


def _search(folder: Path, manifest: dict[str, Any], root: Path) -> Searched | None:
    study = read_json(folder / STUDY)
    if study is None:
        return None
    found = validate(Study, study, str(folder / STUDY))
    overrides = tuple(manifest.get("set", ()))
    return read_search(StudyRun(found, manifest["scale"], root, manifest["commit"], overrides))


def _cell(entry: dict[str, Any]) -> Cell:
    return Cell(entry["row"], entry["seed"], validate(RunConfig, entry["config"]), entry["cell"])


def print_status(status: dict[str, Any], console: Console) -> None:
    """Print the status as text."""

    def write(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    counted = ", ".join(f"{n} {state}" for state, n in status["counts"].items() if n)
    driver = "a sweep run is working on it" if status["running"] else "no sweep run is working on it"
    name, total = f"[bold]{status['study']}[/]", sum(status["counts"].values())
    console.print(f"{name}: {total} cells, {counted}; {driver}", highlight=False)
    grid = RichTable.grid(padding=(0, 2, 0, 0))
    for cell in status["cells"]:
        progress = cell["progress"] or {}
        if cell["state"] == "running":
            grid.add_row("running", *cell["shown"], f"{clock(progress.get('age'))} ago")
        elif cell["state"] == "interrupted":
            at = f"{progress.get('step', 0)}/{progress.get('steps', '?')}"
            grid.add_row("interrupted", cell["row"], f"seed {cell['seed']}", at)
    if grid.rows:
        console.print(grid)
    if search := status["search"]:
        write(search["line"])
        if search["set"]:
            write(f"Found: {search['set']}")
    if status["overhead"]:
        write(ledger_line(status["overhead"]))
    for cell in status["cells"]:
        if cell["state"] == "failed":
            write(f"failed  {cell['row']}, seed {cell['seed']} ({cell['cell']}): {cell['reason']}")
