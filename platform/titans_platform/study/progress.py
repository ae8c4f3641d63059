"""How a study is going, drawn from the files its cells write: the driver and other shells see the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table as RichTable
from rich.text import Text

from titans_platform.study.spec import Cell, Column
from titans_platform.text import clock, count, number

TRAINING_SHARE = 0.9
"""Part of a cell that is training; the rest is evaluation."""
PLAIN_EVERY = 15.0
"""Seconds between lines where there is no terminal."""


@dataclass(frozen=True)
class Seen:
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

    @property
    def eta(self) -> float | None:
        """Seconds of training left at the present speed."""
        speed, config = self.progress.get("tokens_per_second"), self.cell.config
        steps = max(0, config.optim.steps - int(self.progress.get("step", 0)))
        return steps * config.tokens_per_step / float(speed) if speed else None


def look(cells: Sequence[Cell], root: Path) -> list[Seen]:
    """Read the state of every cell."""
    seen = []
    for cell in cells:
        folder = cell.folder(root)
        state = folder.state()
        failure = folder.failure() if state == "failed" else None
        progress = folder.progress() if state in ("running", "interrupted") else None
        seen.append(Seen(cell, state, progress or {}, str((failure or {}).get("reason", ""))))
    return seen


def counts(seen: Sequence[Seen]) -> dict[str, int]:
    """Cells by state."""
    states = ("done", "running", "failed", "interrupted", "missing")
    return {state: sum(item.state == state for item in seen) for state in states}


def counted(seen: Sequence[Seen]) -> str:
    """Cells by state, in words."""
    found = {state: n for state, n in counts(seen).items() if n or state == "done"}
    return ", ".join(f"{n} {state}" for state, n in found.items())


def running_line(item: Seen) -> list[str]:
    """What one running cell shows: row, seed, step, loss, speed, time left."""
    p, who = item.progress, [item.cell.row, f"seed {item.cell.seed}"]
    steps = p.get("steps") or item.cell.config.optim.steps
    if not p:
        return [*who, "starting", "", "", ""]
    if str(p.get("phase") or "").startswith("eval") or p.get("step") == steps:
        return [*who, "evaluating", "", "", ""]
    loss = f"loss {float(p['loss']):.3f}" if p.get("loss") is not None else ""
    speed = f"{count(int(p['tokens_per_second']))} tok/s" if p.get("tokens_per_second") else ""
    return [*who, f"{p.get('step', 0)}/{steps}", loss, speed, clock(item.eta)]


class View:
    """The display of a running study; ``todo`` is what this sweep runs, ``cells`` the whole study.

    Measures are shown in the units of ``columns``, those of the study's table.
    """

    def __init__(
        self,
        title: str,
        cells: Sequence[Cell],
        todo: Sequence[Cell],
        root: Path,
        columns: Mapping[str, Column] | None = None,
    ):
        self.title, self.cells, self.todo, self.root = title, list(cells), list(todo), root
        self.columns = columns or {}
        self.started = time.monotonic()
        self.note = ""
        """What goes on while no cell runs."""
        self._at_start = {
            item.cell.name: 0.0 if item.state in ("done", "failed") else item.fraction
            for item in look(self.todo, root)
        }
        self._printed: set[str | None] = set()

    def eta(self, seen: Sequence[Seen]) -> float | None:
        """Seconds until all of it is done, by the work done since the start; None before there is any."""
        mine = [item for item in seen if item.cell.name in self._at_start]
        work = sum(item.fraction - self._at_start[item.cell.name] for item in mine)
        left = sum(1 - item.fraction for item in mine)
        return left * (time.monotonic() - self.started) / work if work > 0.02 else None

    def render(self) -> RenderableType:
        """Overall line, bar, one line a running cell."""
        seen = look(self.cells, self.root)
        share = sum(item.fraction for item in seen) / len(seen) if seen else 1.0
        head = RichTable.grid(expand=True)
        head.add_column(ratio=1, no_wrap=True)
        head.add_column(justify="right", no_wrap=True)
        title = Text(f"{self.title}: {len(seen)} cells, {counted(seen)}", style="bold")
        head.add_row(title, f"{self._elapsed()}, {clock(self.eta(seen))} left")
        bar = ProgressBar(total=1.0, completed=share, complete_style="green")
        return Group(head, bar, self._running(seen))

    def _elapsed(self) -> str:
        return clock(time.monotonic() - self.started)

    def _running(self, seen: Sequence[Seen]) -> RenderableType:
        lines = RichTable.grid(padding=(0, 2, 0, 0))
        lines.add_column(no_wrap=True, min_width=max((len(cell.row) for cell in self.cells), default=0))
        for justify in ("left", "right", "right", "right", "right"):
            lines.add_column(justify=justify, no_wrap=True)
        for item in seen:
            if item.state == "running":
                lines.add_row(*running_line(item))
        return lines if lines.rows else Text(self.note, style="dim")

    def news(self) -> list[str]:
        """A line for every cell that ended since the last call."""
        ended = [item for item in look(self.todo, self.root) if item.state in ("done", "failed")]
        new = [item for item in ended if item.cell.name not in self._printed]
        self._printed |= {item.cell.name for item in new}
        return [self._ended(item) for item in new]

    def _ended(self, item: Seen) -> str:
        who = f"{item.cell.row}, seed {item.cell.seed}"
        if item.state == "failed":
            return f"failed  {who}: {item.reason}"
        result = item.cell.folder(self.root).result() or {}
        values = ", ".join(self._measured(key, value) for key, value in result.get("columns", {}).items())
        seconds = float(result.get("train_seconds") or 0) + float(result.get("eval_seconds") or 0)
        return f"done    {who}: {values} ({clock(seconds)})"

    def _measured(self, key: str, value: float | None) -> str:
        column = self.columns.get(key) or Column(title=key, decimals=2)
        text = number(None if value is None else column.factor * value, column.decimals)
        return f"{key} {text} {column.unit}".rstrip()

    def plain(self) -> str:
        """The state in one line, for logs."""
        seen = look(self.cells, self.root)
        running = [running_line(item) for item in seen if item.state == "running"]
        cells = "; ".join(" ".join(part for part in line[:4] if part) for line in running) or self.note
        line = f"[{self._elapsed()}] {counted(seen)}; {clock(self.eta(seen))} left"
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
    stop = threading.Event()
    thread = threading.Thread(target=_plain_lines, args=(view, console, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _plain_lines(view: View, console: Console, stop: threading.Event) -> None:
    def write(*lines: str) -> None:
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    due = time.monotonic() + PLAIN_EVERY
    while not stop.wait(1.0):
        write(*view.news())
        if time.monotonic() >= due:
            write(view.plain())
            due = time.monotonic() + PLAIN_EVERY
    write(*view.news())
