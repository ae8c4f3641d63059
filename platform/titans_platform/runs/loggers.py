"""Loggers beside MLflow: TensorBoard, Weights & Biases, or a class of your own.

A run that resumes calls `Logger.start` with the step of its checkpoint; what was logged after that step
before the interruption is logged again, and a logger replaces it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titans_kernels import Registry
from titans_platform.errors import UsageError

if TYPE_CHECKING:
    from titans_platform.runs.spec import RunSpec


class Logger:
    """Receives a run's metrics on rank 0. A subclass overrides what it needs."""

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


class TensorBoard(Logger):
    """Event files in the run's folder under ``tensorboard``."""

    def __init__(self, spec: RunSpec):
        super().__init__(spec)
        self.folder: Path = spec.folder.path / "tensorboard"
        self._module = _import("tensorboardX", "tensorboard")

    def start(self, step: int) -> None:
        # events after the checkpoint are hidden: the resumed run logs them again
        self._writer = self._module.SummaryWriter(
            str(self.folder), purge_step=step + 1, filename_suffix=f".after-{step}"
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)

    def finish(self, step: int, columns: Mapping[str, float]) -> None:
        self.log(step, {f"eval/{name}": value for name, value in columns.items()})

    def close(self) -> None:
        if hasattr(self, "_writer"):
            self._writer.close()


class WeightsAndBiases(Logger):
    """A W&B run with the name of the run; WANDB_PROJECT and W&B's other variables apply."""

    def __init__(self, spec: RunSpec):
        super().__init__(spec)
        self._module = _import("wandb", "wandb")
        self._run: Any = None

    def start(self, step: int) -> None:
        self._run = self._module.init(
            id=self.spec.name,
            name=self.spec.tracking.title if self.spec.tracking else self.spec.name,
            group=self.spec.labels.get("study"),
            config=self.spec.config.model_dump(mode="json"),
            dir=str(self.spec.folder.path),
            # W&B ignores steps that it already has
            resume="allow",
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, step: int, columns: Mapping[str, float]) -> None:
        self._run.summary.update(dict(columns))

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


LOGGERS = Registry(
    "log.loggers",
    Logger,
    {
        "tensorboard": "titans_platform.runs.loggers:TensorBoard",
        "wandb": "titans_platform.runs.loggers:WeightsAndBiases",
    },
    UsageError,
)
"""Built-in loggers by the name used in ``log.loggers``."""


def open_loggers(spec: RunSpec) -> list[Logger]:
    """Open the loggers of a run's config. Raises UsageError: unknown, or not installed."""
    return [LOGGERS.find(name)(spec) for name in spec.config.log.loggers]


def _import(module: str, logger: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        fix = f"pip install {error.name}, or remove it from log.loggers"
        raise UsageError(f"log.loggers: {logger}: {error.name} is not installed; {fix}") from None
