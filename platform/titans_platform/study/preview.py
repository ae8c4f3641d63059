"""What a run of a study would do, for `--dry-run`."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from titans_platform.runs.check import sizes
from titans_platform.study.opened import Opened
from titans_platform.study.plan import Plan
from titans_platform.study.search import Searched
from titans_platform.study.spec import Cell
from titans_platform.text import NONE, clock, count, plural


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
    if cell in plan.stale:
        state = "stale"
    return {
        "cell": cell.name,
        "row": cell.row,
        "seed": cell.seed,
        "parameters": sizes(cell.config).parameters,
        "tokens": cell.config.tokens,
        "state": state,
    }


def print_plan(record: dict[str, Any], opened: Opened, console: Console) -> None:
    """Print the plan as text."""
    grid = RichTable(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("cell", "row", "seed", "parameters", "tokens", "state"):
        grid.add_column(name, justify="right" if name in ("seed", "parameters", "tokens") else "left")
    for cell in record["cells"]:
        sizes = [count(cell["parameters"]), count(cell["tokens"])]
        grid.add_row(cell["cell"] or NONE, cell["row"], str(cell["seed"]), *sizes, cell["state"])
    console.print(grid)
    if not opened.is_named:
        console.print("Cells get their names once the data are prepared; the run does that first.")
    if search := record["search"]:
        console.print(_search_text(search), highlight=False, soft_wrap=True)
    r = record["resources"]
    workers = plural(r["workers"], "worker") + (", each" if r["workers"] > 1 else "")
    console.print(
        f"{record['to_run']} of {len(record['cells'])} cells to run, {record['concurrency']} at once, "
        f"each on {workers} with {r['cpus_per_worker']} CPU and {r['gpus_per_worker']:g} GPU.",
        highlight=False,
    )
    if record["refused"]:
        return
    guess = "unknown" if record["estimate_seconds"] is None else clock(record["estimate_seconds"])
    console.print(f"Time: about {guess} (from {record['estimate_basis']}).", highlight=False)


def _search_text(search: dict[str, Any]) -> str:
    low, high = (count(search[key]) for key in ("tokens_least", "tokens_at_most"))
    rungs = ", ".join(map(str, search["rungs"]))
    return (
        f"First a search: {search['trials']} trials ({search['finished']} finished), rungs after {rungs} "
        f"steps, {low} to {high} tokens; what is best becomes a row, run with the same seeds."
    )
