"""The folder of a run: its files, and the run's state, which is read from the files alone.

The folder is named by a hash of everything the run's numbers depend on. Another process can read the state
while a study runs, or after it has died.
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
"""The journal of what the run logs, and how much of it MLflow has."""
STOPPED = "stopped.json"
INTERRUPT = "interrupt.json"
TIME = "time.json"
"""When the last attempt began and ended, where, and its seconds by phase."""
CHECKPOINTS = "checkpoints"
DIVERGED = "diverged"
"""Batches whose loss was not finite, or spiked."""
LOCK = "lock"
ALIVE = 120.0
"""Seconds without progress after which a run on another machine counts as dead."""


class Busy(TitansError):
    """Another process is working on the run."""


@dataclass(frozen=True)
class RunFolder:
    """The files of one run under ``root/cells/<name>``."""

    root: Path
    name: str

    @property
    def path(self) -> Path:
        """The folder's path; the folder need not exist."""
        return self.root / "cells" / self.name

    def result(self) -> Result | None:
        """The result of the finished run, or None; a file that names another run is ignored."""
        found = Result.read(self.path / RESULT)
        return found if found and found.cell == self.name else None

    def shown_result(self) -> Result | None:
        """The result to show: the current one, or else the stale one while the run is repeated."""
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
        """Whether a live process holds the run.

        Some file systems do not share locks between machines, so for a run that another machine began a
        recent progress record counts too.
        """
        if is_locked(self.path / LOCK):
            return True
        origin, progress = read_json(self.path / ORIGIN) or {}, self.progress()
        elsewhere = origin.get("host", platform.node()) != platform.node()
        return elsewhere and progress is not None and progress["age"] < ALIVE

    def state(self) -> str:
        """One of done, running, failed, interrupted (begun, but no process holds it), missing."""
        if self.result():
            return "done"
        if self.is_held():
            return "running"
        if self.failure():
            return "failed"
        return "interrupted" if (self.path / PROGRESS).exists() else "missing"

    def rungs(self) -> dict[int, float]:
        """What a search measured at each rung, by optimiser step."""
        return {int(step): float(value) for step, value in (read_json(self.path / RUNGS) or {}).items()}

    def record_rung(self, step: int, value: float) -> None:
        """Record what was measured after ``step`` steps."""
        write_json(self.path / RUNGS, {str(k): v for k, v in (self.rungs() | {step: value}).items()})

    def stop(self, reason: str) -> None:
        """Mark a run that a search will not train further."""
        write_json(self.path / STOPPED, {"reason": reason})

    def was_stopped(self) -> bool:
        """Whether a search stopped the run early."""
        return (self.path / STOPPED).exists()

    def request_interrupt(self) -> bool:
        """Ask the process that trains the run to stop at a checkpoint; False if training is over."""
        if (self.progress() or {}).get("phase", "train") != "train":
            return False
        write_json(self.path / INTERRUPT, {"time": time.time()})
        return True

    def interrupt_requested(self) -> bool:
        """Whether an interrupt is pending."""
        return (self.path / INTERRUPT).exists()

    def clear_interrupt(self) -> None:
        """Withdraw the request."""
        (self.path / INTERRUPT).unlink(missing_ok=True)

    def record_failure(self, error: BaseException, commit: str) -> None:
        """Record why the attempt failed, for the table and for the next attempt."""
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        trace = "".join(traceback.format_exception(error))[-8000:]
        write_json(
            self.path / FAILED, {"reason": reason, "trace": trace, "commit": commit, "time": time.time()}
        )

    def forget_failure(self) -> None:
        """Delete the record of the last failure, before a new attempt."""
        (self.path / FAILED).unlink(missing_ok=True)

    def commit(self) -> str | None:
        """The commit that began the run, or None before it has begun."""
        return (read_json(self.path / ORIGIN) or {}).get("commit")

    def begin(self, commit: str) -> bool:
        """Prepare for an attempt. Returns whether the run starts over because another commit had begun it.

        All numbers of a run come from one commit, so the checkpoints and logs of another are deleted.
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
        """Record when the attempt that ends now began, and its seconds by phase."""
        where = {"pid": os.getpid(), "host": platform.node()}
        write_json(self.path / TIME, {"began": began, "ended": time.time(), "seconds": seconds, **where})

    def ended(self) -> float | None:
        """When the run last recorded anything, in seconds since the epoch; None if it never did."""
        times = [path.stat().st_mtime for name in (PROGRESS, TIME) if (path := self.path / name).exists()]
        return max(times, default=None)

    def set_aside(self) -> None:
        """Mark a finished result as stale, to repeat the run from the start; it is shown until replaced."""
        if self.result():
            os.replace(self.path / RESULT, self.path / STALE_RESULT)
        shutil.rmtree(self.path / CHECKPOINTS, ignore_errors=True)
        (self.path / PROGRESS).unlink(missing_ok=True)

    def drop_stale(self) -> None:
        """Delete the stale result once there is a new one."""
        if self.result():
            (self.path / STALE_RESULT).unlink(missing_ok=True)

    @contextmanager
    def hold(self, wait: float = 90.0) -> Iterator[None]:
        """Hold the run's lock, which is released when the process dies.

        A driver that was just killed can leave a worker behind for some seconds; the next driver waits for it
        rather than write into the same folder. Raises Busy if another process still holds the lock after
        ``wait`` seconds.
        """
        with file_lock(self.path / LOCK, wait) as got:
            if not got:
                raise Busy(f"run {self.name}: another process works on it; wait for it, or stop it")
            yield
