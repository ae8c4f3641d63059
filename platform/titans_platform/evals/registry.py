"""The registry of tasks: what a task is, what one that generates items is, how a config builds one."""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from statistics import fmean, pvariance
from typing import Any, ClassVar, TypeVar

import torch

from titans_core.config import Frozen
from titans_platform.config import EvalConfig, TaskConfig, digest
from titans_platform.errors import UsageError, find_named, nearest
from titans_platform.evals.items import Item, Tokenizer, answer_spans, encode_item
from titans_platform.evals.scoring import Scorer, measure_shared
from titans_platform.loading import validate

# how many items in a row may have been seen before, until a task counts as used up
PATIENCE = 1000


@dataclass(frozen=True)
class Measurement:
    """What a task gives at one length: its value, the value's standard error, and what guessing gives."""

    value: float
    stderr: float
    chance: float
    items: int
    buckets: dict[str, float] = field(default_factory=dict)
    """The value by what tells items apart: perplexity by the number of tokens a prediction could see
    (`"64-127"`), answers by the depth of a needle (`"30-40%"`)."""
    floor: float | None = None
    """`Task.floor`."""


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

    @property
    def floor(self) -> float | None:
        """What a model gets that knows which answers occur in a row and binds none; None: not stated."""
        return None

    @abstractmethod
    def measure(self, context: Context) -> Measurement:
        """Value at `context.length` tokens."""


class GeneratedTask(Task):
    """A task that generates items, for training rows too; all it needs beside `chance` is `item`."""

    @abstractmethod
    def item(self, rng: random.Random, length: int, tokenizer: Tokenizer) -> Item:
        """A new item of `length` tokens, document start included (`encode_item` pads what is missing).

        Raises:
            UsageError: no item of this task fits in `length` tokens.
        """

    def measure(self, context: Context) -> Measurement:
        """Accuracy: an answer is right when greedy decoding gives all of its tokens.

        The standard error takes the item, not the answer, as what is drawn independently; with one answer
        an item it is sqrt(p (1 - p) / n).
        """
        rows, items = context.scorer.side_by_side(context.length), self._fresh_items(context)
        batches = iter(lambda: list(islice(items, rows)), [])
        measured = measure_shared(batches, partial(_right_shares, context))
        found = list(chain.from_iterable(measured))
        shares = [share for _, share in found]
        stderr = (pvariance(shares) / len(shares)) ** 0.5
        buckets: dict[str, list[float]] = {}
        for bucket, share in sorted(found, key=lambda pair: _natural(pair[0] or "")):
            if bucket is not None:
                buckets.setdefault(bucket, []).append(share)
        means = {bucket: fmean(inside) for bucket, inside in buckets.items()}
        return Measurement(fmean(shares), stderr, self.chance, len(shares), means, self.floor)

    def _fresh_items(self, context: Context) -> Iterator[Item]:
        """Up to `config.items` different items, none of which occurs in the training rows, one by one.

        Raises:
            UsageError: not one unseen item was found.
        """
        config, length = context.config, context.length
        options = self.options.model_dump(mode="json")
        identity = digest({"seed": config.seed, "task": self.name, "options": options, "length": length})
        rng = random.Random(identity)
        given: set[str] = set()
        misses = 0
        while len(given) < config.items and misses < PATIENCE:
            item = self.item(rng, length, context.scorer.tokenizer)
            known = item.hash in given or item.hash in context.prepared.item_hashes
            misses = misses + 1 if known else 0
            if not known:
                given.add(item.hash)
                yield item
        if not given:
            raise UsageError(f"task: every item of {self.label} at {length} tokens occurs in training")


def _natural(name: str) -> tuple[int, str]:
    """Order of buckets: by the number they begin with."""
    digits = re.match(r"\d+", name)
    return int(digits[0]) if digits else 0, name


def _right_shares(context: Context, items: list[Item]) -> list[tuple[str | None, float]]:
    """Per item its bucket, and the share of its answers that are right.

    Given the right tokens before it, each token of an answer is the greedy choice if and only if greedy
    decoding from the question gives the whole answer: one forward pass does for generation.
    """
    rows, spans = [], []
    for item in items:
        row, is_answer = encode_item(item, context.scorer.tokenizer, context.length)
        rows.append(torch.tensor(row))
        spans.append(list(answer_spans(is_answer)))
    tokens = torch.stack(rows)
    start = min(first for row in spans for first, _ in row) - 1
    right = (context.scorer.greedy(tokens[:, :-1], start) == tokens[:, start + 1 :]).tolist()
    return [
        (item.bucket, fmean(all(row[first - 1 - start : end - 1 - start]) for first, end in answers))
        for item, row, answers in zip(items, right, spans, strict=True)
    ]


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
    """The task class of a registered name or an import path ``module:Class``. Raises UsageError."""
    return find_named("task", name, TASKS, Task)


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
    return task(validate(task.Options, config.options, "options"))


def build_generated(config: TaskConfig) -> GeneratedTask:
    """`build_task` for tasks that generate items, which is what training rows come from.

    Raises:
        UsageError: as `build_task`, or the task only measures.
    """
    task = build_task(config)
    if not isinstance(task, GeneratedTask):
        able = sorted(name for name, kind in TASKS.items() if issubclass(kind, GeneratedTask))
        raise UsageError(f"task: {config.task} makes no items to train on; use one of {', '.join(able)}")
    return task


def eval_version(config: EvalConfig) -> str:
    """Digest of the versions of the tasks `config` uses. Raises UsageError as `find_task` does."""
    names = {task.task for tasks in config.columns.values() for task in tasks}
    versions = {name: find_task(name).version for name in names}
    return digest({"protocol": PROTOCOL, "tasks": versions}, 8)
