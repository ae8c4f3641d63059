"""Reports of a run while it trains: progress, once a second, and metrics.jsonl, sent to MLflow.

Training never waits for the server and no step is lost: metrics.jsonl is an append-only file with one line
per step, durable before a checkpoint is committed. A thread sends it in order; after a request without an
answer it looks up what the server has before it retries.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titans_kernels import Registry
from titans_platform.errors import Interrupted, StorageError, TitansError, UsageError, one_line
from titans_platform.files import write_error, write_json, write_text
from titans_platform.runs.folder import CHECKPOINTS, METRICS, RESULT, Result, RunFolder, runs_under
from titans_platform.runs.spec import RunSpec, Tracking
from titans_platform.text import flatten
from titans_platform.training.checkpoint import last_step, step_of

if TYPE_CHECKING:
    from titans_platform.tracking import RunLog, TrackingStore

log = logging.getLogger(__name__)

SEND_EVERY = 5.0
"""Seconds between requests; doubled after each failure, up to a minute."""
END_SECONDS = 10.0
"""Seconds that the end of a run waits for unsent lines."""
_LINES = 100
"""Steps per request."""
_LOSSES = 200
"""Approximate number of steps per run whose losses are logged to MLflow."""
DETAILED = 50
"""Number of steps per run whose other metrics are logged too, the inner memory's telemetry among them."""
LOSSES = frozenset({"loss", "validation_loss"})
FINAL = ["parameters", "state_bytes", "peak_rss_bytes", "train_seconds", "eval_seconds", "final_train_loss"]
"""Fields of a result that are logged with its columns and tasks."""
PARAMS = (
    "model.variant", "model.memory.depth", "model.memory.chunk_size", "model.d_model", "model.n_layers",
    "data.sequence_length", "optim.steps", "optim.global_batch_size", "optim.lr",
)  # fmt: skip
"""Fields of the config that are params of every run in MLflow."""
_MEMORY = 0.9
"""Decay per step of the moving averages of speed; a half-life of about seven steps."""
COMPILING = 2
"""First steps of a run on a GPU, which take minutes to compile and say nothing of the speed of others."""


class Logger:
    """Receives a run's metrics on rank 0, beside MLflow. A subclass overrides what it needs.

    A run that resumes calls `start` with the step of its checkpoint; what was logged after that step before
    the interruption is logged again, and a logger replaces it.
    """

    def __init__(self, spec: RunSpec):
        """``spec`` is the run: its config, name, folder and labels. Raises UsageError."""
        self.spec = spec

    def start(self, step: int) -> None:
        """Training starts, or resumes after ``step`` optimiser steps."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of an optimiser step: loss, tokens_per_second, lr, the memory's telemetry."""

    def finish(self, step: int, columns: Mapping[str, float]) -> None:
        """Log the measures ``columns`` after the run's evaluation."""

    def close(self) -> None:
        """Close the log at the end of the run, also after an error."""


LOGGERS = Registry("log.loggers", Logger, {}, UsageError)
"""Loggers by the names of ``log.loggers``, which are import paths unless a process registers others."""


class Reporter:
    """Writes the files of a run and its MLflow run. On rank 0 only."""

    def __init__(self, spec: RunSpec):
        self.folder, self.steps = spec.folder, spec.config.optim.steps
        self._written, self._full = 0.0, False
        self._tokens, self._seconds = spec.config.tokens_per_step, 0.0
        on_gpu = spec.resources.gpus_per_worker > 0 and spec.config.optim.compile is not False
        step = last_step(self.folder.path / CHECKPOINTS)
        phase, self._compiling = ("compile", COMPILING) if on_gpu else ("train", 0)
        self._state: dict[str, Any] = {"phase": phase, "step": step, "steps": self.steps, "pid": os.getpid()}
        self._last = time.monotonic()
        self._loggers = [LOGGERS.find(name)(spec) for name in spec.config.log.loggers]
        progress = self._state | {"time": time.time()}
        self.folder.update(config=spec.config.model_dump(mode="json"), progress=progress)
        if spec.start and not (self.folder.path / METRICS).exists():
            copy_metrics(RunFolder.at(spec.start.parents[1]), self.folder, step_of(spec.start))
        self.journal = Journal(self.folder, (lambda: connected(self.folder)) if spec.tracking else None)
        if spec.tracking:
            # a later command that sends what is unsent must know where
            tags = {"titans.commit": spec.commit, "titans.data": spec.data, **spec.tracking.tags}
            self.journal.keep(tracking=asdict(replace(spec.tracking, tags=tags)), ended=None)
            self.journal.start()

    def start(self, step: int) -> None:
        """Report that training starts or resumes after ``step`` steps."""
        self._last = time.monotonic()
        self._state["step"] = step
        self._write()
        for logger in self._loggers:
            logger.start(step)

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        """Report the metrics of a step; only a sample of the steps is logged."""
        now = time.monotonic()
        taken, self._last = now - self._last, now
        compiled, self._compiling = not self._compiling, max(0, self._compiling - 1)
        phase = "compile" if self._compiling else "train"
        self._state |= {"step": step, "loss": metrics["loss"], "phase": phase}
        if compiled:
            # seconds of a step, validation and checkpoints included
            self._seconds = _MEMORY * self._seconds + (1 - _MEMORY) * taken if self._seconds else taken
            self._state |= {"tokens_per_second": self._tokens / max(self._seconds, 1e-9)}
            self._state |= {"eta_seconds": self._seconds * (self.steps - step)}
        # shown until the next validation
        self._state |= {key: value for key, value in metrics.items() if key == "validation_loss"}
        if now - self._written > 1.0:
            self._write()
        logged = metrics
        if not _due(step, self.steps, DETAILED):
            if not (_due(step, self.steps, _LOSSES) or "validation_loss" in metrics):
                return
            logged = {key: metrics[key] for key in LOSSES & metrics.keys()}
        self.journal.metrics(step, logged)
        self._tell(lambda logger: logger.log(step, logged))

    def phase(self, name: str) -> None:
        """Report the run's phase: compile, train, evaluate or done."""
        self._state["phase"] = name
        self._write()

    def reached(self, step: int, columns: Mapping[str, float]) -> None:
        """Record the one column that was measured at a rung, in the folder and in MLflow."""
        ((name, value),) = columns.items()
        rungs = self.folder.record().get("rungs", {})
        self.folder.update(rungs=rungs | {name: self.folder.rungs(name) | {step: value}})
        self.journal.metrics(step, {f"rung.{name}": value})
        # the next rung opens its own journal
        self._end(lambda run: None, None)

    def finish(self, result: Result) -> None:
        """End the MLflow run, then write result.json, so that everything else is complete once it exists.

        The result is written even if MLflow cannot be reached.
        """
        self._tell(lambda logger: logger.finish(result.steps, result.columns))
        self._end(lambda run: log_result(run, result), "FINISHED")
        self.phase("done")
        write_json(self.folder.path / RESULT, result.record())
        self.folder.update(stale=None)

    def fail(self, error: BaseException) -> None:
        """End the MLflow run, as KILLED if the run was interrupted, else as FAILED."""
        status = "KILLED" if isinstance(error, KeyboardInterrupt | SystemExit | Interrupted) else "FAILED"
        with suppress(Exception):
            self.journal.sync()
        self._end(lambda run: run.close(status, failure=one_line(error)), status)

    def _tell(self, call: Callable[[Logger], None]) -> None:
        """Call each logger; one that fails is warned about and left out from then on."""
        for logger in list(self._loggers):
            try:
                call(logger)
            except Exception as error:
                log.warning("log.loggers: %s: %s", type(logger).__name__, one_line(error))
                self._loggers.remove(logger)

    def _end(self, end: Callable[[RunLog], object], status: str | None) -> None:
        if left := self.journal.close(end, status):
            # the command that started the run retries once and reports what is unsent
            log.info(left)
        self._tell(lambda logger: logger.close())

    def _write(self) -> None:
        self._written = time.monotonic()
        try:
            self.folder.update(progress=self._state | {"time": time.time()})
            self._full = False
        except StorageError as error:
            # warn once: whether a full disk stops the run is decided, and logged, at each checkpoint
            if not self._full:
                log.warning("%s", error)
            self._full = True


def log_result(run: RunLog, result: Result, ended: float | None = None) -> None:
    """Log a result to an MLflow run and end it: columns, tasks with standard errors, sizes, times, code.

    ``ended`` is the end time in seconds since the epoch; None: now.
    """
    values: dict[str, Any] = dict(result.columns)
    for name, task in result.tasks.items():
        values |= {name: task.value, f"{name}/stderr": task.stderr}
    values |= {name: getattr(result, name) for name in FINAL}
    run.summary({name: value for name, value in values.items() if value is not None}, result.steps)
    origin = {"commit": result.commit, "data": result.data_fingerprint, "eval_version": result.eval_version}
    tags = {f"titans.{name}": value for name, value in (result.environment | origin).items()}
    run.tags(tags | {"mlflow.source.git.commit": result.commit})
    run.close(ended=ended)


def end_orphans(store: TrackingStore, parent: str, root: Path) -> None:
    """End the MLflow runs below ``parent`` whose processes died."""
    for name, run_id in store.running(parent).items():
        folder = RunFolder(root, name)
        if folder.state() != "running":
            _end(folder)[0](store.run(run_id))


def connected(folder: RunFolder) -> RunLog:
    """Open the MLflow run of a run's folder, or create it. Raises UsageError and MLflow's exceptions."""
    # these imports take a second, which an untracked run need not wait for
    from titans_platform.tracking import open_store

    record = folder.record()
    tracking, config = Tracking(**record["mlflow"]["tracking"]), record["config"]
    store = open_store(tracking.uri)
    if record["mlflow"].get("outdated"):
        # it has the steps of another commit, see `RunFolder.begin`
        store.discard_cell(folder.name)
    params = {"row": tracking.tags.get("titans.row", tracking.title), "seed": config["seed"]}
    fields = flatten(config)
    params |= {field: fields[field] for field in (*PARAMS, *tracking.params) if field in fields}
    run_id = store.cell_run(
        folder.name, tracking.title, parent=tracking.parent, params=params, config=config, tags=tracking.tags
    )
    return store.run(run_id)


def copy_metrics(source: RunFolder, target: RunFolder, last: int) -> None:
    """Begin the metrics of a run with another run's up to step ``last``."""
    lines = _lines(source.path / METRICS, 0, _size(source.path / METRICS))
    kept = [json.dumps(entry) + "\n" for entry, _ in lines if entry["step"] <= last]
    write_text(target.path / METRICS, "".join(kept))


def send_left(root: Path) -> list[str]:
    """Send the unsent logs of all runs under ``root`` that no process holds. Returns the failures."""
    left = (folder for folder in runs_under(root) if unsent(folder) and not folder.is_held())
    lines = (Journal(folder, partial(connected, folder)).close(*_end(folder)) for folder in left)
    return [line for line in lines if line]


def _end(folder: RunFolder) -> tuple[Callable[[RunLog], None], str]:
    """Last call on the MLflow run of a folder in which nothing runs, and the status it ends with."""
    if result := folder.result():
        return lambda run: log_result(run, result, folder.ended()), "FINISHED"
    status, reason = "FINISHED" if folder.was_stopped() else "KILLED", ""
    if failure := folder.failure():
        status, reason = "FAILED", failure["reason"]
    return lambda run: run.close(status, folder.ended(), reason), status


def _due(step: int, steps: int, times: int) -> bool:
    """Return True if a step is one of about ``times`` evenly spaced ones that end with ``steps``."""
    return step % max(1, steps // times) == 0 or step == steps


class Journal:
    """The metrics of one run, with a single writer. ``connect`` opens its MLflow run, or raises."""

    def __init__(self, folder: RunFolder, connect: Callable[[], RunLog] | None):
        self._folder, self._file, self._connect = folder, folder.path / METRICS, connect
        self._run: RunLog | None = None
        self._lock, self._wake, self._over = threading.Lock(), threading.Event(), False
        self._waiting: list[bytes] = []
        if self._file.exists():
            os.truncate(self._file, _size(self._file))
        self._size = _size(self._file)
        self._state: dict[str, Any] = folder.record().get("mlflow", {})
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
        if not self._connect:
            return None
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
            self.keep(ended=status)
        except Exception as error:
            run, steps = self._file.parent.name, sum(1 for _ in _lines(self._file, self._sent, self._size))
            lost = f"{steps} steps of its log" if steps else "its end"
            return (
                f"run {run}: {lost} did not reach MLflow ({one_line(error, 120)}); kept in {self._file} and "
                "sent by the next titans train, sweep run or ui"
            )
        return None

    def _write(self) -> None:
        """Append the waiting lines; a partial write is truncated."""
        if not (data := b"".join(self._waiting)):
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
            assert self._connect
            self._run = self._connect()
            self.keep(run_id=self._run.run_id, ended=None, outdated=False)
        while self._sent < (size := self._size):
            batch = list(islice(_lines(self._file, self._sent, size), _LINES))
            self._run.send([(entry["step"], entry["time"], entry["values"]) for entry, _ in batch])
            self._sent = batch[-1][1]
            self.keep(sent=self._sent)

    def keep(self, **state: Any) -> None:
        """Record the state of what has been sent."""
        self._state |= state
        self._folder.update(mlflow=self._state)


def curve(folder: Path, metric: str = "loss") -> list[tuple[int, float]]:
    """Return a metric of a run by step, from its journal; empty if the folder has none."""
    path = folder / METRICS
    entries = [entry for entry, _ in _lines(path, 0, _size(path))]
    return sorted((entry["step"], entry["values"][metric]) for entry in entries if metric in entry["values"])


def unsent(folder: RunFolder) -> bool:
    """Return True if MLflow lacks part of a run's log. The run must not be held by a process."""
    if (state := folder.record().get("mlflow")) is None:
        return False
    return state.get("sent", 0) < _size(folder.path / METRICS) or state.get("ended") is None


def _size(path: Path) -> int:
    """Bytes of the whole lines of a file, without the partial one that a killed process may have left."""
    return path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0


def _lines(path: Path, start: int, end: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the entries between two byte offsets of the file, each with the offset of its end."""
    if start >= end:
        return
    with path.open("rb") as file:
        file.seek(start)
        while start < end:
            line = file.readline()
            start += len(line)
            yield json.loads(line), start
