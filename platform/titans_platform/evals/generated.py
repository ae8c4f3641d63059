"""Tasks whose items are generated, for training rows and for evaluation alike."""

from __future__ import annotations

import random
from abc import abstractmethod
from functools import partial
from statistics import fmean, pvariance

import torch

from titans_platform.config import TaskConfig, digest
from titans_platform.errors import UsageError
from titans_platform.evals.items import Item, Tokenizer, answer_spans, encode_item
from titans_platform.evals.ranks import measure_shared
from titans_platform.evals.registry import TASKS, Context, Measurement, Task, build_task

# how many items in a row may have been seen before, until a task counts as used up
PATIENCE = 1000


class GeneratedTask(Task):
    """A task that generates items; all it needs beside `chance` is `item`."""

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
        items = fresh_items(self, context)
        rows = context.scorer.rows(context.length)
        batches = (items[start : start + rows] for start in range(0, len(items), rows))
        measured = measure_shared(batches, partial(_right_shares, context))
        shares = [share for batch in measured for share in batch]
        return Measurement(
            value=fmean(shares),
            stderr=(pvariance(shares) / len(shares)) ** 0.5,
            chance=self.chance,
            items=len(items),
        )


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


def fresh_items(task: GeneratedTask, context: Context) -> list[Item]:
    """Up to `config.items` different items, none of which occurs in the training rows.

    Raises:
        UsageError: not one unseen item was found.
    """
    config, seen = context.config, context.prepared.item_hashes
    options = task.options.model_dump(mode="json")
    identity = digest({"seed": config.seed, "task": task.name, "options": options, "length": context.length})
    rng = random.Random(identity)
    items: dict[str, Item] = {}
    misses = 0
    while len(items) < config.items and misses < PATIENCE:
        item = task.item(rng, context.length, context.scorer.tokenizer)
        if item.hash in items or item.hash in seen:
            misses += 1
        else:
            items[item.hash] = item
            misses = 0
    if not items:
        raise UsageError(f"task: every item of {task.label} at {context.length} tokens occurs in training")
    leaked = [name for name in items if name in seen]
    if leaked:
        raise AssertionError(f"evaluation items of {task.label} occur in training: {leaked[:3]}")
    return list(items.values())


def _right_shares(context: Context, items: list[Item]) -> list[float]:
    """Per item, the share of its answers that are right.

    Given the right tokens before it, each token of an answer is the greedy choice if and only if greedy
    decoding from the question gives the whole answer: one forward pass does for generation.
    """
    encoded = [encode_item(item, context.scorer.tokenizer, context.length) for item in items]
    tokens = torch.tensor([row for row, _ in encoded])
    greedy = context.scorer.logits(tokens[:, :-1]).argmax(-1).cpu()
    right = (greedy == tokens[:, 1:]).tolist()
    shares = []
    for (_, is_answer), row in zip(encoded, right, strict=True):
        answers = [all(row[start - 1 : end - 1]) for start, end in answer_spans(is_answer)]
        shares.append(fmean(answers))
    return shares
