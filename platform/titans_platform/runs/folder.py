"""The folder of a run: its files, and what state it is in, read from them alone.

A run's folder is named by the hash of all that decides its numbers. Everything here can be read from
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

from titans_platform.errors import TitansError
from titans_platform.files import file_lock, is_locked, read_json, write_json
from titans_platform.runs.result import Result

CONFIG = "config.json"
RESULT = "result.json"
STALE_RESULT = "result.stale.json"
FAILED = "failed.json"
PROGRESS = "progress.json"
ORIGIN = "origin.json"
RUNGS = "rungs.json"
LOGGED = ("mlflow.jsonl", "mlflow.json")
"""What the run logs for MLflow, and how much of it is there."""
STOPPED = "stopped.json"
INTERRUPT = "interrupt.json"
TIME = "time.json"
"""When the last attempt began and ended, where, and its seconds by phase."""
CHECKPOINTS = "checkpoints"
DIVERGED = "diverged"
"""The batches at which the loss was no number, or leapt."""
LOCK = "lock"
ALIVE = 120.0
"""Seconds without a sign of life after which a run on another machine counts as dead."""


class Busy(TitansError):
    """Another process is working on the run."""


@dataclass(frozen=True)
class RunFolder:
    """The files of one run under ``root/cells/<name>``."""

    root: Path
    name: str

    @property
    def path(self) -> Path:
        """The folder itself; it need not exist."""
        return self.root / "cells" / self.name

    def result(self) -> Result | None:
        """The finished run's numbers, or None; a file that names another run is not this one's."""
        found = Result.read(self.path / RESULT)
        return found if found and found.cell == self.name else None

    def shown_result(self) -> Result | None:
        """The result to show: the present one, or the one kept aside while it is made again."""
        return self.result() or Result.read(self.path / STALE_RESULT)

    def failure(self) -> dict[str, Any] | None:
        """Why the last attempt failed (keys reason, trace, time, commit), or None."""
        return read_json(self.path / FAILED)

    def progress(self) -> dict[str, Any] | None:
        """The run's last progress record (step, steps, loss, ...), with its ``age`` in seconds."""
        found = read_json(self.path / PROGRESS)
        if found is None:
            return None
        try:
            changed = (self.path / PROGRESS).stat().st_mtime
        except OSError:
            return None
        return {**found, "age": max(0.0, time.time() - changed)}

    def is_held(self) -> bool:
        """Whether a living process works on the run.

        Locks are not seen across machines on every file system: for a run that another machine began, a
        recent progress record counts too.
        """
        if is_locked(self.path / LOCK):
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

    def rungs(self) -> dict[int, float]:
        """What a search measured on the way, by optimiser step."""
        return {int(step): float(value) for step, value in (read_json(self.path / RUNGS) or {}).items()}

    def record_rung(self, step: int, value: float) -> None:
        """Keep what was measured after ``step`` steps."""
        write_json(self.path / RUNGS, {str(k): v for k, v in (self.rungs() | {step: value}).items()})

    def stop(self, reason: str) -> None:
        """Mark a run that a search will not train further."""
        write_json(self.path / STOPPED, {"reason": reason})

    def was_stopped(self) -> bool:
        """Whether a search has ended the run before its last step."""
        return (self.path / STOPPED).exists()

    def request_interrupt(self) -> bool:
        """Ask whoever trains the run to end at a checkpoint; false where it is past training."""
        if (self.progress() or {}).get("phase", "train") != "train":
            return False
        write_json(self.path / INTERRUPT, {"time": time.time()})
        return True

    def interrupt_requested(self) -> bool:
        """Whether somebody has asked, and it has not ended."""
        return (self.path / INTERRUPT).exists()

    def clear_interrupt(self) -> None:
        """Nobody has to ask any more."""
        (self.path / INTERRUPT).unlink(missing_ok=True)

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

    def begin(self, commit: str) -> bool:
        """Make ready for an attempt; whether it starts over because other code had begun the run.

        The numbers of a run come from one commit: what another left half-trained is deleted.
        """
        restarted = self.commit() not in (None, commit)
        if restarted:
            shutil.rmtree(self.path / CHECKPOINTS, ignore_errors=True)
            for name in (RUNGS, *LOGGED):
                (self.path / name).unlink(missing_ok=True)
        self.forget_failure()
        self.clear_interrupt()
        write_json(self.path / ORIGIN, {"commit": commit, "pid": os.getpid(), "host": platform.node()})
        return restarted

    def record_time(self, began: float, seconds: dict[str, float]) -> None:
        """Keep when an attempt that ends now began, and its seconds by phase."""
        where = {"pid": os.getpid(), "host": platform.node()}
        write_json(self.path / TIME, {"began": began, "ended": time.time(), "seconds": seconds, **where})

    def ended(self) -> float | None:
        """When the run gave its last sign of life, in seconds since 1970; None where it never did."""
        times = [path.stat().st_mtime for name in (PROGRESS, TIME) if (path := self.path / name).exists()]
        return max(times, default=None)

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
    def hold(self, wait: float = 90.0) -> Iterator[None]:
        """Hold the run's lock, which dies with the process. Busy if another has it after ``wait`` seconds.

        A driver killed a moment ago may leave a worker for some seconds, and the next one waits for it
        rather than write into the same folder.
        """
        with file_lock(self.path / LOCK, wait) as got:
            if not got:
                raise Busy(f"run {self.name}: another process works on it; wait for it, or stop it")
            yield
