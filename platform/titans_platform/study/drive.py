"""A study from the command line's point of view: plan it, show the plan, run what is missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table as RichTable

from titans_platform.config import RunConfig
from titans_platform.errors import TitansError
from titans_platform.files import write_json
from titans_platform.objectives import build_objective
from titans_platform.provenance import note_command
from titans_platform.runs.cost import sizes
from titans_platform.runs.reporter import send_left
from titans_platform.runs.spec import Machine
from titans_platform.study.cells import check_against_data, check_dry, named
from titans_platform.study.grid import Cell
from titans_platform.study.ledger import LEDGER, Marks, account, ledger_line
from titans_platform.study.plan import Estimate, Plan, StudyRun, estimate, make_plan
from titans_platform.study.schedule import SEARCH, only_driver, output_to, ray_for, run_cells, write_manifest
from titans_platform.study.search import FOUND, Searched, read_search, run_search, set_line, with_found
from titans_platform.study.status import View, cell_statuses, showing, showing_search
from titans_platform.text import NONE, clock, count, plural

Drawn = TypeVar("Drawn")


def dry_run(
    run: StudyRun, rerun_stale: bool, requested: int | None, console: Console, quiet: bool = False
) -> tuple[dict[str, Any], TitansError | None]:
    """Show what would run; nothing is written. The same as a dict, and what a run would be refused for."""
    refusal = None
    try:
        plan = make_plan(run, rerun_stale, requested)
        check_dry(run)
    except TitansError as error:
        # the rest is worth seeing all the same
        refusal = error
        plan = replace(make_plan(run, rerun_stale, 1, Machine(10**9, 10**9)), concurrency=0)
    guess = estimate(run, plan) if plan.concurrency else Estimate(None, str(refusal))
    search = read_search(run)
    record = {
        "study": run.study.name,
        "scale": run.scale_name,
        "cells": [_planned(run, plan, cell) for cell in run.cells],
        "to_run": len(plan.todo),
        "concurrency": plan.concurrency,
        "resources": run.resources.model_dump(),
        "estimate_seconds": _with_search(guess.seconds, run, plan, search),
        "estimate_basis": guess.basis,
        "search": _planned_search(search) if search else None,
        "refused": str(refusal) if refusal else None,
    }
    if not quiet:
        _print_plan(record, console)
    return record, refusal


def _planned(run: StudyRun, plan: Plan, cell: Cell) -> dict[str, Any]:
    """A cell with its size and its state."""
    return {
        "cell": cell.name,
        "row": cell.row,
        "seed": cell.seed,
        "parameters": sizes(cell.config).parameters,
        "tokens": cell.config.tokens,
        "state": "stale" if cell in plan.stale else cell.folder(run.root).state(),
    }


def _planned_search(found: Searched) -> dict[str, Any]:
    """What is left of a search, and what it may cost."""
    return {
        "trials": found.search.trials,
        "finished": found.finished,
        "rungs": found.milestones,
        "tokens_at_most": found.tokens_of_grid,
        "tokens_least": found.tokens_per_step * found.milestones[0] * found.search.trials,
        "space": found.search.model_dump(mode="json")["space"],
    }


def _with_search(seconds: float | None, run: StudyRun, plan: Plan, search: Searched | None) -> float | None:
    """The estimate with the search before the cells, whose rows it adds, too."""
    if seconds is None or search is None or search.over or not plan.todo:
        return seconds
    # each rung takes about as much as the first did
    of_a_run = search.search.rungs * search.milestones[0] / search.steps
    trials = (search.search.trials - search.finished) * of_a_run
    cells = len(plan.todo) + len({cell.seed for cell in run.cells})
    return seconds * (trials + cells) / len(plan.todo)


def _print_plan(record: dict[str, Any], console: Console) -> None:
    """The plan for a person."""
    grid = RichTable(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("cell", "row", "seed", "parameters", "tokens", "state"):
        grid.add_column(name, justify="right" if name in ("seed", "parameters", "tokens") else "left")
    for cell in record["cells"]:
        numbers = [str(cell["seed"]), count(cell["parameters"]), count(cell["tokens"])]
        grid.add_row(cell["cell"] or NONE, cell["row"], *numbers, cell["state"])
    console.print(grid)
    if not all(cell["cell"] for cell in record["cells"]):
        _say(console, "Cells get their names once the data are prepared; the run does that first.")
    if search := record["search"]:
        low, high = (count(search[key]) for key in ("tokens_least", "tokens_at_most"))
        _say(
            console,
            f"First a search: {search['trials']} trials ({search['finished']} finished), rungs after "
            f"{', '.join(map(str, search['rungs']))} steps, {low} to {high} tokens; what is best becomes a "
            "row, run with the same seeds.",
        )
    r = record["resources"]
    workers = _workers(r["workers"])
    _say(
        console,
        f"{record['to_run']} of {len(record['cells'])} cells to run, {record['concurrency']} at once, "
        f"each on {workers} with {r['cpus_per_worker']} CPU and {r['gpus_per_worker']:g} GPU.",
    )
    if not record["refused"]:
        guess = "unknown" if record["estimate_seconds"] is None else clock(record["estimate_seconds"])
        _say(console, f"Time: about {guess} (from {record['estimate_basis']}).")


def _workers(workers: int | list[int]) -> str:
    if isinstance(workers, int):
        return plural(workers, "worker") + (", each" if workers > 1 else "")
    return f"{workers[0]} to {workers[1]} workers, each"


def run_study(
    run: StudyRun,
    console: Console,
    draw: Callable[[StudyRun, bool], Drawn],
    *,
    rerun_stale: bool = False,
    concurrency: int | None = None,
    began: float | None = None,
) -> Drawn:
    """Prepare data, run what is missing, then return ``draw(run, whether anything ran)``.

    ``began`` is when the command did, for the account of where its time went.
    """
    marks = Marks(began or time.time())
    marks.mark("preparation")
    # what cannot be placed, or logged, is refused before time goes into data
    if make_plan(run, rerun_stale, concurrency).todo:
        from titans_platform.tracking import check_store

        check_store(run.root)
        send_left(run.root)
    with only_driver(run), ExitStack() as stack:
        run = _prepare(run, console)
        plan = make_plan(run, rerun_stale, concurrency)
        search = read_search(run)
        if search and not search.over:
            # one Ray for the search and for the cells after it
            stack.enter_context(ray_for(run, plan))
            with _resumable(run, console):
                run, search = _searched(run, search, plan, console)
            plan = make_plan(run, rerun_stale, concurrency)
            marks = Marks()
            marks.mark("preparation")
        write_manifest(run)
        note_command(run.folder)
        if search:
            write_json(run.folder / SEARCH, search.record())
        if plan.todo:
            with _resumable(run, console), showing(View(run, plan.todo, marks), console):
                run_cells(run, plan, marks)
        drawn = draw(run, bool(plan.todo))
        if search:
            _say(console, search.line)
        if search and search.best:
            _say(console, f"Found: {set_line(search.best.params)}")
        if plan.todo:
            ledger = account(marks, plan.todo, run.root, plan.concurrency)
            write_json(run.folder / LEDGER, ledger)
            _say(console, ledger_line(ledger))
            for line in send_left(run.root):
                _say(console, line)
        return drawn


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True)


def _searched(run: StudyRun, search: Searched, plan: Plan, console: Console) -> tuple[StudyRun, Searched]:
    """Run the study's search; the study with what it found as a row more, and how the search ended."""
    write_manifest(run)
    data = build_objective(run.cells[0].config).open(run.root).fingerprint
    with showing_search(run, search, console), output_to(run.folder / "search.log"):
        run_search(run, search, data, plan.concurrency)
    ended = read_search(run)
    assert ended is not None
    if ended.best is None:
        raise TitansError(f"{run.label}: no trial came to its end; {ended.line}")
    # the best trial's parameters, run with the seeds of the other rows
    run = with_found(run, ended)
    config = run.config(run.study.rows[-1])
    seeds = dict.fromkeys(cell.seed for cell in run.cells)
    new = tuple(Cell(FOUND, seed, config.model_copy(update={"seed": seed})) for seed in seeds)
    return named(replace(run, cells=run.cells + new, whole=run.whole + new)), ended


def _prepare(run: StudyRun, console: Console) -> StudyRun:
    with console.status("preparing data") as status:

        def report(label: str, documents: int, tokens: int, done: float | None) -> None:
            share = "" if done is None else f" ({done:.0%})"
            status.update(f"preparing data: {label}: {documents:,} documents, {tokens:,} tokens{share}")

        def once(config: RunConfig) -> Any:
            return build_objective(config).prepare(run.root, report)

        prepared = named(run, once)
        status.update("checking every row against the data")
        check_against_data(prepared)
        return prepared


@contextmanager
def _resumable(run: StudyRun, console: Console) -> Iterator[None]:
    """When interrupted, say what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        done = sum(item.state == "done" for item in cell_statuses(run.cells, run.root))
        _say(console, f"{done} of {len(run.cells)} cells are done and kept")
        raise
