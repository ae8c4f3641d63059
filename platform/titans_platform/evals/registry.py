"""The registry of tasks: what a task is, and how one is built from its config."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from pydantic import ValidationError

from titans_core.config import Frozen
from titans_platform.config import EvalConfig, TaskConfig, digest
from titans_platform.errors import UsageError, import_object, nearest
from titans_platform.evals.scoring import Scorer


@dataclass(frozen=True)
class Measurement:
    """What a task gives at one length: its value, the value's standard error, and what guessing gives."""

    value: float
    stderr: float
    chance: float
    items: int
    buckets: dict[str, float] = field(default_factory=dict)
    """Perplexity by the number of tokens a prediction could see, e.g. `"64-127"`."""


@dataclass(frozen=True)
class Context:
    """What a task measures with: the scorer (model, tokenizer, device), the data, and how much of it."""

    scorer: Scorer
    prepared: Any
    config: EvalConfig
    length: int
    """Tokens of a row, document start included."""


class NoOptions(Frozen):
    """Options of a task that has none."""


class Task(ABC):
    """Something a model can be measured on."""

    name: ClassVar[str]
    version: ClassVar[int] = 1
    """Raise it with any change that changes a number: cells measured with another version run again."""
    Options: ClassVar[type[Frozen]] = NoOptions
    data_kind: ClassVar[str] = "tokens"
    """What it is measured on: the data of an objective of the same kind."""

    def __init__(self, options: Any = None) -> None:
        self.options: Any = options if options is not None else self.Options()

    @property
    def label(self) -> str:
        """Name with its kind: what tells two tasks of one column apart."""
        kind = getattr(self.options, "kind", None)
        return f"{self.name}-{kind}" if kind else self.name

    @property
    @abstractmethod
    def chance(self) -> float:
        """What a model that knows nothing gets; an upper bound where it depends on the file read."""

    @abstractmethod
    def measure(self, context: Context) -> Measurement:
        """Value at `context.length` tokens."""


PROTOCOL = 1
"""Version of what all tasks share: filling, encoding, scoring, drawing items. Raise it as a task's own."""

TASKS: dict[str, type[Task]] = {}
"""Every task by name."""

T = TypeVar("T", bound=type[Task])


def register(task: T) -> T:
    """Class decorator that puts a task into the registry.

    Raises:
        ValueError: another task has the same name.
    """
    if TASKS.setdefault(task.name, task) is not task:
        raise ValueError(f"a task named {task.name} is registered already")
    return task


def find_task(name: str) -> type[Task]:
    """The task class of a name in the registry, or of an import path `package.module:Class`.

    Raises:
        UsageError: no such task, or what the path names is none.
    """
    if ":" in name:
        task = import_object(name, "task")
        if not (isinstance(task, type) and issubclass(task, Task)):
            raise UsageError(f"task: {name} is not a class derived from titans_platform.evals.Task")
        return task
    if name not in TASKS:
        raise UsageError(f"task: no task {name!r}; {nearest(name, sorted(TASKS))}")
    return TASKS[name]


def build_task(config: TaskConfig) -> Task:
    """The task `config` names, with its options.

    Raises:
        UsageError: no such task, no such option, or an option's value is not valid.
    """
    task = find_task(config.task)
    valid = list(task.Options.model_fields)
    for key in config.options:
        if key not in valid:
            raise UsageError(f"options: task {config.task} has no option {key!r}; {nearest(key, valid)}")
    try:
        # through JSON, so that lists become tuples under strict validation
        return task(task.Options.model_validate_json(json.dumps(config.options)))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["options", *map(str, first["loc"])])
        message = first["msg"].removeprefix("Value error, ")
        raise UsageError(f"{where}: {message} (task {config.task})") from None


def eval_version(config: EvalConfig) -> str:
    """Digest of the versions of the tasks `config` uses. Raises UsageError as `find_task` does."""
    names = {task.task for tasks in config.columns.values() for task in tasks}
    versions = {name: find_task(name).version for name in names}
    return digest({"protocol": PROTOCOL, "tasks": versions}, 8)
