"""The interface of an objective (data, model, loss and metrics of a run) and the registry of objectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from titans_core import Model
from titans_core.config import Frozen
from titans_kernels import Registry
from titans_platform.config import DataConfig, ObjectiveConfig, RunConfig, TaskConfig
from titans_platform.data import Tokenizer
from titans_platform.errors import UsageError, within
from titans_platform.evals import Task, build_task, eval_version, evaluate
from titans_platform.evals.registry import NoOptions
from titans_platform.loading import validate
from titans_platform.training.loop import Stream
from titans_platform.training.optim import check_windows

Report = Callable[[str, int, int, "float | None"], None]
"""Progress callback of `prepare`: label, documents and tokens so far, fraction done (None if unknown)."""


class Input(NamedTuple):
    """One source of a run's data, as logged with the run."""

    name: str
    digest: str
    """Hash of the content."""
    where: str
    """A path, a Hub dataset, or the name of the generator."""
    about: dict[str, int]
    """Its sizes by name, e.g. the number of tokens."""
    trained_on: bool = True
    """False: used for evaluation only."""


class Data(Protocol):
    """Prepared data, ready to train on."""

    @property
    def fingerprint(self) -> str:
        """Hash of the content and length of the rows, independent of paths; part of the run's name."""
        ...

    def train_stream(self, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> Stream:
        """Batches, each a NamedTuple of tensors [B, ...]; a function of the seed and the step only."""
        ...


D = TypeVar("D", bound=Data)


class Objective(ABC, Generic[D]):
    """The objective of one run. Built from the run's config; holds neither data nor model."""

    Options: ClassVar[type[Frozen]] = NoOptions
    """Schema of ``objective.options``. Every field is part of the run's name, except those with
    ``exclude=True``, such as paths: data enter the name through their fingerprint."""
    data_kind: ClassVar[str] = "tokens"
    """It can be evaluated by tasks with this `Task.data_kind`."""
    positions: ClassVar[str] = "tokens"
    """Display name of the positions of a row."""
    loss_unit: ClassVar[str] = "nats"
    carries: ClassVar[bool] = False
    """Whether it implements ``carried_losses`` and so can train on streams (``data.rows: streams``)."""
    validation_task: ClassVar[str | None] = None
    """The task that measures the held-out loss; None: ``eval.every`` is not supported."""

    def __init__(self, cfg: RunConfig, options: Any):
        self.cfg, self.options = cfg, options

    @abstractmethod
    def prepare(self, root: Path, report: Report | None = None) -> D:
        """Prepare the data under the storage root unless they exist, and open them.

        Raises UsageError if a source is missing or cannot be read.
        """

    @abstractmethod
    def open(self, root: Path) -> D:
        """Open prepared data; does not need the sources. Raises UsageError, NotPrepared."""

    @abstractmethod
    def build_model(self) -> Model:
        """The model at initialisation, from the config only. Raises UsageError."""

    def build_small(self, blocks: int = 1) -> Model:
        """The model with ``blocks`` blocks on the meta device: allocates no weights, fast at any size."""
        model = self.cfg.model.model_copy(update={"n_layers": blocks})
        with torch.device("meta"):
            return type(self)(self.cfg.model_copy(update={"model": model}), self.options).build_model()

    def least_activations(self, rows: int) -> int:
        """Lower bound on the activations kept for the backward pass of ``rows`` rows: each block's input."""
        return rows * self.cfg.row_tokens * self.cfg.model.d_model * self.cfg.model.n_layers

    @abstractmethod
    def losses(self, model: Callable[..., Any], batch: Any) -> Tensor:
        """[B] loss of each row; 0 for a row without targets."""

    def train_stream(self, data: D, rank: int = 0, world_size: int = 1) -> Stream:
        """This worker's rows of each training batch. Raises UsageError."""
        return data.train_stream(self.cfg.optim.global_batch_size, self.cfg.seed, rank, world_size)

    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None if its inputs are not tokens. Raises UsageError."""
        return None

    def counts(self, batch: Any) -> Tensor:
        """[B] bool: whether the row has targets. By default every row does."""
        return torch.ones(len(batch[0]), dtype=torch.bool, device=batch[0].device)

    def inputs(self, data: D) -> list[Input]:
        """The sources of ``data``."""
        return [Input(self.data_kind, data.fingerprint[:36], self.cfg.objective.kind, {})]

    def sample_batch(self, rows: int) -> Any:
        """``rows`` rows of random content, to time a step before data are prepared; None: not supported."""
        return None

    def check_sources(self) -> None:
        """Check that the sources of unprepared data exist. Raises UsageError."""

    def check(self, data: D | None = None) -> None:
        """Validate the config before training; with ``data``, also that they match the config.

        Raises UsageError that names the field.
        """
        check_windows(self.build_small(), self.cfg.optim)
        kind = self.cfg.objective.kind
        if self.cfg.data.rows == "streams" and not self.carries:
            raise UsageError(f"data.rows: objective {kind} reads no streams; set it to shuffled")
        if self.cfg.eval.every and self.validation_task is None:
            raise UsageError(f"eval.every: objective {kind} has no validation_task; leave it out")
        for column, tasks in self.cfg.eval.columns.items():
            for i, config in enumerate(tasks):
                with within(f"eval.columns.{column}.{i}"):
                    self.check_task(build_task(config), config.lengths, data)

    def check_vocabulary(self, tokenizer: Tokenizer) -> None:
        """Reject a tokenizer with more ids than the model's vocabulary. Raises UsageError."""
        size, needed, name = self.cfg.model.vocab_size, tokenizer.vocab_size, self.cfg.data.tokenizer
        if size < needed:
            given = f"{size} is less than the {needed} of tokenizer {name}"
            raise UsageError(f"model.vocab_size: {given}; set it to {needed}")

    def reject_data(self, fields: Sequence[str], reason: str) -> None:
        """Reject fields of ``data`` that would be ignored. Raises UsageError."""
        for field in fields:
            if getattr(self.cfg.data, field) != getattr(DataConfig(), field):
                kind = self.cfg.objective.kind
                raise UsageError(f"data.{field}: objective {kind} {reason}; leave it out")

    def check_task(self, task: Task, lengths: Sequence[float], data: D | None) -> None:
        """Reject a task that cannot run at ``lengths`` (in training lengths). Raises UsageError."""
        if task.data_kind != self.data_kind:
            has = f"objective {self.cfg.objective.kind} has {self.data_kind}"
            raise UsageError(f"task: {task.name} is measured on {task.data_kind}; {has}")

    def evaluate(
        self, model: Model, data: D, columns: Sequence[str] = (), device: torch.device | str = "cpu"
    ) -> dict[str, Any]:
        """Run `evals.evaluate` on all columns, or on those given.

        Collective: every worker of a process group calls this and gets the same result.
        """
        known = self.cfg.eval.columns
        return self._evaluate(model, data, {name: known[name] for name in columns or known}, device)

    def validation_loss(self, model: Model, data: D, device: torch.device | str = "cpu") -> float:
        """The loss on held-out rows. Collective: every worker calls this and gets the same value."""
        assert self.validation_task
        columns = {"validation": (TaskConfig(task=self.validation_task),)}
        return self._evaluate(model, data, columns, device)["columns"]["validation"]

    def _evaluate(self, model: Model, data: D, columns: Mapping[str, Any], device: Any) -> dict[str, Any]:
        config = self.cfg.eval.model_copy(update={"columns": columns})
        return evaluate(model, data, config, self.cfg.data.sequence_length, device=device)

    def run_name(self, data_fingerprint: str, workers: int | str = 1) -> str:
        """The run's name: a hash of everything that determines its numbers.

        Options at their defaults are left out, so that adding an option renames no run. For an objective in
        a user's own file, the file is hashed too, since it may change between runs.
        """
        options = self.options.model_dump(mode="json", exclude_defaults=True)
        objective = ObjectiveConfig(kind=self.cfg.objective.kind, options=options)
        named = self.cfg.model_copy(update={"objective": objective})
        return named.fingerprint(data_fingerprint, self.eval_version(), workers)

    def eval_version(self) -> str:
        """Digest of the versions of the evaluation tasks."""
        return eval_version(self.cfg.eval)


OBJECTIVES = Registry(
    "objective.kind",
    Objective,
    {
        "classification": "titans_platform.objectives.classification:Classification",
        "next_token": "titans_platform.objectives.next_token:NextToken",
        "regression": "titans_platform.objectives.regression:Regression",
    },
    UsageError,
)
"""Objectives by name."""

register = OBJECTIVES.register
"""Class decorator ``@register("mine")`` that adds an objective in this process."""


def build_objective(cfg: RunConfig) -> Objective[Any]:
    """Build the objective that a config names, by registered name or as ``module:Class``.

    Raises:
        UsageError: the objective or an option does not exist, or an option's value is invalid.
    """
    found = OBJECTIVES.find(cfg.objective.kind)
    return found(cfg, validate(found.Options, cfg.objective.options, "objective.options"))
