"""A durable journal of what a run logs, until MLflow has it: training never waits for the server, and no step
is lost.

The file is an append-only record with one line per step, durable before a checkpoint is committed. A thread
sends it in order. After a request without an answer, it looks up what the server has before it retries.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titans_platform.errors import TitansError, one_line
from titans_platform.files import read_json, write_error, write_json
from titans_platform.runs.folder import LOGGED

if TYPE_CHECKING:
    from titans_platform.tracking import RunLog

log = logging.getLogger(__name__)

JOURNAL, STATE = LOGGED
SEND_EVERY = 5.0
"""Seconds between requests; doubled after each failure, up to a minute."""
END_SECONDS = 10.0
"""Seconds that the end of a run waits for unsent lines."""
_LINES = 100
"""Steps per request."""


class Journal:
    """The journal of one run, with a single writer; ``connect`` opens its MLflow run, or raises."""

    def __init__(self, folder: Path, connect: Callable[[], RunLog]):
        self._file, self._state_file, self._connect = folder / JOURNAL, folder / STATE, connect
        self._run: RunLog | None = None
        self._lock, self._wake, self._over = threading.Lock(), threading.Event(), False
        self._waiting: list[bytes] = []
        self._size = _cut_to_lines(self._file)
        self._state: dict[str, Any] = read_json(self._state_file) or {}
        self._sent = min(int(self._state.get("sent", 0)), self._size)
        lines = _lines(self._file, 0, self._size)
        self._seen = {(entry["step"], key) for entry, _ in lines for key in entry["values"]}
        self._thread = threading.Thread(target=self._send_on, daemon=True, name="journal")
        self._problem: Exception | None = None
        self._tried = threading.Event()

    @property
    def run_id(self) -> str | None:
        """The MLflow run's id. Waits for the first request; None if the server cannot be reached."""
        if self._thread.ident:
            self._tried.wait(END_SECONDS)
        return self._run.run_id if self._run else self._state.get("run_id")

    def start(self) -> None:
        """Start the thread that sends."""
        self._thread.start()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log values at a step. Idempotent: a value logged before an interruption is kept."""
        new = {k: v for k, v in values.items() if (step, k) not in self._seen and math.isfinite(v)}
        if not new:
            return
        self._seen |= {(step, key) for key in new}
        line = json.dumps({"step": step, "time": round(1000 * time.time()), "values": new})
        with self._lock:
            self._waiting.append(line.encode() + b"\n")
            try:
                self._write()
            except OSError as error:
                if len(self._waiting) == 1:
                    log.warning("%s: %s; kept in memory for now", self._file, error.strerror)

    def sync(self) -> None:
        """Write and fsync everything logged so far. Raises StorageError, TitansError."""
        try:
            with self._lock:
                self._write()
                if self._size:
                    with self._file.open("rb") as file:
                        os.fsync(file.fileno())
        except OSError as error:
            raise write_error(self._file, error) from error

    def close(self, end: Callable[[RunLog], object], status: str | None) -> str | None:
        """Send the rest, then call ``end`` with the MLflow run. Returns a message if anything is unsent.

        Takes at most END_SECONDS and one request.
        """
        self._over = True
        self._wake.set()
        if self._thread.ident:
            self._thread.join(END_SECONDS)
        try:
            if self._thread.is_alive():
                raise TitansError("no answer") from self._problem
            self._send()
            assert self._run
            end(self._run)
            self._keep(ended=status)
        except Exception as error:
            run, steps = self._file.parent.name, sum(1 for _ in _lines(self._file, self._sent, self._size))
            what = f"{steps} steps of its log" if steps else "its end"
            return (
                f"run {run}: {what} did not reach MLflow ({one_line(error, 120)}); kept in {self._file} and "
                "sent by the next titans train, sweep run or ui"
            )
        return None

    def _write(self) -> None:
        """Append the waiting lines; a partial write is truncated."""
        data = b"".join(self._waiting)
        if not data:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("ab", buffering=0) as file:
            try:
                if file.write(data) != len(data):
                    raise OSError(28, os.strerror(28))
            except OSError:
                file.truncate(self._size)
                raise
        self._size += len(data)
        self._waiting.clear()

    def _send_on(self) -> None:
        pause = 0.0
        while not self._over:
            self._wake.wait(pause)
            self._wake.clear()
            try:
                self._send()
                pause, self._problem = SEND_EVERY, None
            except Exception as error:
                if self._problem is None:
                    log.warning("run %s: not in MLflow for now: %s", self._file.parent.name, one_line(error))
                self._problem, pause = error, min(2 * max(pause, SEND_EVERY), 60.0)
            self._tried.set()

    def _send(self) -> None:
        """Send the lines that are on disk."""
        if self._run is None:
            self._run = self._connect()
            self._keep(run_id=self._run.run_id, ended=None)
        while self._sent < (size := self._size):
            batch = list(islice(_lines(self._file, self._sent, size), _LINES))
            self._run.send([(entry["step"], entry["time"], entry["values"]) for entry, _ in batch])
            self._sent = batch[-1][1]
            self._keep(sent=self._sent)

    def _keep(self, **state: Any) -> None:
        self._state |= state
        write_json(self._state_file, self._state)


def unsent(folder: Path) -> bool:
    """Whether MLflow lacks part of a run's log. The run must not be held by a process."""
    state = read_json(folder / STATE)
    if state is None:
        return False
    path = folder / JOURNAL
    size = path.stat().st_size if path.exists() else 0
    return state.get("sent", 0) < size or state.get("ended") is None


def _cut_to_lines(path: Path) -> int:
    """Truncate the partial line that a killed process left. Returns the size."""
    if not path.exists():
        return 0
    size = path.read_bytes().rfind(b"\n") + 1
    os.truncate(path, size)
    return size


def _lines(path: Path, start: int, end: int) -> Iterator[tuple[dict[str, Any], int]]:
    """The entries between two byte offsets of the file, each with the offset of its end."""
    if start >= end:
        return
    with path.open("rb") as file:
        file.seek(start)
        while start < end:
            line = file.readline()
            start += len(line)
            yield json.loads(line), start
