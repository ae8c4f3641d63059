"""Tasks: their registry, the base classes of tasks and of tasks that generate items, floors.

A task outside this package is named by its import path, `task: my_lab.tasks:MyTask`, and needs no line here.
`titans_platform.evals` measures models on tasks, `titans_platform.data` trains on their items.
"""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean, pvariance
from typing import Any, ClassVar, NamedTuple

from titans_core.config import Frozen
from titans_kernels import Registry
from titans_platform.config import EvalConfig, TaskConfig, digest
from titans_platform.errors import UsageError
from titans_platform.loading import validate
from titans_platform.tasks.items import Item, ItemTokenizer, encode_item

__all__ = [
    "TASKS", "Context", "GeneratedTask", "Item", "Measurement", "Task", "build_generated", "build_task",
    "encode_item", "eval_version", "row_length",
]  # fmt: skip

# consecutive items that were seen before, after which a task has no more new items
PATIENCE = 1000

FLOOR_ITEMS, MIN_FLOOR_ITEMS = 1000, 50
"""Most and fewest items that heuristics are measured on."""
FLOOR_TOKENS, FLOOR_ANSWERS = 2**19, 3000
"""Tokens and answers after which sampling stops, once it has the fewest items."""

Heuristic = Callable[[str], Sequence[str]]
"""Maps the text before an answer to the answers that it guesses among with equal probability."""


@dataclass(frozen=True)
class Measurement:
    """Result of a task at one length."""

    value: float
    stderr: float
    chance: float
    items: int
    buckets: dict[str, float] = field(default_factory=dict)
    """The value by bucket, such as accuracy by the depth of a needle (`"30-40%"`)."""
    floor: float | None = None
    """Score of the task's best heuristic, or chance if that is better; None: the task lists none."""
    heuristic: str | None = None
    """The heuristic that reaches the floor; None: no heuristic is better than chance."""


@dataclass(frozen=True)
class Context:
    """Inputs of a measurement: the scorer (model, tokenizer, device), the data, the evaluation config."""

    scorer: Any
    """A `titans_platform.evals.Scorer`."""
    prepared: Any
    config: EvalConfig
    length: int
    """Tokens of a row, document start included."""
    ngrams: Callable[[], Any] = lambda: None
    """Returns the n-grams of the text trained on (`titans_platform.evals.ngrams`); None: not counted."""


class Task(ABC):
    """Something a model can be measured on."""

    name: ClassVar[str]
    version: ClassVar[int] = 1
    """Increment it with every change that changes a number: cells of another version run again."""
    Options: ClassVar[type[Frozen]] = Frozen
    data_kind: ClassVar[str] = "tokens"
    """Kind of data that the task needs: the ``data_kind`` of an objective."""

    def __init__(self, options: Any = None) -> None:
        self.options: Any = options if options is not None else self.Options()

    @property
    def label(self) -> str:
        """Name and kind; unique among the tasks of a column unless they differ in other options."""
        kind = getattr(self.options, "kind", None)
        return f"{self.name}-{kind}" if kind else self.name

    def check(self, objective: Any, length: int, data: Any) -> None:  # noqa: B027
        """Reject a row length that cannot be measured. ``data`` is None before they are prepared.

        Raises UsageError that begins with the field of the task's config.
        """

    @abstractmethod
    def measure(self, context: Context) -> Measurement:
        """Value at `context.length` tokens."""


class Floor(NamedTuple):
    """Accuracy that is reached without what a task is meant to measure."""

    value: float
    heuristic: str | None
    """The best heuristic; None: no heuristic is better than chance."""
    scores: dict[str, float]
    """Accuracy of every heuristic."""


class GeneratedTask(Task):
    """A task that generates items, also for training rows. A subclass needs `chance` and `item`.

    A model below or at the floor (`floor`) may be using a shortcut, so a task should list its `heuristics`.
    """

    @property
    @abstractmethod
    def chance(self) -> float:
        """Value of guessing without reading; an upper bound if it depends on a file."""

    @property
    def heuristics(self) -> Mapping[str, Heuristic]:
        """Shortcuts by name: ways to guess without what the task is meant to measure."""
        return {}

    def floor(self, length: int, tokenizer: ItemTokenizer) -> Floor | None:
        """Accuracy of the best heuristic on a fixed sample of items of `length` tokens, or chance.

        A heuristic counts only if it beats chance by three standard errors. The result is cached.

        Returns:
            None if the task lists no heuristics.
        """
        return _floor(type(self), self.options, length, tokenizer) if self.heuristics else None

    def floor_items(self, length: int, tokenizer: ItemTokenizer) -> Iterator[Item]:
        """Items that heuristics are measured on: a function of the options and the length only."""
        rng = random.Random(f"floor of {self.name} {self.options.model_dump_json()} {length}")
        answers = 0
        for drawn in range(FLOOR_ITEMS):
            if drawn >= MIN_FLOOR_ITEMS and (answers >= FLOOR_ANSWERS or drawn * length >= FLOOR_TOKENS):
                return
            item = self.item(rng, length, tokenizer)
            answers += sum(is_answer for _, is_answer in item.pieces)
            yield item

    def check(self, objective: Any, length: int, data: Any) -> None:
        """Generate also an item of that length."""
        if data is not None:
            self.item(random.Random(0), length, data.tokenizer)

    @abstractmethod
    def item(self, rng: random.Random, length: int, tokenizer: ItemTokenizer) -> Item:
        """Generate an item of `length` tokens, document start included (`encode_item` pads what is missing).

        Raises:
            UsageError: no item of this task fits in `length` tokens.
        """

    def measure(self, context: Context) -> Measurement:
        """Accuracy: an answer is right when greedy decoding gives all of its tokens.

        The standard error takes the item, not the answer, as what is drawn independently; with one answer
        an item it is sqrt(p (1 - p) / n).
        """
        shares: list[float] = []
        buckets: dict[str, list[bool]] = {}
        for names, right in context.scorer.grade(self._fresh_items(context), context.length):
            shares.append(fmean(right))
            for bucket, one in zip(names, right, strict=False):
                buckets.setdefault(bucket, []).append(one)
        stderr = (pvariance(shares) / len(shares)) ** 0.5
        means = {bucket: fmean(buckets[bucket]) for bucket in sorted(buckets, key=_natural)}
        value, heuristic, _ = self.floor(context.length, context.scorer.tokenizer) or (None, None, None)
        return Measurement(fmean(shares), stderr, self.chance, len(shares), means, value, heuristic)

    def _fresh_items(self, context: Context) -> Iterator[Item]:
        """Yield up to `config.items` distinct items that do not occur in the training rows.

        Raises:
            UsageError: not one unseen item was found.
        """
        config, length, options = context.config, context.length, self.options.model_dump(mode="json")
        identity = {"seed": config.seed, "task": self.name, "options": options, "length": length}
        rng, misses = random.Random(digest(identity)), 0
        drawn: set[str] = set()
        while len(drawn) < config.items and misses < PATIENCE:
            item = self.item(rng, length, context.scorer.tokenizer)
            misses += 1
            if item.hash not in drawn and item.hash not in context.prepared.item_hashes:
                misses = 0
                drawn.add(item.hash)
                yield item
        if not drawn:
            raise UsageError(f"task: every item of {self.label} at {length} tokens occurs in training")


def _natural(name: str) -> tuple[int, str]:
    """Sort key of buckets: the number at the start of the name."""
    digits = re.match(r"\d+", name)
    return int(digits[0]) if digits else 0, name


@lru_cache(maxsize=256)
def _floor(kind: type[GeneratedTask], options: Any, length: int, tokenizer: ItemTokenizer) -> Floor:
    task = kind(options)
    shares: dict[str, list[float]] = {name: [] for name in task.heuristics}
    for item in task.floor_items(length, tokenizer):
        questions = list(item.questions())
        for name, heuristic in task.heuristics.items():
            guesses = [(heuristic(before), answer.strip()) for before, answer in questions]
            shares[name].append(fmean(guess.count(answer) / max(1, len(guess)) for guess, answer in guesses))
    scores = {name: fmean(values) for name, values in shares.items()}
    best = max(scores, key=scores.__getitem__)
    stderr = (pvariance(shares[best]) / len(shares[best])) ** 0.5
    beaten = scores[best] - 3 * stderr > task.chance
    return Floor(scores[best], best, scores) if beaten else Floor(task.chance, None, scores)


PROTOCOL = 1
"""Version of what all tasks share: filling, encoding, scoring, sampling. Increment it as a task's own."""

TASKS = Registry("task", Task, {
    "babi": "titans_platform.tasks.babi:Babi",
    "babilong": "titans_platform.tasks.babi:Babilong",
    "babilong_hub": "titans_platform.tasks.babi:BabilongHub",
    "lm_eval": "titans_platform.evals.lm_harness:LmEval",
    "loss": "titans_platform.evals.perplexity:HeldOutLoss",
    "needle": "titans_platform.tasks.needle:Needle",
    "perplexity": "titans_platform.evals.perplexity:Perplexity",
    "reasoning": "titans_platform.tasks.reasoning:Reasoning",
    "recall": "titans_platform.tasks.recall:Recall",
    "throughput": "titans_platform.evals.perplexity:Throughput",
}, UsageError)  # fmt: skip
"""Every task by name, which is its class's `name`; objectives add tasks that need their data."""


def build_task(config: TaskConfig) -> Task:
    """Build the task `config` names, with its options.

    Raises:
        UsageError: no such task, no such option, or an option's value is not valid.
    """
    task = TASKS.find(config.task)
    return task(validate(task.Options, config.options, "options"))


def build_generated(config: TaskConfig) -> GeneratedTask:
    """`build_task` for tasks that generate items, as training rows need.

    Raises:
        UsageError: as `build_task`, or the task only measures.
    """
    task = build_task(config)
    if not isinstance(task, GeneratedTask):
        able = sorted(name for name, kind in TASKS.items() if issubclass(kind, GeneratedTask))
        raise UsageError(f"task: {config.task} generates no items to train on; use one of {', '.join(able)}")
    return task


def row_length(multiple: float, sequence_length: int) -> int:
    """Tokens of an evaluation row that is ``multiple`` training rows long."""
    return max(2, round(multiple * sequence_length))


def eval_version(config: EvalConfig) -> str:
    """Digest of the versions of the tasks `config` uses. Raises UsageError as `build_task` does."""
    names = {task.task for tasks in config.columns.values() for task in tasks}
    return digest({"protocol": PROTOCOL, "tasks": {name: TASKS.find(name).version for name in names}}, 8)
