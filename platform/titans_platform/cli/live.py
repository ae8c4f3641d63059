"""What commands print of runs: live displays of a study, a search or one run, and tables of measures.

Without a terminal the live displays print periodic lines.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from titans_platform import text
from titans_platform.runs.folder import PATHWAY_TITLES, RunFolder
from titans_platform.study.folder import SearchState
from titans_platform.study.spec import Column
from titans_platform.study.status import CellStatus, cell_statuses, counted, counts
from titans_platform.text import clock, count, number

if TYPE_CHECKING:
    from titans_platform.data.parts import Progress
    from titans_platform.runs.folder import Measures
    from titans_platform.study.plan import Plan

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


def say(console: Console, line: str) -> None:
    """Print a line without markup, highlighting or wrapping."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


class PlainLines:
    """Prints a progress line every ``PLAIN_EVERY`` seconds, unless the console is a terminal."""

    def __init__(self, console: Console):
        self.console, self.printed = console, time.monotonic()

    def __call__(self, line: Callable[[], str]) -> None:
        if not self.console.is_terminal and time.monotonic() - self.printed > PLAIN_EVERY:
            self.printed = time.monotonic()
            say(self.console, line())


def _bars(console: Console, *columns: ProgressColumn) -> Bars:
    return Bars(*columns, console=console, transient=True, disable=not console.is_terminal)


class StudyDisplay:
    """Shows a study while it runs (`study.run.Display`)."""

    def __init__(self, console: Console):
        self.console = console

    @contextmanager
    def preparing(self) -> Iterator[Progress]:
        """A bar for each source that is prepared; the callable says how far it is."""
        numbers = TextColumn("{task.fields[documents]:,} documents, {task.fields[tokens]:,} tokens")
        columns = TextColumn("preparing {task.description}"), BarColumn(), numbers
        with _bars(self.console, *columns, TimeElapsedColumn(), TimeRemainingColumn()) as bars:
            ids: dict[str, TaskID] = {}

            def show(source: str, documents: int, tokens: int, done: float | None) -> None:
                if source not in ids:
                    ids[source] = bars.add_task(source, total=None, documents=0, tokens=0)
                total = 1.0 if done else None
                bars.update(ids[source], total=total, completed=done or 0, documents=documents, tokens=tokens)

            yield show

    @contextmanager
    def searching(self, plan: Plan, state: SearchState) -> Iterator[None]:
        """A line on the search whenever it changes."""
        rungs = "/".join(map(str, state.milestones))
        printed = f"searching: {state.search.trials} trials, rungs at {rungs} steps"
        with self._report_interrupt(plan), self.console.status(printed) as status:

            def tell() -> None:
                nonlocal printed
                before, printed = printed, state.read().line
                status.update(printed)
                if not self.console.is_terminal and printed != before:
                    say(self.console, printed)

            with repeating(tell, 2.0):
                yield

    @contextmanager
    def running(self, plan: Plan) -> Iterator[None]:
        """All cells in one bar, and a line for each running cell."""
        view, plain = StudyView(plan), PlainLines(self.console)

        def tell() -> None:
            for line in view.news():
                say(self.console, line)
            plain(view.plain)

        if self.console.is_terminal:
            shown = Live(get_renderable=view.render, console=self.console, refresh_per_second=2,
                         transient=True, redirect_stdout=False, redirect_stderr=False)  # fmt: skip
        else:
            shown = repeating(tell, 1.0)
        with self._report_interrupt(plan), shown:
            yield

    @contextmanager
    def _report_interrupt(self, plan: Plan) -> Iterator[None]:
        """On Ctrl-C, print how many cells are finished."""
        try:
            yield
        except KeyboardInterrupt:
            cells = plan.study.cells
            done = sum(cell.folder(plan.study.root).result() is not None for cell in cells)
            say(self.console, f"{done} of {len(cells)} cells are done and kept")
            raise


class StudyView:
    """What is shown of a study while a plan runs; measures in the units of the table."""

    def __init__(self, plan: Plan):
        self.study, self.todo = plan.study, plan.todo
        self.started = time.monotonic()
        self._at_start = {
            item.cell.name: 0.0 if item.state in ("done", "failed") else item.fraction
            for item in cell_statuses(self.todo, self.study.root)
        }
        self._printed: set[str | None] = set()

    def eta(self, statuses: Sequence[CellStatus]) -> float | None:
        """Estimated seconds left, from the progress since the start; None before there is any."""
        mine = [item for item in statuses if item.cell.name in self._at_start]
        work = sum(item.fraction - self._at_start[item.cell.name] for item in mine)
        left = sum(1 - item.fraction for item in mine)
        return left * (time.monotonic() - self.started) / work if work > 0.02 else None

    def _elapsed(self) -> str:
        return clock(time.monotonic() - self.started)

    def render(self) -> RenderableType:
        """A line and a bar for all cells, a line for each running one."""
        statuses = cell_statuses(self.study.cells, self.study.root)
        share = sum(item.fraction for item in statuses) / len(statuses) if statuses else 1.0
        head = Table.grid(expand=True)
        head.add_column(ratio=1, no_wrap=True)
        head.add_column(justify="right", no_wrap=True)
        name = f"{self.study.study.name} at {self.study.scale_name}"
        title = Text(f"{name}: {len(statuses)} cells, {counted(counts(statuses))}", style="bold")
        head.add_row(title, f"{self._elapsed()}, {clock(self.eta(statuses))} left")
        bar = ProgressBar(total=1.0, completed=share, complete_style="green")
        lines = Table.grid(padding=(0, 2, 0, 0))
        longest = max((len(cell.row) for cell in self.study.cells), default=0)
        lines.add_column(no_wrap=True, min_width=longest)
        for justify in ("left", "right", "right", "right", "right"):
            lines.add_column(justify=justify, no_wrap=True)
        for item in statuses:
            if item.state == "running":
                lines.add_row(*running_line(item))
        return Group(head, bar, lines if lines.rows else Text("no cell is running", style="dim"))

    def news(self) -> list[str]:
        """A line for each cell that ended since the last call."""
        lines = []
        for item in cell_statuses(self.todo, self.study.root):
            if item.state not in ("done", "failed") or item.cell.name in self._printed:
                continue
            self._printed.add(item.cell.name)
            who = f"{item.cell.row}, seed {item.cell.seed}"
            if result := item.cell.folder(self.study.root).result():
                values = ", ".join(self._measured(key, value) for key, value in result.columns.items())
                lines.append(f"done    {who}: {values} ({clock(result.seconds)})")
            else:
                lines.append(f"failed  {who}: {item.reason}")
        return lines

    def _measured(self, key: str, value: float) -> str:
        column = self.study.columns.get(key) or Column(title=key, decimals=2)
        shown = number(column.factor * value if math.isfinite(value) else None, column.decimals)
        return f"{key} {shown} {column.unit}".rstrip()

    def plain(self) -> str:
        """The state in one line, for logs."""
        statuses = cell_statuses(self.study.cells, self.study.root)
        running = [running_line(item) for item in statuses if item.state == "running"]
        cells = "; ".join(" ".join(part for part in line[:4] if part) for line in running)
        line = f"[{self._elapsed()}] {counted(counts(statuses))}; {clock(self.eta(statuses))} left"
        return f"{line} | {cells}" if cells else line


def running_line(item: CellStatus) -> list[str]:
    """Row, seed, step, loss, speed and time left of a running cell."""
    p, who = item.progress, [item.cell.row, f"seed {item.cell.seed}"]
    steps = p.get("steps") or item.cell.config.optim.steps
    if not p:
        return [*who, "starting", "", "", ""]
    if str(p.get("phase") or "").startswith("eval") or p.get("step") == steps:
        return [*who, "evaluating", "", "", ""]
    loss = f"loss {float(p['loss']):.3f}" if p.get("loss") is not None else ""
    speed = f"{count(int(p['tokens_per_second']))} tok/s" if p.get("tokens_per_second") else ""
    return [*who, f"{p.get('step', 0)}/{steps}", loss, speed, clock(p.get("eta_seconds"))]


@contextmanager
def run_display(folder: RunFolder, console: Console) -> Iterator[None]:
    """A bar for one run, fed by its progress.json."""
    about, state_text = TextColumn("{task.description}"), TextColumn("{task.fields[shown]}")
    plain, began = PlainLines(console), time.time()
    with _bars(console, about, BarColumn(), MofNCompleteColumn(), state_text, TimeElapsedColumn()) as bars:
        bar = bars.add_task("starting", total=None, shown="")

        def update() -> None:
            state = folder.progress()
            if not state or state["age"] > time.time() - began + 1:
                return
            phase, step, steps, line = state["phase"], state["step"], state["steps"], progress_line(state)
            bars.update(bar, description=phase, total=steps, completed=step, shown=line)
            plain(lambda: f"{phase} {step}/{steps}  {line}".rstrip())

        with repeating(update, 0.5):
            yield


@contextmanager
def reading_display(total: int, console: Console) -> Iterator[Callable[[int], None]]:
    """A bar of the tokens read of ``total``; the callable adds some."""
    columns, plain = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn()), PlainLines(console)
    with _bars(console, TextColumn("reading"), *columns) as bars:
        bar = bars.add_task("", total=total)

        def report(tokens: int) -> None:
            bars.advance(bar, tokens)
            plain(lambda: f"read {bars.tasks[0].completed:,} of {total:,} tokens")

        yield report


def progress_line(state: dict[str, Any]) -> str:
    """Loss, validation loss, speed and time left of a progress.json, in one line."""
    if "loss" not in state:
        return ""
    held_out = f"  validation {state['validation_loss']:.3f}" if "validation_loss" in state else ""
    speed = f"{state['tokens_per_second']:,.0f} tok/s"
    return f"loss {state['loss']:.3f}{held_out}  {speed}  {clock(state['eta_seconds'])} left"


def measures_table(result: Measures) -> Table:
    """The result of ``evaluate`` as a table: each column, followed by its tasks at each length."""
    table = text.table("", "value", "± s.e.", "chance", "floor", "items")
    heuristics = any(task.heuristic for task in result.tasks.values())
    if heuristics:
        table.add_column("best heuristic")
    for column, value in result.columns.items():
        table.add_row(f"[bold]{column}", f"[bold]{_short(value)}", "", _short(result.chance.get(column)))
        for name, task in result.tasks.items():
            if name.partition("/")[0] == column:
                measured = map(_short, (task.value, task.stderr, task.chance, task.floor))
                last = (task.heuristic or "",) if heuristics else ()
                table.add_row(f"  {name.partition('/')[2]}", *measured, f"{task.items:,}", *last)
    return table


def pathway_grid(result: Measures) -> Table:
    """The columns of generated tasks with each part switched off; a dash for a part that the model lacks."""
    columns = list(next(iter(result.pathways.values()), {}))
    table = text.table("", *columns)
    table.add_row("all on", *(_short(result.columns[column]) for column in columns))
    for part, title in PATHWAY_TITLES.items():
        table.add_row(title, *(_short(result.pathways.get(part, {}).get(column)) for column in columns))
    return table


def bucket_tables(result: Measures) -> Iterator[Table]:
    """Of each task with buckets, its value by bucket and length: a needle's depth, a token's position."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for key, buckets in result.buckets.items():
        task, _, length = key.partition("/")[2].rpartition("@")
        for bucket, value in buckets.items():
            found.setdefault(task, {}).setdefault(bucket, {})[length] = value
    for task, rows in found.items():
        lengths = dict.fromkeys(length for values in rows.values() for length in values)
        headings = [f"{int(length):,}" for length in lengths]
        table = text.table("position, at tokens", *headings, title=task, title_justify="left")
        for bucket, values in rows.items():
            table.add_row(bucket, *(_shaded(values.get(length), bucket) for length in lengths))
        yield table


def _shaded(value: float | None, bucket: str) -> str:
    """A number; for a depth, coloured by the share of needles found there."""
    if value is None or not bucket.endswith("%"):
        return _short(value)
    colour = "red" if value < 1 / 3 else "yellow" if value < 2 / 3 else "green"
    return f"[{colour}]{_short(value)}"


def _short(value: float | None) -> str:
    """Three decimals below ten, one above; a dash for None."""
    if value is None:
        return "-"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"
