"""How a study stands, and what a run of it would do, read from its files alone."""

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
from titans_platform.runs.check import sizes
from titans_platform.study.ledger import LEDGER, ledger_line
from titans_platform.study.opened import Opened
from titans_platform.study.plan import Plan
from titans_platform.study.progress import counts, look, running_line
from titans_platform.study.schedule import MANIFEST, STUDY, StudyRun
from titans_platform.study.search import Searched, read_search, search_record
from titans_platform.study.spec import Cell, Study, load_study
from titans_platform.text import NONE, clock, count, plural


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
    cells = [
        Cell(entry["row"], entry["seed"], validate(RunConfig, entry["config"]), entry["cell"])
        for entry in manifest["cells"]
    ]
    seen = look(cells, root)
    # the lock of a driver on another machine may not be seen here; what its cells write is
    elsewhere = manifest.get("host", platform.node()) != platform.node()
    return {
        "study": label,
        "running": is_locked(folder / "lock") or (elsewhere and counts(seen)["running"] > 0),
        "host": manifest.get("host"),
        "counts": counts(seen),
        "overhead": read_json(folder / LEDGER),
        "search": _search(folder, manifest, root),
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


def _search(folder: Path, manifest: dict[str, Any], root: Path) -> dict[str, Any] | None:
    study = read_json(folder / STUDY)
    if study is None:
        return None
    found = validate(Study, study, str(folder / STUDY))
    overrides = tuple(manifest.get("set", ()))
    search = read_search(StudyRun(found, manifest["scale"], root, manifest["commit"], overrides))
    return search_record(search) if search else None


def print_status(status: dict[str, Any], console: Console) -> None:
    """Print the status as text."""
    counted = ", ".join(f"{n} {state}" for state, n in status["counts"].items() if n)
    driver = "a sweep run is working on it" if status["running"] else "no sweep run is working on it"
    name, total = f"[bold]{status['study']}[/]", sum(status["counts"].values())
    console.print(f"{name}: {total} cells, {counted}; {driver}", highlight=False)
    grid, lines = RichTable.grid(padding=(0, 2, 0, 0)), []
    if search := status["search"]:
        lines += [search["line"], *([f"Found: {search['set']}"] if search["set"] else [])]
    if status["overhead"]:
        lines.append(ledger_line(status["overhead"]))
    for cell in status["cells"]:
        progress = cell["progress"] or {}
        if cell["state"] == "running":
            grid.add_row("running", *cell["shown"], f"{clock(progress.get('age'))} ago")
        elif cell["state"] == "interrupted":
            at = f"{progress.get('step', 0)}/{progress.get('steps', '?')}"
            grid.add_row("interrupted", cell["row"], f"seed {cell['seed']}", at)
        elif cell["state"] == "failed":
            lines.append(f"failed  {cell['row']}, seed {cell['seed']} ({cell['cell']}): {cell['reason']}")
    if grid.rows:
        console.print(grid)
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def planned_search(found: Searched) -> dict[str, Any]:
    """What is left of a search, and what it may cost."""
    steps = found.search.milestones(found.steps)
    return {
        "trials": found.search.trials,
        "finished": sum(trial.state in ("done", "stopped") for trial in found.trials),
        "rungs": steps,
        "tokens_at_most": found.tokens_of_grid,
        "tokens_least": found.tokens_per_step * steps[0] * found.search.trials,
        "space": found.search.model_dump(mode="json")["space"],
    }


def planned(opened: Opened, plan: Plan, cell: Cell) -> dict[str, Any]:
    """A cell with its size and its state."""
    state = cell.folder(opened.run.root).state() if cell.name else "missing"
    return {
        "cell": cell.name,
        "row": cell.row,
        "seed": cell.seed,
        "parameters": sizes(cell.config).parameters,
        "tokens": cell.config.tokens,
        "state": "stale" if cell in plan.stale else state,
    }


def print_plan(record: dict[str, Any], opened: Opened, console: Console) -> None:
    """The plan for a person."""
    grid = RichTable(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("cell", "row", "seed", "parameters", "tokens", "state"):
        grid.add_column(name, justify="right" if name in ("seed", "parameters", "tokens") else "left")
    for cell in record["cells"]:
        numbers = [str(cell["seed"]), count(cell["parameters"]), count(cell["tokens"])]
        grid.add_row(cell["cell"] or NONE, cell["row"], *numbers, cell["state"])
    console.print(grid)
    if not opened.is_named:
        console.print("Cells get their names once the data are prepared; the run does that first.")
    if search := record["search"]:
        low, high = (count(search[key]) for key in ("tokens_least", "tokens_at_most"))
        console.print(
            f"First a search: {search['trials']} trials ({search['finished']} finished), rungs after "
            f"{', '.join(map(str, search['rungs']))} steps, {low} to {high} tokens; what is best becomes a "
            "row, run with the same seeds.",
            highlight=False,
            soft_wrap=True,
        )
    r = record["resources"]
    workers = plural(r["workers"], "worker") + (", each" if r["workers"] > 1 else "")
    console.print(
        f"{record['to_run']} of {len(record['cells'])} cells to run, {record['concurrency']} at once, "
        f"each on {workers} with {r['cpus_per_worker']} CPU and {r['gpus_per_worker']:g} GPU.",
        highlight=False,
    )
    if not record["refused"]:
        guess = "unknown" if record["estimate_seconds"] is None else clock(record["estimate_seconds"])
        console.print(f"Time: about {guess} (from {record['estimate_basis']}).", highlight=False)
