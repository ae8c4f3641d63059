"""What each worker of a run does: train from where it stopped, evaluate, write the result."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from titans_core import Model
from titans_platform.objectives import build_objective
from titans_platform.provenance import commit, environment
from titans_platform.runs.folder import CHECKPOINTS
from titans_platform.runs.reporter import Reporter
from titans_platform.runs.spec import Rung, RunSpec
from titans_platform.training import checkpoint
from titans_platform.training.loop import Hooks, Phases, Trainer, deterministic

# optimiser steps of a run at which the inner memory's telemetry is recorded
_WATCHED = 50


class Outcome(NamedTuple):
    """The result of a run, or at a rung {column: value}; and its seconds by phase."""

    result: dict[str, Any]
    seconds: dict[str, float]


def work(spec: RunSpec, until: Rung | None = None, device: torch.device | str = "cpu") -> Outcome:
    """Train and evaluate, from the last checkpoint on.

    In a process group every rank calls this and evaluates; rank 0 writes. Raises UsageError, Diverged.
    """
    return _Worker(spec, device).run(until)


class _Worker:
    """One rank of a run."""

    def __init__(self, spec: RunSpec, device: torch.device | str):
        self.spec, self.cfg, self.device = spec, spec.config, device
        self.rank, self.world_size = (
            (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        )
        self.phases = Phases()
        with self.phases.phase("data"):
            self.objective = build_objective(self.cfg)
            self.data = self.objective.open(spec.root)
        with self.phases.phase("record"):
            self.reporter = Reporter(spec) if self.rank == 0 else None

    def run(self, until: Rung | None) -> Outcome:
        try:
            with deterministic(self.cfg.seed, self.cfg.threads):
                trainer = self._trained(until)
                result = self._at_rung(trainer, until) if until else self._finished(trainer)
        except BaseException as error:
            if self.reporter:
                self.reporter.fail(error)
            raise
        return Outcome(result, dict(self.phases.seconds))

    def _trained(self, until: Rung | None) -> Trainer:
        with self.phases.phase("build"):
            self.objective.check(self.data)
            stream = self.data.train_stream(
                self.cfg.optim.global_batch_size, self.cfg.seed, rank=self.rank, world_size=self.world_size
            )
            trainer = Trainer(
                self.objective.build_model(),
                self.cfg.optim,
                stream,
                self.device,
                self.objective,
                sequence_length=self.cfg.data.sequence_length,
            )
        checkpoints = self.spec.folder.path / CHECKPOINTS
        with self.phases.phase("checkpoint"):
            checkpoint.restore(checkpoints, trainer)
        if self.reporter:
            self.reporter.start(trainer.progress.step)
        saver = checkpoint.Saver(checkpoints, trainer, keep=self.cfg.checkpoint.keep, phases=self.phases)
        with self.phases.phase("train"), saver:
            trainer.run(self._hooks(saver), until.step if until else None)
        return trainer

    def _hooks(self, saver: checkpoint.Saver) -> Hooks:
        reporter = self.reporter
        return Hooks(
            on_step=reporter.on_step if reporter else lambda step, metrics: None,
            # what a checkpoint covers is in MLflow before the checkpoint counts
            on_checkpoint=lambda: saver.save(reporter.flush if reporter else None),
            checkpoint_every=self.spec.checkpoint_interval,
            telemetry_every=max(1, self.cfg.optim.steps // _WATCHED),
            phases=self.phases,
        )

    def _measure(self, trainer: Trainer, *columns: str) -> dict[str, Any]:
        """These columns, all if none is given."""
        assert isinstance(trainer.model, Model)
        return self.objective.evaluate(trainer.model, self.data, columns, device=trainer.device)

    def _at_rung(self, trainer: Trainer, rung: Rung) -> dict[str, float]:
        measured = self._measure(trainer, rung.column)
        return self.reporter.reached(rung, measured["columns"]) if self.reporter else {}

    def _finished(self, trainer: Trainer) -> dict[str, Any]:
        started = time.perf_counter()
        if self.reporter:
            self.reporter.phase("evaluate")
        with self.phases.phase("evaluate"):
            measured = self._measure(trainer)
        if not self.reporter:
            return {}
        result = self._result(trainer, measured) | {"eval_seconds": time.perf_counter() - started}
        with self.phases.phase("record"):
            self.reporter.close(result)
            self.reporter.finish(result)
        return result

    def _result(self, trainer: Trainer, measured: dict[str, Any]) -> dict[str, Any]:
        """All that is kept of the run: numbers, and what they are a function of."""
        model, progress, cfg = trainer.model, trainer.progress, self.cfg
        assert isinstance(model, Model)
        assert self.reporter
        return {
            "cell": self.spec.name,
            "seed": cfg.seed,
            "config": cfg.model_dump(mode="json"),
            "data_fingerprint": self.data.fingerprint,
            "eval_version": self.objective.eval_version(),
            # of the driver that began it: the tree may have moved on since
            "commit": self.spec.folder.commit() or commit(),
            "environment": environment(),
            **measured,
            "parameters": model.num_parameters(),
            "state_bytes": model.state_bytes(cfg.data.sequence_length),
            "train_seconds": progress.seconds,
            "tokens": progress.step * trainer.tokens_per_step,
            "final_train_loss": progress.final_loss,
            "telemetry": progress.telemetry,
            "mlflow_run_id": self.reporter.run_id,
            **self.spec.labels,
        }
