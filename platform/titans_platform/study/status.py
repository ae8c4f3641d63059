"""How a study stands, from the files of its cells alone: the driver and other shells see the same."""

from __future__ import annotations

import math
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table as RichTable
from rich.text import Text

from titans_platform.config import RunConfig
from titans_platform.errors import UsageError
from titans_platform.files import is_locked, read_json
from titans_platform.loading import validate
from titans_platform.study.grid import Cell, load_study
from titans_platform.study.ledger import LEDGER, Marks, ledger_line
from titans_platform.study.plan import StudyRun
from titans_platform.study.schedule import MANIFEST, STUDY
from titans_platform.study.search import Searched, read_search
from titans_platform.study.spec import Column, Study
from titans_platform.text import clock, count, number

TRAINING_SHARE = 0.9
"""Part of a cell that is training; the rest is evaluation."""
PLAIN_EVERY = 15.0
"""Seconds between lines where there is no terminal."""


@dataclass(frozen=True)
class CellStatus:
    """One cell as its files show it."""

    cell: Cell
    state: str
    progress: dict[str, Any]
    reason: str = ""

    @property
    def fraction(self) -> float:
        """How much of the cell is finished, 0 to 1."""
        if self.state in ("done", "failed"):
            return 1.0
        steps = self.progress.get("steps") or 0
        return TRAINING_SHARE * float(self.progress.get("step", 0)) / steps if steps else 0.0


def cell_statuses(cells: Sequence[Cell], root: Path) -> list[CellStatus]:
    """Read the state of every cell."""
    statuses = []
    for cell in cells:
        folder = cell.folder(root)
        state = folder.state()
        failure = folder.failure() if state == "failed" else None
        progress = folder.progress() if state in ("running", "interrupted") else None
        statuses.append(CellStatus(cell, state, progress or {}, str((failure or {}).get("reason", ""))))
    return statuses


def counts(statuses: Sequence[CellStatus]) -> dict[str, int]:
    """Cells by state."""
    states = ("done", "running", "failed", "interrupted", "missing")
    return {state: sum(item.state == state for item in statuses) for state in states}


def counted(counts: Mapping[str, int]) -> str:
    """Cells by state, in words."""
    return ", ".join(f"{n} {state}" for state, n in counts.items() if n or state == "done")


def running_line(item: CellStatus) -> list[str]:
    """What one running cell shows: row, seed, step, loss, speed, time left."""
    p, who = item.progress, [item.cell.row, f"seed {item.cell.seed}"]
    steps = p.get("steps") or item.cell.config.optim.steps
    if not p:
        return [*who, "starting", "", "", ""]
    if str(p.get("phase") or "").startswith("eval") or p.get("step") == steps:
        return [*who, "evaluating", "", "", ""]
    loss = f"loss {float(p['loss']):.3f}" if p.get("loss") is not None else ""
    speed = f"{count(int(p['tokens_per_second']))} tok/s" if p.get("tokens_per_second") else ""
    return [*who, f"{p.get('step', 0)}/{steps}", loss, speed, clock(p.get("eta_seconds"))]


class View:
    """The display of a running study of whose cells ``todo`` are run; measures in the table's units.

    While no cell runs it shows the part of the study that ``marks`` began last.
    """

    def __init__(self, run: StudyRun, todo: Sequence[Cell], marks: Marks):
        self.run, self.todo, self.marks = run, todo, marks
        self.started = time.monotonic()
        self._at_start = {
            item.cell.name: 0.0 if item.state in ("done", "failed") else item.fraction
            for item in cell_statuses(todo, run.root)
        }
        self._printed: set[str | None] = set()

    def eta(self, statuses: Sequence[CellStatus]) -> float | None:
        """Seconds until all of it is done, by the work done since the start; None before there is any."""
        mine = [item for item in statuses if item.cell.name in self._at_start]
        work = sum(item.fraction - self._at_start[item.cell.name] for item in mine)
        left = sum(1 - item.fraction for item in mine)
        return left * (time.monotonic() - self.started) / work if work > 0.02 else None

    def render(self) -> RenderableType:
        """Overall line, bar, one line a running cell."""
        statuses = cell_statuses(self.run.cells, self.run.root)
        share = sum(item.fraction for item in statuses) / len(statuses) if statuses else 1.0
        head = RichTable.grid(expand=True)
        head.add_column(ratio=1, no_wrap=True)
        head.add_column(justify="right", no_wrap=True)
        name = f"{self.run.study.name} at {self.run.scale_name}"
        title = Text(f"{name}: {len(statuses)} cells, {counted(counts(statuses))}", style="bold")
        head.add_row(title, f"{self._elapsed()}, {clock(self.eta(statuses))} left")
        bar = ProgressBar(total=1.0, completed=share, complete_style="green")
        return Group(head, bar, self._running(statuses))

    def _elapsed(self) -> str:
        return clock(time.monotonic() - self.started)

    def _running(self, statuses: Sequence[CellStatus]) -> RenderableType:
        lines = RichTable.grid(padding=(0, 2, 0, 0))
        longest = max((len(cell.row) for cell in self.run.cells), default=0)
        lines.add_column(no_wrap=True, min_width=longest)
        for justify in ("left", "right", "right", "right", "right"):
            lines.add_column(justify=justify, no_wrap=True)
        for item in statuses:
            if item.state == "running":
                lines.add_row(*running_line(item))
        return lines if lines.rows else Text(self.marks.now, style="dim")

    def news(self) -> list[str]:
        """A line for every cell that ended since the last call."""
        ended = [item for item in cell_statuses(self.todo, self.run.root) if item.state in ("done", "failed")]
        new = [item for item in ended if item.cell.name not in self._printed]
        self._printed |= {item.cell.name for item in new}
        return [self._ended(item) for item in new]

    def _ended(self, item: CellStatus) -> str:
        who = f"{item.cell.row}, seed {item.cell.seed}"
        if item.state == "failed":
            return f"failed  {who}: {item.reason}"
        result = item.cell.folder(self.run.root).result()
        assert result
        values = ", ".join(self._measured(key, value) for key, value in result.columns.items())
        return f"done    {who}: {values} ({clock(result.seconds)})"

    def _measured(self, key: str, value: float) -> str:
        column = self.run.columns.get(key) or Column(title=key, decimals=2)
        text = number(column.factor * value if math.isfinite(value) else None, column.decimals)
        return f"{key} {text} {column.unit}".rstrip()

    def plain(self) -> str:
        """The state in one line, for logs."""
        statuses = cell_statuses(self.run.cells, self.run.root)
        running = [running_line(item) for item in statuses if item.state == "running"]
        cells = "; ".join(" ".join(part for part in line[:4] if part) for line in running) or self.marks.now
        line = f"[{self._elapsed()}] {counted(counts(statuses))}; {clock(self.eta(statuses))} left"
        return f"{line} | {cells}" if cells else line


@contextmanager
def showing(view: View, console: Console) -> Iterator[None]:
    """Keep the view on screen: live in a terminal, a line now and then in a log."""
    if console.is_terminal:
        live = Live(get_renderable=view.render, console=console, refresh_per_second=2, transient=True,
                    redirect_stdout=False, redirect_stderr=False)  # fmt: skip
        with live:
            yield
        return
    printed = time.monotonic()

    def tell() -> None:
        nonlocal printed
        lines = view.news()
        if time.monotonic() - printed >= PLAIN_EVERY:
            lines.append(view.plain())
            printed = time.monotonic()
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    with repeating(tell, 1.0):
        yield


@contextmanager
def showing_search(run: StudyRun, found: Searched, console: Console) -> Iterator[None]:
    """Tell how the search stands whenever that has changed."""
    rungs = "/".join(map(str, found.milestones))
    printed = ""
    with console.status(f"searching: {found.search.trials} trials, rungs at {rungs} steps") as status:

        def tell() -> None:
            nonlocal printed
            now = read_search(run)
            if now is None or now.line == printed:
                return
            printed = now.line
            status.update(printed)
            if not console.is_terminal:
                console.print(printed, highlight=False, soft_wrap=True)

        with repeating(tell, 2.0):
            yield


@contextmanager
def repeating(call: Callable[[], None], every: float) -> Iterator[None]:
    """Call ``call`` in a thread each ``every`` seconds, and once more at the end of the block."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(every):
            call()
        call()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


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
    statuses = cell_statuses(cells, root)
    # the lock of a driver on another machine may not be seen here; what its cells write is
    elsewhere = manifest.get("host", platform.node()) != platform.node()
    return {
        "study": label,
        "running": is_locked(folder / "lock") or (elsewhere and counts(statuses)["running"] > 0),
        "host": manifest.get("host"),
        "counts": counts(statuses),
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
            for item in statuses
        ],
    }


def _search(folder: Path, manifest: dict[str, Any], root: Path) -> dict[str, Any] | None:
    study = read_json(folder / STUDY)
    if study is None:
        return None
    found = validate(Study, study, str(folder / STUDY))
    overrides = tuple(manifest.get("set", ()))
    search = read_search(StudyRun(found, manifest["scale"], root, manifest["commit"], overrides))
    return search.record() if search else None


def print_status(status: dict[str, Any], console: Console) -> None:
    """Print the status as text."""
    driver = "a sweep run is working on it" if status["running"] else "no sweep run is working on it"
    name, total = f"[bold]{status['study']}[/]", sum(status["counts"].values())
    console.print(f"{name}: {total} cells, {counted(status['counts'])}; {driver}", highlight=False)
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
