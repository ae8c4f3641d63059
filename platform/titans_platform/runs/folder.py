"""The folder of a run: its files, its result, and the run's state, which is read from the files alone.

The folder is named by a hash of everything the run's numbers depend on. Another process can read the state
while a study runs, or after it has died.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from titans_platform import text
from titans_platform.errors import TitansError
from titans_platform.files import file_lock, is_locked, read_json, write_bytes, write_json

Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""NaN where the file has null."""


class TaskScore(BaseModel, frozen=True):
    """One task at one length."""

    value: Number
    stderr: float | None = None
    """Standard error of ``value`` over items."""
    chance: float | None = None
    floor: float | None = None
    heuristic: str | None = None
    """The heuristic that reaches the floor; None: no heuristic is better than chance."""
    items: int = 0


class Result(BaseModel, frozen=True):
    """The numbers of a run, of which `evals.evaluate` measures the first four, and their provenance.

    Unknown keys are ignored: another version may have written the file.
    """

    columns: dict[str, Number] = Field(default_factory=dict)
    """By column of the table, the mean of its tasks."""
    tasks: dict[str, TaskScore] = Field(default_factory=dict)
    """By ``column/task@tokens``."""
    chance: dict[str, float | None] = Field(default_factory=dict)
    """Chance level of each column."""
    buckets: dict[str, dict[str, Number]] = Field(default_factory=dict)
    """By ``column/task@tokens``, the value in each bucket: a needle's depth, a position."""
    cell: str
    """Name of the run."""
    study: str = ""
    row: str = ""
    seed: int = 0
    config: dict[str, Any] = Field(default_factory=dict)
    """The run's config as JSON, which may be of an earlier version."""
    data_fingerprint: str = ""
    eval_version: str = ""
    commit: str = ""
    """The commit of the code that started the run."""
    environment: dict[str, Any] = Field(default_factory=dict)
    """Versions, device and instruction set of the process that finished the run."""
    forms: list[str] = Field(default_factory=list)
    """Forms of the operators that were used."""
    parameters: int | None = None
    state_bytes: int | None = None
    """Bytes of the state of one sequence after ``data.sequence_length`` tokens."""
    finished: str = ""
    """When the run was measured, UTC."""
    train_seconds: float = 0.0
    eval_seconds: float = 0.0
    peak_rss_bytes: int | None = None
    """Peak resident memory of the worker."""
    tokens: int = 0
    """Tokens trained on."""
    final_train_loss: float = math.nan
    """Mean loss of the last twentieth of the steps."""
    telemetry: dict[str, Any] = Field(default_factory=dict)
    """The inner memory at the last step that recorded it."""
    best_validation_loss: float | None = None
    best_step: int | None = None
    world_sizes: list[list[int]] = Field(default_factory=list)
    """[step, workers] for each change of the number of workers."""
    mlflow_run_id: str | None = None

    @property
    def steps(self) -> int:
        """Optimiser steps of the config."""
        return int(self.config["optim"]["steps"])

    @property
    def plain_forms(self) -> list[str]:
        """The forms of the memory that ran on a GPU without kernels of ours."""
        if str(self.environment.get("device", "CPU")).startswith("CPU"):
            return []
        names = (form.removeprefix("neural_memory: ") for form in self.forms)
        return [name for name in names if name in ("chunked", "generic", "reference")]

    @property
    def seconds(self) -> float:
        """Seconds of training and evaluation."""
        return self.train_seconds + self.eval_seconds

    def record(self) -> dict[str, Any]:
        """Return the result as a JSON value."""
        return self.model_dump(mode="json")


RECORD = "run.json"
"""Everything about a run but its metrics and its result; see `RunFolder.record`."""
METRICS = "metrics.jsonl"
RESULT = "result.json"
INTERRUPT = "interrupt"
"""There while a request to stop at a checkpoint is pending."""
CHECKPOINTS = "checkpoints"
TOKENIZER = "tokenizer"
"""Stem of the copy of the tokenizer's file; a built-in tokenizer has none."""
DIVERGED = "diverged"
"""The batch whose loss was not finite."""
SHOWN = 600
"""Characters of a failure's reason; its trace has the rest."""
LOCK = "lock"
ALIVE = 120.0
"""Seconds without progress after which a run on another machine counts as dead."""
_updating = threading.Lock()
"""The thread that sends metrics and the one that trains write the same record."""


class Busy(TitansError):
    """Another process is working on the run."""


@dataclass(frozen=True)
class RunFolder:
    """The files of one run under ``root/cells/<name>``."""

    root: Path
    name: str

    @staticmethod
    def at(path: Path) -> RunFolder:
        """Return the run whose folder is ``path``."""
        return RunFolder(path.parents[1], path.name)

    @property
    def path(self) -> Path:
        """The folder's path; the folder need not exist."""
        return self.root / "cells" / self.name

    def record(self) -> dict[str, Any]:
        """Read the content of ``run.json``; empty before the run has begun.

        ``config``; ``commit``; ``began``, ``host`` and ``pid`` of the last attempt; ``progress``;
        ``attempt``, its begin, end and seconds by phase; ``failure``, why it failed; ``stale``, the result
        before a repetition; ``rungs`` and ``stopped`` of a search; ``mlflow``, where the metrics go and how
        much of them has been sent; ``tags``; ``data`` and ``tokenizer``, their fingerprints.
        """
        return read_json(self.path / RECORD) or {}

    def update(self, **fields: Any) -> None:
        """Set fields of ``run.json``, None to delete them; only a process that holds the run, or its worker.

        Raises TitansError that names the file.
        """
        with _updating:
            record = self.record() | fields
            write_json(self.path / RECORD, {k: v for k, v in record.items() if v is not None})

    def result(self) -> Result | None:
        """Return the result of the finished run, or None; a file that names another run is ignored."""
        try:
            result = Result.model_validate_json((self.path / RESULT).read_bytes())
        except (OSError, ValidationError):
            return None
        return result if result.cell == self.name else None

    def shown_result(self) -> Result | None:
        """Return the result to show: the current one, or else the stale one while the run is repeated."""
        stale = self.record().get("stale")
        return self.result() or (Result.model_validate(stale) if stale else None)

    def keep_data(self, data: Any, files: Mapping[str, str]) -> None:
        """Record the data's fingerprint and the hashes of its tasks' files; copy its tokenizer's file."""
        tokenizer = getattr(data, "tokenizer", None)
        if tokenizer and tokenizer.path:
            write_bytes(self.path / f"{TOKENIZER}{tokenizer.path.suffix}", tokenizer.path.read_bytes())
        self.update(data=data.fingerprint, tokenizer=tokenizer and tokenizer.fingerprint, files=files)

    def failure(self) -> dict[str, Any] | None:
        """Return the last attempt's failure (keys reason, trace, time, commit), or None."""
        return self.record().get("failure")

    def progress(self) -> dict[str, Any] | None:
        """Return the last progress (step, steps, loss, ...), and its ``age`` in seconds; None without any."""
        if progress := self.record().get("progress"):
            progress["age"] = max(0.0, time.time() - progress.get("time", 0.0))
        return progress

    def study_run_id(self) -> str | None:
        """Return the MLflow run id of the study that last trained the run; None: it was trained by itself."""
        return self.record().get("mlflow", {}).get("tracking", {}).get("parent")

    def is_held(self) -> bool:
        """Return True if a live process holds the run.

        Some file systems do not share locks between machines, so for a run that another machine began a
        recent progress record counts too.
        """
        if is_locked(self.path / LOCK):
            return True
        record, progress = self.record(), self.progress()
        elsewhere = record.get("host", platform.node()) != platform.node()
        if not elsewhere or progress is None or "failure" in record:
            return False
        ended = record.get("attempt", {}).get("ended", 0.0) >= progress.get("time", 0.0)
        return not ended and progress["age"] < ALIVE

    def state(self) -> str:
        """Return done, running, failed, interrupted (begun, but no process holds it) or missing."""
        if self.result():
            return "done"
        if self.is_held():
            return "running"
        record = self.record()
        if "failure" in record:
            return "failed"
        return "interrupted" if "progress" in record else "missing"

    def rungs(self, metric: str) -> dict[int, float]:
        """Return a search's metric at each rung, by optimiser step."""
        rungs = self.record().get("rungs", {}).get(metric, {})
        return {int(step): float(value) for step, value in rungs.items()}

    def was_stopped(self, search: str = "") -> bool:
        """Return True if a search stopped the run early; with a search's key, if this one did."""
        stopped = self.record().get("stopped", {})
        return search in stopped if search else bool(stopped)

    def request_interrupt(self) -> bool:
        """Ask the process that trains the run to stop at a checkpoint; False if training is over."""
        if (self.progress() or {}).get("phase", "train") not in ("compile", "train"):
            return False
        self.path.mkdir(parents=True, exist_ok=True)  # a signal may come before the first record
        (self.path / INTERRUPT).touch()
        return True

    def interrupt_requested(self) -> bool:
        """Return True if an interrupt is pending."""
        return (self.path / INTERRUPT).exists()

    def clear_interrupt(self) -> None:
        """Withdraw the request."""
        (self.path / INTERRUPT).unlink(missing_ok=True)

    def record_failure(self, error: BaseException, commit: str) -> None:
        """Record why the attempt failed, for the table and for the next attempt."""
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        if len(reason) > SHOWN:  # such as torch.compile's, with pages of C++ frames
            reason = f"{reason[: SHOWN // 2]} ... {reason[-SHOWN // 2 :]}"
        trace = "".join(traceback.format_exception(error))[-8000:]
        self.update(failure={"reason": reason, "trace": trace, "commit": commit, "time": time.time()})

    def commit(self) -> str | None:
        """Return the commit that began the run, or None before it has begun."""
        return self.record().get("commit")

    def why_restarted(self, commit: str) -> str | None:
        """Return why `begin` deletes the checkpoints of an interrupted run; None if it keeps them."""
        before, step = self.commit(), self.record().get("progress", {}).get("step")
        resumable = step and self.state() in ("interrupted", "failed") and (self.path / CHECKPOINTS).exists()
        if before in (None, commit) or not resumable:
            return None
        return f"restarts from step 0; to keep its {step:,} steps, check out commit {text.commit(before)}"

    def begin(self, commit: str) -> None:
        """Prepare for an attempt.

        All numbers of a run come from one commit, so the checkpoints and metrics of another are deleted.
        """
        self.clear_interrupt()
        fields: dict[str, Any] = {"commit": commit, "pid": os.getpid(), "host": platform.node()}
        fields["began"] = time.time()
        if self.commit() not in (None, commit):
            shutil.rmtree(self.path / CHECKPOINTS, ignore_errors=True)
            (self.path / METRICS).unlink(missing_ok=True)
            logged = self.record().get("mlflow")
            # the journal deletes that run when it reaches MLflow
            fields["mlflow"] = logged and {"tracking": logged["tracking"], "outdated": True}
            fields["rungs"] = None
        self.update(failure=None, **fields)

    def record_attempt(self) -> None:
        """Record the attempt that ends now."""
        attempt = {"began": self.record().get("began"), "ended": time.time(), "host": platform.node()}
        self.update(attempt=attempt)

    def ended(self) -> float | None:
        """Return the time of the run's last record, in seconds since the epoch; None if it has none."""
        record = self.record()
        times = record.get("progress", {}).get("time"), record.get("attempt", {}).get("ended")
        return max(filter(None, times), default=None)

    def set_aside(self) -> None:
        """Mark a finished result as stale, to repeat the run from the start; it is shown until replaced."""
        result = self.result()
        self.update(progress=None, **({"stale": result.record()} if result else {}))
        (self.path / RESULT).unlink(missing_ok=True)
        shutil.rmtree(self.path / CHECKPOINTS, ignore_errors=True)

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


def runs_under(root: Path) -> list[RunFolder]:
    """List the runs of a storage root, by name."""
    return [RunFolder(root, path.name) for path in sorted((root / "cells").glob("*")) if path.is_dir()]
