"""`run_plan`: prepare a study's data, run its search and its missing cells."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any, Protocol

from titans_platform.config import RunConfig
from titans_platform.errors import TitansError
from titans_platform.objectives import build_objective
from titans_platform.runs.ray_session import ray_session
from titans_platform.runs.reporter import send_left
from titans_platform.study.grid import chosen_cells
from titans_platform.study.plan import Plan, check_with_data, name_cells
from titans_platform.study.schedule import run_cells, run_search
from titans_platform.study.search import FOUND, SearchState, set_line
from titans_platform.study.timings import Stopwatch, timings, timings_line
from titans_platform.study.tracker import tracked


class Display(Protocol):
    """Displays the progress of a study."""

    def preparing(self) -> AbstractContextManager[Callable[[str], None]]:
        """Display while data are prepared; the callable takes a line."""
        ...

    def searching(self, plan: Plan, state: SearchState) -> AbstractContextManager[None]:
        """Display while a search runs."""
        ...

    def running(self, plan: Plan, stopwatch: Stopwatch) -> AbstractContextManager[None]:
        """Display while cells run."""
        ...


def run_plan(plan: Plan, display: Display, stopwatch: Stopwatch) -> Plan:
    """Prepare the data, run the search, then the cells that have no result.

    The study's lock must be held. A cell that fails is recorded and does not stop the others. Returns the
    plan that was run: its cells have names, and the best trial of the search is a row. Raises
    UsageError, ClusterError, StorageError.
    """
    stopwatch.start("preparation")
    plan = _prepare(plan, display)
    search = plan.study.search
    with ExitStack() as stack:
        if search and not search.over:
            plan = _search(plan, search, display, stack)
            stopwatch.reset("preparation")
        _write_record(plan)
        if plan.todo:
            with display.running(plan, stopwatch):
                _run_cells(plan, stopwatch)
    return plan


def summary(plan: Plan, stopwatch: Stopwatch) -> list[str]:
    """Summary lines of a finished plan: search result, timings, and what is missing in MLflow."""
    lines, search = [], plan.study.search
    if search:
        lines.append(search.line)
    if search and search.best:
        lines.append(f"Found: {set_line(search.best.params)}")
    if plan.todo:
        record = timings(stopwatch, plan.todo, plan.study.root, plan.concurrency)
        plan.study.folder.write_timings(record)
        lines += [timings_line(record), *send_left(plan.study.root)]
    return lines


def _prepare(plan: Plan, display: Display) -> Plan:
    """Prepare the data of all requested cells, name the cells, and check them against the data."""
    root = plan.study.root
    with display.preparing() as show:

        def progress(label: str, documents: int, tokens: int, done: float | None) -> None:
            share = "" if done is None else f" ({done:.0%})"
            show(f"preparing data: {label}: {documents:,} documents, {tokens:,} tokens{share}")

        def prepare(config: RunConfig) -> Any:
            return build_objective(config).prepare(root, progress)

        study = name_cells(plan.study, prepare)
        show("checking every row against the data")
        check_with_data(study)
    return replace(plan, study=study)


def _search(plan: Plan, search: SearchState, display: Display, stack: ExitStack) -> Plan:
    """Run the search. Returns the plan with its best trial as another row, with the seeds of the others."""
    _write_record(plan)
    # stays open for the cells that run after the search
    stack.enter_context(ray_session(plan.cpus, plan.gpus))
    with (
        display.searching(plan, search),
        plan.study.folder.output("search.log"),
        tracked(plan.study) as tracker,
    ):
        run_search(plan, tracker)
    ended = search.read()
    if ended.best is None:
        raise TitansError(f"{plan.study.label}: no trial was trained to the end; {ended.line}")
    study = replace(plan.study, search=ended).with_found()
    seeds = [cell.seed for cell in study.cells]
    new = tuple(chosen_cells({FOUND: study.config(study.study.rows[-1])}, (), seeds))
    return replace(plan, study=name_cells(replace(study, cells=study.cells + new, whole=study.whole + new)))


def _write_record(plan: Plan) -> None:
    study = plan.study
    study.folder.write_record(study.record(), study.study.model_dump(mode="json"))
    if study.search:
        study.folder.write_search(study.search.record())


def _run_cells(plan: Plan, stopwatch: Stopwatch) -> None:
    study = plan.study
    for cell in plan.todo:
        cell.folder(study.root).forget_failure()
    stopwatch.start("MLflow runs")
    with study.folder.output("ray.log"), tracked(study) as tracker:
        specs = [tracker.spec(cell, f"{cell.row} · seed {cell.seed}", study.rows) for cell in plan.todo]
        for cell in plan.todo:
            if cell in plan.stale:
                cell.folder(study.root).set_aside()
        stopwatch.start("start of Ray")
        # reuses the session that the search opened
        with ray_session(plan.cpus, plan.gpus):
            stopwatch.start("cells")
            run_cells(plan, specs)
            stopwatch.start("end of Ray")
        stopwatch.start("report")
