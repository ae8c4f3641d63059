"""`Result`: the numbers and provenance of a finished run, stored as ``result.json`` in its folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from titans_platform.files import read_json, write_json

Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""NaN where the file has null."""

PATHWAY_TITLES = {
    "memory": "memory's output off",
    "attention": "attention off",
    "cut": "attention cut at its window",
    "decay": "decay off",
}
"""What each of `EvalConfig.pathways` switches off."""
PATHWAYS_EXPLAINED = (
    "The trained model, measured again with a part of it off. What is lost without the memory's output, the "
    "memory carried; what is left, attention answered. Cut, attention does not cross multiples of its "
    "window, so that several layers reach no further than one window. With decay off (alpha = 0) nothing is "
    "forgotten."
)


class _Record(BaseModel):
    """Immutable. Unknown keys are ignored: another version may have written the file."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class TaskScore(_Record):
    """One task at one length."""

    value: Number
    stderr: float | None = None
    """Standard error of ``value`` over items."""
    chance: float | None = None
    floor: float | None = None
    heuristic: str | None = None
    """The heuristic that reaches the floor; None: no heuristic is better than chance."""
    items: int = 0


class Measures(_Record):
    """What `evals.evaluate` measures of a model."""

    columns: dict[str, Number] = Field(default_factory=dict)
    """By column of the table, the mean of its tasks."""
    tasks: dict[str, TaskScore] = Field(default_factory=dict)
    """By ``column/task@tokens``."""
    chance: dict[str, float | None] = Field(default_factory=dict)
    """Chance level of each column."""
    buckets: dict[str, dict[str, Number]] = Field(default_factory=dict)
    """By ``column/task@tokens``, the value in each bucket: a needle's depth, a position."""
    pathways: dict[str, dict[str, Number]] = Field(default_factory=dict)
    """By part of the model that was switched off, the columns of generated tasks without it."""


class Result(Measures):
    """The numbers of a finished run, and their provenance.

    Fields have defaults because files written by earlier versions lack some of them.
    """

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
    train_seconds: float = 0.0
    eval_seconds: float = 0.0
    peak_rss_bytes: int | None = None
    """Peak resident memory of the worker; None in files of earlier versions."""
    tokens: int = 0
    """Tokens trained on."""
    final_train_loss: float = math.nan
    """Mean loss of the last twentieth of the steps."""
    telemetry: dict[str, Any] = Field(default_factory=dict)
    """The inner memory at the last step that recorded it."""
    best_validation_loss: float | None = None
    best_step: int | None = None
    batches_left_out: int = 0
    rewinds: int = 0
    world_sizes: list[list[int]] = Field(default_factory=list)
    """[step, workers] for each change of the number of workers."""
    mlflow_run_id: str | None = None

    @property
    def steps(self) -> int:
        """Optimiser steps of the config."""
        return int(self.config["optim"]["steps"])

    @property
    def seconds(self) -> float:
        """Seconds of training and evaluation."""
        return self.train_seconds + self.eval_seconds

    def record(self) -> dict[str, Any]:
        """The result as a JSON value."""
        return self.model_dump(mode="json")

    def write(self, path: Path) -> None:
        """Write ``result.json`` atomically. Raises TitansError."""
        write_json(path, self.record())

    @staticmethod
    def read(path: Path) -> Result | None:
        """Read a result; None if the file is missing or does not hold a result."""
        found = read_json(path)
        try:
            return None if found is None else Result.model_validate(found)
        except ValidationError:
            return None
