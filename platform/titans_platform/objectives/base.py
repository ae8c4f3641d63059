"""What a run trains on: its data, a model that takes them, a loss, measures; and the registry of these."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from titans_core import Model
from titans_core.config import Frozen
from titans_platform.config import ObjectiveConfig, RunConfig, TaskConfig
from titans_platform.data import Tokenizer
from titans_platform.errors import UsageError, find_named, within
from titans_platform.evals import Task, build_task, eval_version, evaluate
from titans_platform.evals.registry import NoOptions
from titans_platform.loading import validate
from titans_platform.training.loop import Stream

Report = Callable[[str, int, int, "float | None"], None]
"""Called while data are prepared: a label, documents and tokens so far, the share done where it is known."""


class Input(NamedTuple):
    """One of the things that a run's data are made of, as a record of the run names it."""

    name: str
    digest: str
    """Of its content."""
    where: str
    """A path, a Hub dataset, or what generates it."""
    about: dict[str, int]
    """How much there is of it."""
    trained_on: bool = True
    """Else it is only measured on."""


class Data(Protocol):
    """Data that are ready to train on."""

    @property
    def fingerprint(self) -> str:
        """Names what the rows hold and how long they are, none of it a path: a part of the run's name."""
        ...

    def train_stream(self, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> Stream:
        """Batches, each a NamedTuple of tensors [B, ...], as a function of the seed and the step alone."""
        ...


D = TypeVar("D", bound=Data)


class Objective(ABC, Generic[D]):
    """What one run trains on. Made from the run's config; holds no data and no model."""

    Options: ClassVar[type[Frozen]] = NoOptions
    """What a config may say under ``objective.options``. All of it is a part of the run's name but fields
    with ``exclude=True``, such as paths: data enter the name by their fingerprint."""
    data_kind: ClassVar[str] = "tokens"
    """Which tasks can measure it: those of this `Task.data_kind`."""
    positions: ClassVar[str] = "tokens"
    """What the positions of a row are called in displays."""
    loss_unit: ClassVar[str] = "nats"
    carries: ClassVar[bool] = False
    """Whether it can train on streams (``data.rows: streams``): it has ``carried_losses``."""
    validation_task: ClassVar[str | None] = None
    """The task whose value is the loss on held-out rows; None: ``eval.every`` cannot be set."""

    def __init__(self, cfg: RunConfig, options: Any):
        self.cfg, self.options = cfg, options

    @abstractmethod
    def prepare(self, root: Path, report: Report | None = None) -> D:
        """Make the data under the storage root, where they are not there yet, and open them.

        Raises UsageError: a source is missing or cannot be read.
        """

    @abstractmethod
    def open(self, root: Path) -> D:
        """Data that `prepare` made; their sources are not needed any more. Raises UsageError, NotPrepared."""

    @abstractmethod
    def build_model(self) -> Model:
        """The model at its initial weights, by the config alone. Raises UsageError."""

    def build_small(self, blocks: int = 1) -> Model:
        """The model with so many blocks and without memory for its weights: quick, whatever its size."""
        model = self.cfg.model.model_copy(update={"n_layers": blocks})
        with torch.device("meta"):
            return type(self)(self.cfg.model_copy(update={"model": model}), self.options).build_model()

    def least_activations(self, rows: int) -> int:
        """Numbers that the backward pass of so many rows needs at least: the input of each block."""
        return rows * self.cfg.row_tokens * self.cfg.model.d_model * self.cfg.model.n_layers

    @abstractmethod
    def losses(self, model: Callable[..., Any], batch: Any) -> Tensor:
        """[B] loss of each row; 0 for a row that does not count."""

    def train_stream(self, data: D, rank: int = 0, world_size: int = 1) -> Stream:
        """The batches of the run, this worker's rows of each. Raises UsageError."""
        return data.train_stream(self.cfg.optim.global_batch_size, self.cfg.seed, rank, world_size)

    def tokenizer(self) -> Tokenizer | None:
        """What turns text into the model's tokens; None where it takes no tokens. Raises UsageError."""
        return None

    def counts(self, batch: Any) -> Tensor:
        """[B] bool: the row has something to predict. All do unless a subclass says otherwise."""
        return torch.ones(len(batch[0]), dtype=torch.bool, device=batch[0].device)

    def inputs(self, data: D) -> list[Input]:
        """What ``data`` are made of."""
        return [Input(self.data_kind, data.fingerprint[:36], self.cfg.objective.kind, {})]

    def sample_batch(self, rows: int) -> Any:
        """``rows`` rows of random content, to time a step before there are data; None: it cannot be timed."""
        return None

    def check_sources(self) -> None:
        """Look whether the sources of data that are not prepared yet are there. Raises UsageError."""

    def check(self, data: D | None = None) -> None:
        """Find before the training what would be found after it; with ``data``, also whether they fit.

        Raises UsageError, which names the field.
        """
        self.build_small()
        if self.cfg.data.rows == "streams" and not self.carries:
            kind = self.cfg.objective.kind
            raise UsageError(f"data.rows: objective {kind} reads no streams; set it to shuffled")
        if self.cfg.eval.every and self.validation_task is None:
            kind = self.cfg.objective.kind
            raise UsageError(f"eval.every: objective {kind} has no validation_task; leave it out")
        for column, tasks in self.cfg.eval.columns.items():
            for i, config in enumerate(tasks):
                with within(f"eval.columns.{column}.{i}"):
                    self.check_task(build_task(config), config.lengths, data)

    def check_task(self, task: Task, lengths: Sequence[float], data: D | None) -> None:
        """Refuse a task that cannot be measured at ``lengths`` training lengths. Raises UsageError."""
        if task.data_kind != self.data_kind:
            raise UsageError(
                f"task: {task.name} is measured on {task.data_kind}; objective {self.cfg.objective.kind} "
                f"has {self.data_kind}"
            )

    def evaluate(
        self, model: Model, data: D, columns: Sequence[str] = (), device: torch.device | str = "cpu"
    ) -> dict[str, Any]:
        """What `evals.evaluate` returns, of all columns or of those given.

        In a process group every worker calls this, and all return the same.
        """
        config = self.cfg.eval
        if columns:
            config = config.model_copy(update={"columns": {name: config.columns[name] for name in columns}})
        return evaluate(model, data, config, self.cfg.data.sequence_length, device=device)

    def validation_loss(self, model: Model, data: D, device: torch.device | str = "cpu") -> float:
        """The loss on held-out rows. In a process group every worker calls this, and all return the same."""
        assert self.validation_task
        columns = {"validation": (TaskConfig(task=self.validation_task),)}
        config = self.cfg.eval.model_copy(update={"columns": columns})
        found = evaluate(model, data, config, self.cfg.data.sequence_length, device=device)
        return found["columns"]["validation"]

    def run_name(self, data_fingerprint: str, workers: int | str = 1) -> str:
        """The run's name: a hash of all that its numbers are a function of.

        Options at their defaults do not enter it, so that a new one renames nothing; of an objective in a
        file of one's own the file does, since it may change between two runs.
        """
        options = self.options.model_dump(mode="json", exclude_defaults=True)
        objective = ObjectiveConfig(kind=self.cfg.objective.kind, options=options)
        named = self.cfg.model_copy(update={"objective": objective})
        return named.fingerprint(data_fingerprint, self.eval_version(), workers)

    def eval_version(self) -> str:
        """Digest of the versions of the tasks it is measured by."""
        return eval_version(self.cfg.eval)


OBJECTIVES: dict[str, type[Objective[Any]]] = {}
"""Every objective by name."""

T = TypeVar("T", bound=type[Objective[Any]])


def register(name: str) -> Callable[[T], T]:
    """Class decorator that puts an objective into the registry.

    Raises:
        ValueError: another objective has the same name.
    """

    def put(objective: T) -> T:
        if OBJECTIVES.setdefault(name, objective) is not objective:
            raise ValueError(f"an objective named {name} is registered already")
        return objective

    return put


def build_objective(cfg: RunConfig) -> Objective[Any]:
    """The objective a config names, by its registered name or as ``module:Class``, with its options.

    Raises:
        UsageError: no such objective or option, or an option's value is not valid.
    """
    found = find_named("objective.kind", cfg.objective.kind, OBJECTIVES, Objective)
    return found(cfg, validate(found.Options, cfg.objective.options, "objective.options"))
