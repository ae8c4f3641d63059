"""Loggers beside MLflow, TensorBoard and Weights & Biases, from a clone or a copy of this file:

titans train run.yaml --set log.loggers=[examples.loggers:TensorBoard]
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titans_platform.errors import UsageError
from titans_platform.runs.reporter import Logger
from titans_platform.runs.spec import RunSpec


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


def _import(module: str, logger: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        fix = f"pip install {error.name}, or remove it from log.loggers"
        raise UsageError(f"log.loggers: {logger}: {error.name} is not installed; {fix}") from None
