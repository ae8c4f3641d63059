"""The interface of an objective (data, model, loss and metrics of a run) and the registry of objectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from titans_core import Model
from titans_core.config import Frozen
from titans_kernels import Registry
from titans_platform.config import DataConfig, ObjectiveConfig, RunConfig
from titans_platform.data import Tokenizer
from titans_platform.data.parts import PrepareProgress
from titans_platform.errors import UsageError, within
from titans_platform.loading import validate
from titans_platform.tasks import build_task, eval_version, row_length
from titans_platform.training.loop import Stream
from titans_platform.training.optim import check_windows


class Data(Protocol):
    """Prepared data, ready to train on."""

    @property
    def fingerprint(self) -> str:
        """Hash of the content and length of the rows, independent of paths; part of the run's name."""
        ...

    def train_stream(self, cfg: RunConfig, rank: int = 0, world_size: int = 1) -> Stream:
        """Batches, each a NamedTuple of tensors [B, ...]; a function of the seed and the step only."""
        ...


D = TypeVar("D", bound=Data)


class DataChanged(UsageError):
    """The prepared data are not what a run was named for."""


class Objective(ABC, Generic[D]):
    """The objective of one run. Built from the run's config; holds neither data nor model."""

    Options: ClassVar[type[Frozen]] = Frozen
    """Schema of ``objective.options``. Every field is part of the run's name, except those with
    ``exclude=True``, such as paths: data enter the name through their fingerprint."""
    data_kind: ClassVar[str] = "tokens"
    """It can be evaluated by tasks with this `Task.data_kind`."""
    positions: ClassVar[str] = "tokens"
    """Display name of the positions of a row."""
    loss_unit: ClassVar[str] = "nats"
    equal_blocks: ClassVar[bool] = True
    """True if its model is the backbone of ``cfg.model``, whose blocks have one size."""
    carries: ClassVar[bool] = False
    """True if it implements ``carried_losses`` and so can train on streams (``data.rows: streams``)."""
    validation_task: ClassVar[str | None] = None
    """The task that measures the held-out loss; None: ``eval.every`` is not supported."""

    def __init__(self, cfg: RunConfig, options: Any):
        self.cfg, self.options = cfg, options

    @abstractmethod
    def prepare(self, root: Path, report: PrepareProgress | None = None) -> D:
        """Prepare the data under the storage root unless they exist, and open them.

        Raises UsageError if a source is missing or cannot be read.
        """

    @abstractmethod
    def open(self, root: Path) -> D:
        """Open prepared data; does not need the sources. Raises UsageError, NotPrepared."""

    def reopen(self, root: Path, fingerprint: str) -> D:
        """Open the prepared data that a run was named for. Raises DataChanged if they are no longer there."""
        if (data := self.open(root)).fingerprint != fingerprint:
            now = f"{data.fingerprint}, and the run's are {fingerprint}"
            raise DataChanged(f"data: the data under {root} are now {now}; run the command again")
        return data

    @abstractmethod
    def build_model(self) -> Model:
        """Build the model at initialisation, from the config only. Raises UsageError."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a row as the model's blocks read it."""
        return self.cfg.row_tokens

    def head_activations(self, rows: int) -> int:
        """Return the values that ``rows`` rows hold at once outside the blocks, such as logits."""
        return 0

    def least_activations(self, rows: int) -> int:
        """Return a lower bound on the values kept for a backward pass: each block's input, and the head's."""
        model = self.cfg.model
        return rows * self.block_tokens * model.d_model * model.n_layers + self.head_activations(rows)

    @abstractmethod
    def losses(self, model: Callable[..., Any], batch: Any) -> Tensor:
        """[B] loss of each row; 0 for a row without targets."""

    def tokenizer(self) -> Tokenizer | None:
        """Load the model's tokenizer; None if its inputs are not tokens. Raises UsageError."""
        return None

    def counts(self, batch: Any) -> Tensor:
        """[B] bool: whether the row has targets. By default every row does."""
        return torch.ones(len(batch[0]), dtype=torch.bool, device=batch[0].device)

    def sample_batch(self, rows: int) -> Any:
        """``rows`` rows of random content, to time a step before data are prepared; None: not supported."""
        return None

    def check_sources(self) -> None:
        """Check that the sources of unprepared data exist. Raises UsageError."""

    def check(self, data: D | None = None) -> None:
        """Validate the config before training; with ``data``, also that they match the config.

        Raises UsageError that names the field.
        """
        check_windows(build_small(self), self.cfg.optim)
        kind = self.cfg.objective.kind
        if self.cfg.data.rows == "streams" and not self.carries:
            raise UsageError(f"data.rows: objective {kind} reads no streams; set it to shuffled")
        if self.cfg.eval.every and self.validation_task is None:
            raise UsageError(f"eval.every: objective {kind} has no validation_task; leave it out")
        for column, tasks in self.cfg.eval.columns.items():
            for i, config in enumerate(tasks):
                with within(f"eval.columns.{column}.{i}"):
                    task = build_task(config)
                    if task.data_kind != self.data_kind:
                        expected = f"objective {kind} has {self.data_kind}"
                        raise UsageError(f"task: {task.name} is measured on {task.data_kind}; {expected}")
                    for multiple in config.lengths:
                        task.check(self, row_length(multiple, self.cfg.data.sequence_length), data)


def build_small(objective: Objective[Any], blocks: int = 1) -> Model:
    """Build the model with ``blocks`` blocks on the meta device: allocates no weights, fast at any size."""
    model = objective.cfg.model.model_copy(update={"n_layers": blocks})
    with torch.device("meta"):
        cfg = objective.cfg.model_copy(update={"model": model})
        return type(objective)(cfg, objective.options).build_model()


def check_vocabulary(cfg: RunConfig, tokenizer: Tokenizer) -> None:
    """Reject a tokenizer with more ids than the model's vocabulary. Raises UsageError."""
    size, needed, name = cfg.model.vocab_size, tokenizer.vocab_size, cfg.data.tokenizer
    if size < needed:
        cause = f"{size} is less than the {needed} of tokenizer {name}"
        raise UsageError(f"model.vocab_size: {cause}; set it to {needed}")


def reject_data(cfg: RunConfig, fields: Sequence[str], reason: str) -> None:
    """Reject fields of ``data`` that would be ignored. Raises UsageError."""
    for field in fields:
        if getattr(cfg.data, field) != getattr(DataConfig(), field):
            raise UsageError(f"data.{field}: objective {cfg.objective.kind} {reason}; leave it out")


def run_name(cfg: RunConfig, data_fingerprint: str, workers: int | str = 1) -> str:
    """Name the run by a hash of everything that determines its numbers.

    Options of the objective at their defaults are left out, so that adding an option renames no run.
    """
    options = build_objective(cfg).options.model_dump(mode="json", exclude_defaults=True)
    named = cfg.model_copy(update={"objective": ObjectiveConfig(kind=cfg.objective.kind, options=options)})
    return named.fingerprint(data_fingerprint, eval_version(cfg.eval), workers)


OBJECTIVES = Registry("objective.kind", Objective, {
    "classification": "titans_platform.objectives.classification:Classification",
    "next_token": "titans_platform.objectives.next_token:NextToken",
    "regression": "titans_platform.objectives.regression:Regression",
    "transfer": "titans_platform.objectives.adapt:Transfer",
    "tune": "titans_platform.objectives.adapt:Tune",
}, UsageError)  # fmt: skip
"""Objectives by name."""


def build_objective(cfg: RunConfig) -> Objective[Any]:
    """Build the objective that a config names, by registered name or as ``module:Class``.

    Raises:
        UsageError: the objective or an option does not exist, or an option's value is invalid.
    """
    kind = OBJECTIVES.find(cfg.objective.kind)
    return kind(cfg, validate(kind.Options, cfg.objective.options, "objective.options"))
