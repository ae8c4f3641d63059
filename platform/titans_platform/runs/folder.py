"""The folder of a cell: what state a run is in, read from files alone.

A cell is a folder named by the hash of all that decides its numbers. Everything here can be read from
another shell while a study runs, or after it died.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titans_platform.files import held, is_locked, read_json, write_json

RESULT = "result.json"
STALE_RESULT = "result.stale.json"
FAILED = "failed.json"
PROGRESS = "progress.json"
ORIGIN = "origin.json"
RUNGS = "rungs.json"
STOPPED = "stopped.json"
SECONDS = "seconds.json"
SPAN = "span.json"
ALIVE = 120.0
"""Seconds after which a cell of another machine that says nothing is taken for dead."""
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class RunFolder:
    """The files of one cell under ``root/cells/<name>``."""

    root: Path
    name: str

    @property
    def path(self) -> Path:
        """The folder itself; it need not exist."""
        return self.root / "cells" / self.name

    def result(self) -> dict[str, Any] | None:
        """The finished cell's numbers, or None; a file that names another cell is not this one's."""
        found = read_json(self.path / RESULT)
        return found if found and found.get("cell") == self.name else None

    def shown_result(self) -> dict[str, Any] | None:
        """The result to show: the present one, or the one kept aside while it is made again."""
        return self.result() or read_json(self.path / STALE_RESULT)

    def failure(self) -> dict[str, Any] | None:
        """Why the last attempt failed (keys reason, trace, time, commit), or None."""
        return read_json(self.path / FAILED)

    def progress(self) -> dict[str, Any] | None:
        """What the running cell last said of itself (step, steps, loss, ...), with its ``age`` in seconds."""
        found = read_json(self.path / PROGRESS)
        if found is None:
            return None
        try:
            changed = (self.path / PROGRESS).stat().st_mtime
        except OSError:
            return None
        return {**found, "age": max(0.0, time.time() - changed)}

    def is_held(self) -> bool:
        """Whether a living process works on the cell.

        Locks are not seen across machines on every file system: of a cell that another machine began, a
        sign of life in the last minutes counts too.
        """
        if is_locked(self.path / "lock"):
            return True
        origin, progress = read_json(self.path / ORIGIN) or {}, self.progress()
        elsewhere = origin.get("host", platform.node()) != platform.node()
        return elsewhere and progress is not None and progress["age"] < ALIVE

    def state(self) -> str:
        """One of done, running, failed, interrupted (begun, and nobody works on it), missing."""
        if self.result():
            return "done"
        if self.is_held():
            return "running"
        if self.failure():
            return "failed"
        return "interrupted" if (self.path / PROGRESS).exists() else "missing"

    def record_failure(self, error: BaseException, commit: str) -> None:
        """Keep the reason for the table and for the next run."""
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        trace = "".join(traceback.format_exception(error))[-8000:]
        write_json(
            self.path / FAILED, {"reason": reason, "trace": trace, "commit": commit, "time": time.time()}
        )

    def forget_failure(self) -> None:
        """Drop the reason of the last attempt: there is about to be another."""
        (self.path / FAILED).unlink(missing_ok=True)

    def commit(self) -> str | None:
        """The commit that began the cell, None before any did."""
        return (read_json(self.path / ORIGIN) or {}).get("commit")

    def begin(self, commit: str) -> None:
        """Make ready for an attempt: forget the last failure, and checkpoints that other code wrote.

        The numbers of a cell come from one commit: what another left half-trained starts over.
        """
        if self.commit() not in (None, commit):
            shutil.rmtree(self.path / CHECKPOINTS, ignore_errors=True)
            (self.path / RUNGS).unlink(missing_ok=True)
        self.forget_failure()
        write_json(self.path / ORIGIN, {"commit": commit, "pid": os.getpid(), "host": platform.node()})

    def set_aside(self) -> None:
        """Put a finished result aside, to be made again from nothing; it is shown until replaced."""
        if self.result():
            os.replace(self.path / RESULT, self.path / STALE_RESULT)
        shutil.rmtree(self.path / CHECKPOINTS, ignore_errors=True)
        (self.path / PROGRESS).unlink(missing_ok=True)

    def drop_stale(self) -> None:
        """Forget the result that was set aside, once there is a new one."""
        if self.result():
            (self.path / STALE_RESULT).unlink(missing_ok=True)

    @contextmanager
    def hold(self, timeout: float = 90.0) -> Iterator[None]:
        """Hold the cell while it is worked on; the lock dies with the process.

        A driver killed a moment ago leaves workers that live a few seconds more; the next study waits
        for them rather than write into the same folder. TimeoutError after ``timeout`` seconds.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with held(self.path / "lock", timeout) as got:
            if not got:
                raise TimeoutError(f"cell {self.name} is worked on by another process")
            yield
