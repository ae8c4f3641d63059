"""A study from the command line's point of view: open, plan, run, report."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from rich.console import Console

from titans_platform.config import DataConfig
from titans_platform.errors import TitansError, UsageError
from titans_platform.files import write_json
from titans_platform.provenance import note_command
from titans_platform.report.publish import make as report_study
from titans_platform.report.table import Table
from titans_platform.study.ledger import LEDGER, Marks, account, ledger_line
from titans_platform.study.opened import Opened, check, named, open_study, with_found
from titans_platform.study.plan import (
    Estimate,
    Machine,
    Plan,
    estimate,
    make_plan,
)
from titans_platform.study.preview import planned, planned_search, print_plan
from titans_platform.study.progress import look
from titans_platform.study.run import (
    SEARCH,
    StudyRun,
    aside,
    execute,
    only_driver,
    ray_of,
    write_manifest,
)
from titans_platform.study.search import (
    FOUND,
    Searched,
    execute_search,
    followed,
    read_search,
    search_line,
    search_record,
    set_line,
    trial_row,
)
from titans_platform.study.spec import Cell, resolve

__all__ = ["check", "dry_run", "open_study", "plan_study", "report_study", "run_study"]


def plan_study(opened: Opened, rerun_stale: bool, asked: int | None) -> Plan:
    """What is to do; UsageError for what cannot be placed: on this machine, inside a job on its cluster."""
    from titans_platform.runs.joined import machine

    resources = opened.run.study.scales[opened.run.scale_name].resources
    return make_plan(
        opened.cells,
        opened.run.root,
        opened.run.commit,
        resources=resources,
        machine=machine(resources),
        asked=asked,
        rerun_stale=rerun_stale,
    )


def dry_run(
    opened: Opened, rerun_stale: bool, asked: int | None, console: Console, quiet: bool = False
) -> tuple[dict[str, Any], TitansError | None]:
    """Show what would run; nothing is written. The same as a dict, and what a run would be refused for."""
    refusal = None
    try:
        plan = plan_study(opened, rerun_stale, asked)
    except TitansError as error:
        # the rest is worth seeing all the same
        refusal, plan = error, _unplaced(opened, rerun_stale)
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


def _unplaced(opened: Opened, rerun_stale: bool) -> Plan:
    """The plan without a place for it."""
    resources = opened.run.study.scales[opened.run.scale_name].resources
    everywhere = Machine(10**9, 10**9)
    run = opened.run
    plan = make_plan(
        opened.cells,
        run.root,
        run.commit,
        resources=resources,
        machine=everywhere,
        asked=1,
        rerun_stale=rerun_stale,
    )
    return replace(plan, concurrency=0)


def run_study(
    opened: Opened,
    console: Console,
    *,
    rerun_stale: bool = False,
    concurrency: int | None = None,
    began: float | None = None,
) -> Table:
    """Prepare data, run what is missing, draw the views. The whole table, complete or not.

    ``began`` is when the command did, for the account of where its time went.
    """
    marks = Marks(began or time.time())
    marks.mark("preparation")
    # what cannot be placed, or logged, is refused before time goes into data
    if plan_study(opened, rerun_stale, concurrency).todo:
        from titans_platform.tracking import check_store

        check_store(opened.run.root)
    with only_driver(opened.run), ExitStack() as stack:
        opened = _prepare(opened, console)
        plan = plan_study(opened, rerun_stale, concurrency)
        if searching(opened.run):
            # one Ray for the search and for the cells after it
            stack.enter_context(ray_of(plan))
            with _resumable(opened, console):
                opened = _searched(opened, plan, console)
            plan = plan_study(opened, rerun_stale, concurrency)
            marks = Marks()
            marks.mark("preparation")
        write_manifest(opened.run, opened.whole)
        note_command(opened.run.folder)
        if found := read_search(opened.run):
            write_json(opened.run.folder / SEARCH, search_record(found))
        if plan.todo:
            with _resumable(opened, console):
                execute(opened.run, plan, console, marks)
        table = report_study(opened, console, link=bool(plan.todo))
        if found:
            _print_search(found, console)
        if plan.todo:
            _close_ledger(opened.run, plan, marks, console)
        return replace(table, asked=tuple(cell.name for cell in opened.cells))


def searching(run: StudyRun) -> bool:
    """Whether the study has a search that is not over."""
    found = read_search(run)
    return found is not None and not found.over


def _searched(opened: Opened, plan: Plan, console: Console) -> Opened:
    """Run the study's search; the study with what it found as a row more."""
    found = read_search(opened.run)
    assert found is not None
    write_manifest(opened.run, opened.whole)
    tokens = f"{found.search.trials} trials, rungs at {_steps(found)} steps"
    with console.status(f"searching: {tokens}") as status, aside(opened.run.folder / "search.log"):

        def tell(line: str) -> None:
            status.update(line)
            if not console.is_terminal:
                console.print(line, highlight=False, soft_wrap=True)

        data = _data_fingerprint(opened)
        with followed(opened.run, tell):
            execute_search(opened.run, found.search, data, plan.resources, plan.concurrency)
    return _with_found_row(opened)


def _steps(found: Searched) -> str:
    return "/".join(map(str, found.search.milestones(found.steps)))


def _data_fingerprint(opened: Opened) -> str:
    from titans_platform.data import open_prepared

    return open_prepared(opened.cells[0].config.data, opened.run.root).fingerprint


def _with_found_row(opened: Opened) -> Opened:
    """The best trial's parameters, run with the seeds that were asked for."""
    found = read_search(opened.run)
    assert found is not None
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
    from titans_platform.data import prepare

    with console.status("preparing data") as status:

        def told(label: str, documents: int, tokens: int, done: float | None) -> None:
            share = "" if done is None else f" ({done:.0%})"
            status.update(f"preparing data: {label}: {documents:,} documents, {tokens:,} tokens{share}")

        def once(data: DataConfig) -> Any:
            return prepare(data, opened.run.root, progress=told)

        prepared = named(opened, once)
        status.update("checking every row against the data")
        _check_against_data(prepared)
        return prepared


def _check_against_data(opened: Opened) -> None:
    """What a cell would find out on a worker, found here: one line, and no cell is begun."""
    from titans_platform.data import open_prepared
    from titans_platform.runs.execute import check as check_run

    workers = opened.run.study.scales[opened.run.scale_name].resources.workers
    for row, config in {cell.row: cell.config for cell in opened.cells}.items():
        try:
            check_run(config, open_prepared(config.data, opened.run.root), workers)
        except UsageError as error:
            raise UsageError(f"row {row!r}: {error}") from None


@contextmanager
def _resumable(opened: Opened, console: Console) -> Iterator[None]:
    """Say, when interrupted, what is safe and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        done = sum(item.state == "done" for item in look(opened.cells, opened.run.root))
        console.print(
            f"{done} of {len(opened.cells)} cells are done and kept",
            highlight=False,
        )
        raise
