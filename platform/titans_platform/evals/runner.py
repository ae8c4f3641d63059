"""`evaluate`: the columns of the table, measured on one model."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import fmean, pvariance
from typing import Any

import torch
from torch import nn

from titans_platform.config import EvalConfig, TaskConfig, digest
from titans_platform.errors import UsageError
from titans_platform.evals.items import Item, answer_spans, encode_item
from titans_platform.evals.ranks import is_sharded, measure_shared
from titans_platform.evals.registry import Context, GeneratedTask, Measurement, Task, build_task
from titans_platform.evals.scoring import Scorer

# How many items may in turn turn out to be seen already before a task counts as used up.
PATIENCE = 1000


def evaluate(
    model: nn.Module,
    prepared: Any,
    config: EvalConfig,
    sequence_length: int,
    *,
    device: str | torch.device = "cpu",
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Every column of `config` on `model`, which is left in the mode it came in.

    A task is asked at each of its lengths (multiples of `sequence_length` tokens); its value is their
    mean, and a column's value the mean of its tasks. Items are a function of `config.seed`, the task's
    options and the length alone, so every model is asked the same.

    In a process group every worker calls this: each measures its share of the batches, and all return the
    same result, bit for bit that of one worker.

    Args:
        model: called as `model(tokens [B, T], document_starts=None or bool [B, T])`, gives `.logits`.
        prepared: the data trained on: `.tokenizer`, `.item_hashes`, `.validation(rows)`.
        config: columns, items, seed, budget of a forward pass.
        sequence_length: T of a training row, tokens.
        device: where the model is.
        progress: called with the name of each measurement before it starts.

    Returns:
        `columns` {column: value}, `tasks` {column/task@tokens: {value, stderr, chance, items}},
        `chance` {column: value}, `buckets` {column/task@tokens: {positions: perplexity}}.

    Raises:
        UsageError: a task, option or length is not valid, or no unseen item is left.
    """
    tasks = {column: _labelled(configs) for column, configs in config.columns.items()}
    # data other than tokens have no tokenizer, and their tasks ask for none
    tokenizer: Any = getattr(prepared, "tokenizer", None)
    scorer = Scorer(model, tokenizer, torch.device(device), config.batch_tokens)
    result: dict[str, Any] = {"columns": {}, "tasks": {}, "chance": {}, "buckets": {}}
    with evaluating(model):
        for column, labelled in tasks.items():
            values, chances = [], []
            for label, task, multiples in labelled:
                found = []
                for multiple in multiples:
                    length = row_length(multiple, sequence_length)
                    key = f"{column}/{label}@{length}"
                    if progress:
                        progress(key)
                    measured = task.measure(Context(scorer, prepared, config, length))
                    found.append(measured)
                    _record(result, key, measured)
                values.append(fmean(m.value for m in found))
                chances.append(fmean(m.chance for m in found))
            result["columns"][column] = fmean(values)
            result["chance"][column] = _known(fmean(chances))
    return result


def row_length(multiple: float, sequence_length: int) -> int:
    """Tokens of an evaluation row that is ``multiple`` training rows long."""
    return max(2, round(multiple * sequence_length))


def _labelled(configs: tuple[TaskConfig, ...]) -> list[tuple[str, Task, tuple[float, ...]]]:
    """Tasks with names that differ within a column."""
    if not configs:
        raise UsageError("columns: a column needs at least one task")
    tasks = [build_task(config) for config in configs]
    seen: Counter[str] = Counter()
    labelled = []
    for task, config in zip(tasks, configs, strict=True):
        seen[task.label] += 1
        label = task.label if seen[task.label] == 1 else f"{task.label}-{seen[task.label]}"
        labelled.append((label, task, config.lengths))
    return labelled


def _record(result: dict[str, Any], key: str, measured: Measurement) -> None:
    result["tasks"][key] = {
        "value": measured.value,
        "stderr": measured.stderr,
        "chance": _known(measured.chance),
        "items": measured.items,
    }
    if measured.buckets:
        result["buckets"][key] = measured.buckets


def _known(chance: float) -> float | None:
    """None where there is nothing to guess, as with a time: JSON has no word for NaN."""
    return chance if math.isfinite(chance) else None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every submodule's mode is restored."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        # parameters gathered in inference mode could not be trained with afterwards
        with torch.no_grad() if is_sharded(model) else torch.inference_mode():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


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


def measure_items(task: GeneratedTask, context: Context) -> Measurement:
    """Accuracy of `task`: an answer is right when greedy decoding gives all of its tokens.

    The standard error takes the item, not the answer, as what is drawn independently; with one answer
    an item it is sqrt(p (1 - p) / n).
    """
    items = fresh_items(task, context)
    rows = context.scorer.rows(context.length)
    batches = (items[start : start + rows] for start in range(0, len(items), rows))
    shares = [share for batch in measure_shared(batches, partial(_right_shares, context)) for share in batch]
    return Measurement(
        value=fmean(shares),
        stderr=(pvariance(shares) / len(shares)) ** 0.5,
        chance=task.chance,
        items=len(items),
    )


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
