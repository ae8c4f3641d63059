"""Live displays of a study, a search or one run while they run.

Without a terminal the displays print periodic lines.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.table import Column as TableColumn
from rich.text import Text

from titans_platform.runs.folder import Result, RunFolder
from titans_platform.study.spec import Column
from titans_platform.study.status import CellStatus, cell_statuses, counted, counts
from titans_platform.text import clock, count, number

if TYPE_CHECKING:
    from titans_platform.data.parts import PrepareProgress
    from titans_platform.runs.spec import RunSpec
    from titans_platform.study.grid import StudyRun

PLAIN_EVERY = 15.0
"""Seconds between progress lines when the output is not a terminal."""


@contextmanager
def repeating(call: Callable[[], None], every: float) -> Iterator[None]:
    """Call ``call`` every ``every`` seconds in a thread, and once more at the end of the block."""
    stopped = threading.Event()

    def run() -> None:
        while not stopped.wait(every):
            call()
        call()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


class PlainLines:
    """Prints a progress line every ``PLAIN_EVERY`` seconds, unless the console is a terminal."""

    def __init__(self, console: Console):
        self.console, self.printed = console, time.monotonic()

    def __call__(self, line: Callable[[], str]) -> None:
        if not self.console.is_terminal and time.monotonic() - self.printed > PLAIN_EVERY:
            self.printed = time.monotonic()
            self.console.print(line(), soft_wrap=True)


def _bars(console: Console, *columns: ProgressColumn) -> Bars:
    return Bars(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def preparing(console: Console) -> Iterator[PrepareProgress]:
    """Show a bar for each source in preparation; the callable takes a source and its progress."""
    numbers = TextColumn("{task.fields[documents]:,} documents, {task.fields[tokens]:,} tokens")
    columns = TextColumn("preparing {task.description}", markup=False), BarColumn(), numbers
    with _bars(console, *columns, TimeElapsedColumn(), TimeRemainingColumn()) as bars:
        ids: dict[str, TaskID] = {}

        def show(source: str, documents: int, tokens: int, done: float | None) -> None:
            if source not in ids:
                ids[source] = bars.add_task(source, total=None, documents=0, tokens=0)
            total = 1.0 if done else None
            bars.update(ids[source], total=total, completed=done or 0, documents=documents, tokens=tokens)

        yield show


@contextmanager
def searching(study: StudyRun, console: Console) -> Iterator[None]:
    """Print a line on the study's search whenever it changes."""
    state = study.search
    assert state
    rungs = "/".join(map(str, state.milestones))
    printed = f"searching: {state.search.trials} trials, rungs at {rungs} steps"
    with console.status(Text(printed)) as status:

        def update() -> None:
            nonlocal printed
            before, printed = printed, state.read().line
            status.update(Text(printed))
            if not console.is_terminal and printed != before:
                console.print(printed, soft_wrap=True)

        with repeating(update, 2.0):
            yield


@contextmanager
def running(study: StudyRun, console: Console) -> Iterator[None]:
    """Show a bar for all cells and one for each running cell.

    Prints a line for each cell that ends, and the table when a seed is finished in every row.
    """
    from titans_platform.report.publish import so_far
    from titans_platform.report.report import build_report
    from titans_platform.report.table import build_table

    todo, finished = {cell.name for cell in study.todo}, _finished(cell_statuses(study.cells, study.root))
    plain, shown, ended = PlainLines(console), dict[str | None, TaskID](), set[str | None]()
    # long names of rows are cut, so that a line fits 80 columns
    narrow = {"no_wrap": True, "overflow": "ellipsis"}
    name = TextColumn("{task.description}", markup=False, table_column=TableColumn(max_width=24, **narrow))
    state_text = TextColumn("{task.fields[state]}", table_column=TableColumn(**narrow))
    with _bars(console, name, BarColumn(8), state_text, TimeRemainingColumn()) as bars:
        whole = bars.add_task(f"{study.study.name} at {study.scale_name}", total=len(study.cells), state="")

        def update() -> None:
            statuses = cell_statuses(study.cells, study.root)
            state, done = counted(counts(statuses)), sum(item.fraction for item in statuses)
            bars.update(whole, completed=done, state=state)
            for item in statuses:
                if item.state == "running":
                    if item.cell not in shown:
                        shown[item.cell] = bars.add_task(f"{item.row}, seed {item.seed}", state="")
                    # the last part is the time left, which has a column of its own
                    now = {"total": item.progress.get("steps"), "completed": item.progress.get("step", 0)}
                    bars.update(shown[item.cell], state=" ".join(running_line(item)[2:5]), **now)
                elif item.cell in shown:
                    bars.remove_task(shown.pop(item.cell))
                if item.state in ("done", "failed") and item.cell in todo - ended:
                    ended.add(item.cell)
                    result = RunFolder(study.root, str(item.cell)).result()
                    console.print(ended_line(item, result, study.columns), soft_wrap=True)
            nonlocal finished
            if finished < (seeds := _finished(statuses)) < len({item.seed for item in statuses}):
                console.print(so_far(build_report(build_table(study)), seeds, console.width))
            finished = seeds
            lines = [" ".join(running_line(item)) for item in statuses if item.state == "running"]
            plain(lambda: " | ".join([f"{state}; {clock(bars.tasks[0].time_remaining)} left", *lines]))

        with repeating(update, 1.0):
            yield


def _finished(statuses: Sequence[CellStatus]) -> int:
    """Return the number of seeds of which every row is done."""
    return len({item.seed for item in statuses} - {item.seed for item in statuses if item.state != "done"})


def ended_line(item: CellStatus, result: Result | None, columns: Mapping[str, Column]) -> str:
    """Return a line on an ended cell: its measures in the table's units, or the reason of its failure."""
    if result is None:
        return f"failed  {item.row}, seed {item.seed}: {item.reason}"
    measures = []
    for key, value in result.columns.items():
        column = columns.get(key) or Column(title=key, decimals=2)
        shown = number(column.factor * value if math.isfinite(value) else None, column.decimals)
        measures.append(f"{key} {shown} {column.unit}".rstrip())
    return f"done    {item.row}, seed {item.seed}: {', '.join(measures)} ({clock(result.seconds)})"


def running_line(item: CellStatus) -> list[str]:
    """Row, seed, and where known step, loss, speed and time left of a running cell."""
    p, labels = item.progress, [item.row, f"seed {item.seed}"]
    if not p:
        return [*labels, "starting"]
    if str(p.get("phase") or "").startswith("eval") or p.get("step") == p.get("steps"):
        return [*labels, "evaluating"]
    if p.get("phase") == "compile":
        return [*labels, "compiling"]
    loss = [f"loss {float(p['loss']):.3f}"] if p.get("loss") is not None else []
    speed = [f"{count(int(p['tokens_per_second']))} tok/s"] if p.get("tokens_per_second") else []
    return [*labels, f"{p.get('step', 0)}/{p.get('steps', '?')}", *loss, *speed, clock(p.get("eta_seconds"))]


@contextmanager
def run_display(progress: Callable[[], dict[str, Any] | None], console: Console) -> Iterator[None]:
    """Show a bar for one run, fed by its progress."""
    name, state_text = TextColumn("{task.description}"), TextColumn("{task.fields[shown]}")
    plain, began = PlainLines(console), time.time()
    with _bars(console, name, BarColumn(), MofNCompleteColumn(), state_text, TimeElapsedColumn()) as bars:
        bar = bars.add_task("starting", total=None, shown="")

        def update() -> None:
            state = progress()
            if not state or state["age"] > time.time() - began + 1:
                return
            phase, step, steps, line = state["phase"], state["step"], state["steps"], progress_line(state)
            bars.update(bar, description=phase, total=steps, completed=step, shown=line)
            plain(lambda: f"{phase} {step}/{steps}  {line}".rstrip())

        with repeating(update, 0.5):
            yield


def progress_line(state: dict[str, Any]) -> str:
    """Loss, validation loss, speed and time left of its progress, in one line."""
    if "loss" not in state:
        return ""
    held_out = f"  validation {state['validation_loss']:.3f}" if "validation_loss" in state else ""
    known = "tokens_per_second" in state
    speed = f"  {state['tokens_per_second']:,.0f} tok/s  {clock(state['eta_seconds'])} left" if known else ""
    return f"loss {state['loss']:.3f}{held_out}{speed}"


def train_run(spec: RunSpec, root: Path, name: str, console: Console) -> Result:
    """Train and evaluate a run, logged in MLflow as ``name``; a finished one is not trained again."""
    from titans_platform.runs.execute import execute
    from titans_platform.runs.ray_session import ray_session
    from titans_platform.runs.reporter import send_left
    from titans_platform.runs.spec import Tracking
    from titans_platform.tracking import open_store

    resources, done = spec.resources, spec.folder.state() == "done"
    if done:
        console.print(f"run {spec.name} is finished; nothing to do", soft_wrap=True)
    else:
        if spec.start:
            console.print(f"resuming from {spec.start}, which trained the same steps", soft_wrap=True)
        if reason := spec.folder.why_restarted(spec.commit):
            console.print(f"run {spec.name} {reason}", soft_wrap=True)
        spec = replace(spec, labels={"row": name}, tracking=Tracking(open_store(root).uri, name))
    session: Any = nullcontext()
    if resources.several and not done:
        session = ray_session(resources.cpus, resources.whole_gpus())
    with session, run_display(spec.folder.progress, console):
        result = execute(spec, wait=10)
    for line in send_left(root):
        console.print(line, soft_wrap=True)
    if spec.profile:
        console.print(f"trace {spec.trace.parent}/*.json.gz", soft_wrap=True)
    return result
