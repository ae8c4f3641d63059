"""A study from the command line's point of view: plan it, show the plan, run what is missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from rich.console import Console

from titans_platform.config import RunConfig
from titans_platform.errors import TitansError
from titans_platform.files import write_json
from titans_platform.objectives import build_objective
from titans_platform.provenance import note_command
from titans_platform.runs.ray_session import available
from titans_platform.runs.resources import Machine
from titans_platform.study.ledger import LEDGER, Marks, account, ledger_line
from titans_platform.study.opened import Opened, check_against_data, check_dry, named, with_found
from titans_platform.study.plan import Estimate, Plan, estimate, make_plan
from titans_platform.study.progress import look
from titans_platform.study.schedule import (
    SEARCH,
    StudyRun,
    only_driver,
    output_to,
    ray_for,
    run_cells,
    write_manifest,
)
from titans_platform.study.search import (
    Searched,
    followed,
    read_search,
    run_search,
    search_line,
    search_record,
    set_line,
)
from titans_platform.study.spec import Cell, resolve
from titans_platform.study.status import planned, planned_search, print_plan
from titans_platform.study.trial import FOUND, trial_row

Drawn = TypeVar("Drawn")


def plan_study(
    opened: Opened, rerun_stale: bool, requested: int | None, machine: Machine | None = None
) -> Plan:
    """What is to do on ``machine``, where None on what there is. UsageError for what cannot be placed."""
    run = opened.run
    return make_plan(
        opened.cells,
        run.root,
        run.commit,
        resources=run.resources,
        machine=machine or available(run.resources),
        requested=requested,
        rerun_stale=rerun_stale,
    )


def dry_run(
    opened: Opened, rerun_stale: bool, requested: int | None, console: Console, quiet: bool = False
) -> tuple[dict[str, Any], TitansError | None]:
    """Show what would run; nothing is written. The same as a dict, and what a run would be refused for."""
    refusal = None
    try:
        plan = plan_study(opened, rerun_stale, requested)
        check_dry(opened)
    except TitansError as error:
        # the rest is worth seeing all the same
        refusal = error
        plan = replace(plan_study(opened, rerun_stale, 1, Machine(10**9, 10**9)), concurrency=0)
    guess = estimate(plan, opened.run.root) if plan.concurrency else Estimate(None, str(refusal))
    search = read_search(opened.run)
    record = {
        "study": opened.run.study.name,
        "scale": opened.run.scale_name,
        "cells": [planned(opened, plan, cell) for cell in opened.cells],
        "to_run": len(plan.todo),
        "concurrency": plan.concurrency,
        "resources": plan.resources.model_dump(),
        "estimate_seconds": _with_search(guess.seconds, opened, plan, search),
        "estimate_basis": guess.basis,
        "search": planned_search(search) if search else None,
        "refused": str(refusal) if refusal else None,
    }
    if not quiet:
        print_plan(record, opened, console)
    return record, refusal


def _with_search(seconds: float | None, opened: Opened, plan: Plan, search: Searched | None) -> float | None:
    """The estimate with the search before the cells, whose rows it adds, too."""
    if seconds is None or search is None or search.over or not plan.todo:
        return seconds
    finished = sum(trial.state in ("done", "stopped") for trial in search.trials)
    # each rung takes about as much as the first did
    first = search.search.milestones(search.steps)[0]
    trials = (search.search.trials - finished) * search.search.rungs * first / search.steps
    cells = len(plan.todo) + len({cell.seed for cell in opened.cells})
    return seconds * (trials + cells) / len(plan.todo)


def run_study(
    opened: Opened,
    console: Console,
    draw: Callable[[Opened, bool], Drawn],
    *,
    rerun_stale: bool = False,
    concurrency: int | None = None,
    began: float | None = None,
) -> Drawn:
    """Prepare data, run what is missing, then return ``draw(opened, whether anything ran)``.

    ``began`` is when the command did, for the account of where its time went.
    """
    marks = Marks(began or time.time())
    marks.mark("preparation")
    run = opened.run
    # what cannot be placed, or logged, is refused before time goes into data
    if plan_study(opened, rerun_stale, concurrency).todo:
        from titans_platform.tracking import check_store

        check_store(run.root)
    with only_driver(run), ExitStack() as stack:
        opened = _prepare(opened, console)
        plan = plan_study(opened, rerun_stale, concurrency)
        search = read_search(run)
        if search and not search.over:
            # one Ray for the search and for the cells after it
            stack.enter_context(ray_for(plan))
            with _resumable(opened, console):
                opened, search = _searched(opened, search, plan, console)
            plan = plan_study(opened, rerun_stale, concurrency)
            marks = Marks()
            marks.mark("preparation")
        write_manifest(opened.run, opened.whole)
        note_command(run.folder)
        if search:
            write_json(run.folder / SEARCH, search_record(search))
        if plan.todo:
            with _resumable(opened, console):
                run_cells(opened.run, plan, console, marks)
        drawn = draw(opened, bool(plan.todo))
        if search:
            _print_search(search, console)
        if plan.todo:
            _close_ledger(opened.run, plan, marks, console)
        return drawn


def _searched(opened: Opened, search: Searched, plan: Plan, console: Console) -> tuple[Opened, Searched]:
    """Run the study's search; the study with what it found as a row more, and how the search ended."""
    run = opened.run
    write_manifest(run, opened.whole)
    rungs = "/".join(map(str, search.search.milestones(search.steps)))
    label = f"searching: {search.search.trials} trials, rungs at {rungs} steps"
    with console.status(label) as status, output_to(run.folder / "search.log"):

        def report(line: str) -> None:
            status.update(line)
            if not console.is_terminal:
                console.print(line, highlight=False, soft_wrap=True)

        with followed(run, report):
            run_search(run, search.search, _data_fingerprint(opened), plan.concurrency)
    ended = read_search(run)
    assert ended is not None
    return _with_found_row(opened, ended), ended


def _data_fingerprint(opened: Opened) -> str:
    return build_objective(opened.cells[0].config).open(opened.run.root).fingerprint


def _with_found_row(opened: Opened, found: Searched) -> Opened:
    """The best trial's parameters, run with the seeds of the other rows."""
    if found.best is None:
        raise TitansError(f"{opened.run.label}: no trial came to its end; {search_line(found)}")
    run = with_found(opened.run, found)
    config = resolve(run.study, run.scale_name, trial_row(run, found.best.params), run.overrides)
    seeds = dict.fromkeys(cell.seed for cell in opened.cells)
    new = tuple(Cell(FOUND, seed, config.model_copy(update={"seed": seed})) for seed in seeds)
    return named(replace(opened, run=run, cells=opened.cells + new, whole=opened.whole + new))


def _print_search(found: Searched, console: Console) -> None:
    console.print(search_line(found), highlight=False, soft_wrap=True)
    if found.best:
        console.print(f"Found: {set_line(found.best.params)}", highlight=False, soft_wrap=True)


def _close_ledger(run: StudyRun, plan: Plan, marks: Marks, console: Console) -> None:
    record = account(marks, plan.todo, run.root, plan.concurrency)
    write_json(run.folder / LEDGER, record)
    console.print(ledger_line(record), highlight=False, soft_wrap=True)


def _prepare(opened: Opened, console: Console) -> Opened:
    with console.status("preparing data") as status:

        def report(label: str, documents: int, tokens: int, done: float | None) -> None:
            share = "" if done is None else f" ({done:.0%})"
            status.update(f"preparing data: {label}: {documents:,} documents, {tokens:,} tokens{share}")

        def once(config: RunConfig) -> Any:
            return build_objective(config).prepare(opened.run.root, report)

        prepared = named(opened, once)
        status.update("checking every row against the data")
        check_against_data(prepared)
        return prepared


@contextmanager
def _resumable(opened: Opened, console: Console) -> Iterator[None]:
    """When interrupted, say what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        done = sum(item.state == "done" for item in look(opened.cells, opened.run.root))
        console.print(f"{done} of {len(opened.cells)} cells are done and kept", highlight=False)
        raise
