"""One cell, whole: from its config to the numbers in result.json, through any number of interruptions."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from titans_core import Model
from titans_platform.config import RunConfig
from titans_platform.errors import UsageError
from titans_platform.files import read_json, write_json
from titans_platform.objectives import Data, Objective, build_objective
from titans_platform.provenance import commit, environment
from titans_platform.runs.folder import CHECKPOINTS, PROGRESS, RESULT, RUNGS, SECONDS, RunFolder
from titans_platform.training import checkpoint
from titans_platform.training.loop import Hooks, Trainer, deterministic
from titans_platform.training.timing import Phases

if TYPE_CHECKING:
    from titans_platform.tracking import RunLog

log = logging.getLogger(__name__)

CONFIG = "config.json"
# steps a run is logged at, and of these with the inner memory's telemetry
_LOGGED, _WATCHED, _SAVED = 200, 50, 10


@dataclass(frozen=True)
class Tracked:
    """Where in MLflow a cell is logged: the store's address and the run the driver created."""

    uri: str
    run_id: str


@dataclass(frozen=True)
class Rung:
    """Where a run is looked at on its way: after ``step`` steps, by one column."""

    step: int
    column: str


def cell_name(cfg: RunConfig, data: Data) -> str:
    """The cell's name: the hash of all its numbers are a function of."""
    return build_objective(cfg).run_name(data.fingerprint)


def check(cfg: RunConfig, data: Data, workers: int = 1) -> None:
    """Find before the training what would be found after it. Raises UsageError."""
    build_objective(cfg).check(data)
    if (rows := cfg.optim.global_batch_size) < workers:
        raise UsageError(f"optim.global_batch_size: {rows} rows cannot be shared by {workers} workers")


def run_cell(
    cfg: RunConfig,
    root: Path,
    name: str | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    tracked: Tracked | None = None,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
    rung: Rung | None = None,
    checkpoint_every: int | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Train and evaluate one cell, from where it stopped; the result, also in ``result.json``.

    ``name`` is the cell's folder, ``cell_name`` where None; ``extra`` goes into the result as it is. In a
    process group every rank calls this; rank 0 evaluates, writes and returns the result, the others return
    {}. With a ``rung`` the run stops there, at a checkpoint, and what is returned is {column: value}; the
    next call goes on. Raises UsageError, Diverged.
    """
    phases, objective = Phases(), build_objective(cfg)
    with phases.phase("data"):
        data = objective.open(root)
        folder = RunFolder(root.resolve(), name or cell_name(cfg, data))
    if (done := folder.result()) is not None:
        return done
    rank = dist.get_rank() if dist.is_initialized() else 0
    with phases.phase("record"):
        reporter = _Reporter(cfg, folder, on_progress, tracked) if rank == 0 else None
    try:
        with deterministic(cfg.seed, cfg.threads):
            trainer = _train(
                cfg,
                objective,
                data,
                folder,
                reporter,
                checkpoint_every,
                device,
                phases,
                rung.step if rung else None,
            )
            if rung:
                found = _measured(objective, data, trainer, rung.column)
                return reporter.reached(rung, found) if reporter else {}
            with phases.phase("evaluate"):
                if reporter:
                    reporter.phase("evaluate")
                started = time.perf_counter()
                assert isinstance(trainer.model, Model)
                measured = objective.evaluate(trainer.model, data, device=trainer.device)
                seconds = time.perf_counter() - started
            if reporter is None:
                return {}
            result = _result(cfg, objective, data, folder, trainer, reporter, measured, seconds)
            result |= dict(extra or {})
        with phases.phase("record"):
            reporter.close(result)
        write_json(folder.path / SECONDS, phases.seconds)
        reporter.finish(result)
        return result
    except BaseException as error:
        if reporter is not None:
            reporter.fail(error)
        raise


def _train(
    cfg: RunConfig,
    objective: Objective[Any],
    data: Data,
    folder: RunFolder,
    reporter: _Reporter | None,
    checkpoint_every: int | None,
    device: torch.device | str,
    phases: Phases,
    until: int | None = None,
) -> Trainer:
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with phases.phase("build"):
        check(cfg, data, world_size)
        stream = data.train_stream(cfg.optim.global_batch_size, cfg.seed, rank=rank, world_size=world_size)
        length = cfg.data.sequence_length
        trainer = Trainer(
            objective.build_model(), cfg.optim, stream, device, objective, sequence_length=length
        )
    checkpoints = folder.path / CHECKPOINTS
    with phases.phase("checkpoint"):
        checkpoint.restore(checkpoints, trainer)
    if reporter:
        reporter.start(trainer.progress.step)
    steps = cfg.optim.steps
    with phases.phase("train"), checkpoint.Saver(checkpoints, trainer, phases=phases) as saver:
        trainer.run(
            Hooks(
                on_step=reporter.on_step if reporter else lambda step, metrics: None,
                on_checkpoint=saver.save,
                checkpoint_every=checkpoint_every or min(500, max(1, steps // _SAVED)),
                telemetry_every=max(1, steps // _WATCHED),
                phases=phases,
            ),
            until,
        )
    return trainer


def _measured(objective: Objective[Any], data: Data, trainer: Trainer, column: str) -> dict[str, float]:
    """One column alone, of the model as it stands."""
    assert isinstance(trainer.model, Model)
    return objective.evaluate(trainer.model, data, [column], device=trainer.device)["columns"]


def _result(
    cfg: RunConfig,
    objective: Objective[Any],
    data: Data,
    folder: RunFolder,
    trainer: Trainer,
    reporter: _Reporter,
    measured: dict[str, Any],
    eval_seconds: float,
) -> dict[str, Any]:
    model, progress = trainer.model, trainer.progress
    assert isinstance(model, Model)
    return {
        "cell": folder.name,
        "seed": cfg.seed,
        "config": cfg.model_dump(mode="json"),
        "data_fingerprint": data.fingerprint,
        "eval_version": objective.eval_version(),
        # of the driver that began it: the tree may have moved on since
        "commit": folder.commit() or commit(),
        "environment": environment(),
        **measured,
        "parameters": model.num_parameters(),
        "state_bytes": model.state_bytes(cfg.data.sequence_length),
        "train_seconds": progress.seconds,
        "eval_seconds": eval_seconds,
        "tokens": progress.step * trainer.tokens_per_step,
        "final_train_loss": progress.final_loss,
        "telemetry": progress.telemetry,
        "mlflow_run_id": reporter.run_id,
    }


class _Reporter:
    """What a run says of itself while it goes on: progress.json once a second, and its MLflow run."""

    def __init__(
        self,
        cfg: RunConfig,
        folder: RunFolder,
        on_progress: Callable[[dict[str, Any]], None] | None,
        tracked: Tracked | None,
    ):
        self.steps = cfg.optim.steps
        self.folder = folder
        self.on_progress = on_progress
        self.run_id = tracked.run_id if tracked else None
        self._log = _open_log(tracked) if tracked else None
        self._written = 0.0
        self._rate: float | None = None
        self._seconds_a_step = 0.0
        self._state: dict[str, Any] = {
            "phase": "train",
            "step": 0,
            "steps": self.steps,
            "pid": os.getpid(),
        }
        self._last = time.monotonic()
        write_json(folder.path / CONFIG, cfg.model_dump(mode="json"))
        self._write()

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        now = time.monotonic()
        taken, self._last = now - self._last, now
        rate = metrics["tokens_per_second"]
        # the average forgets with a half-life of seven steps
        self._rate = rate if self._rate is None else 0.9 * self._rate + 0.1 * rate
        self._seconds_a_step = 0.9 * self._seconds_a_step + 0.1 * taken if self._seconds_a_step else taken
        self._state |= {
            "step": step,
            "loss": metrics["loss"],
            "tokens_per_second": self._rate,
            "eta_seconds": self._seconds_a_step * (self.steps - step),
        }
        if now - self._written > 1.0:
            self._write()
        every = max(1, self.steps // _LOGGED)
        if self._log and (step % every == 0 or step == self.steps or "surprise" in metrics):
            self._log.metrics(step, metrics)

    def start(self, step: int) -> None:
        """Training goes on after ``step`` steps."""
        self._last = time.monotonic()
        self._state["step"] = step
        self._write()

    def phase(self, name: str) -> None:
        self._state["phase"] = name
        self._write()

    def reached(self, rung: Rung, columns: dict[str, float]) -> dict[str, float]:
        """Keep what a rung measured, in the folder and in MLflow; the same columns."""
        path = self.folder.path / RUNGS
        write_json(path, (read_json(path) or {}) | {str(rung.step): columns[rung.column]})
        if self._log:
            self._log.metrics(rung.step, {f"rung.{name}": value for name, value in columns.items()})
            self._log.flush()
        return columns

    def close(self, result: dict[str, Any]) -> None:
        """End the MLflow run with the final numbers."""
        if self._log:
            try:
                self._log.summary(_summary(result))
                self._log.tags(_tags(result))
                self._log.close()
            except Exception as error:  # the numbers are in result.json whatever became of the store
                log.warning("cell %s: its MLflow run is not complete: %s", self.folder.name, error)

    def finish(self, result: dict[str, Any]) -> None:
        # last: who sees the result finds everything else of the cell complete
        self.phase("done")
        write_json(self.folder.path / RESULT, result)

    def fail(self, error: BaseException) -> None:
        if self._log:
            killed = isinstance(error, KeyboardInterrupt | SystemExit)
            with suppress(Exception):
                self._log.close("KILLED" if killed else "FAILED")

    def _write(self) -> None:
        self._written = time.monotonic()
        write_json(self.folder.path / PROGRESS, self._state)
        if self.on_progress:
            self.on_progress(dict(self._state))


def _open_log(tracked: Tracked) -> RunLog:
    # a second of imports that a run which is not tracked need not wait for
    from titans_platform.tracking import open_store

    return open_store(tracked.uri).run(tracked.run_id)


def _summary(result: dict[str, Any]) -> dict[str, float]:
    """The final numbers as flat metrics: columns and, below each, the tasks in it; size, time."""
    flat = dict(result["columns"])
    # @ is not allowed in a metric's name
    flat |= {name.replace("@", "/"): task["value"] for name, task in result["tasks"].items()}
    names = ("parameters", "state_bytes", "train_seconds", "eval_seconds", "final_train_loss")
    return flat | {name: result[name] for name in names}


def _tags(result: dict[str, Any]) -> dict[str, str]:
    """What the numbers were made of and with."""
    made = {f"titans.{name}": value for name, value in result["environment"].items()}
    return made | {
        "titans.commit": result["commit"],
        "mlflow.source.git.commit": result["commit"],
        "titans.data": result["data_fingerprint"],
        "titans.eval_version": result["eval_version"],
    }
