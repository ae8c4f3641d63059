"""Evaluation: `evaluate` measures the columns of the table on a model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from statistics import fmean
from typing import Any

import torch
from torch import nn

from titans_platform.config import EvalConfig, TaskConfig
from titans_platform.evals.scoring import Request, Score, Scorer, sharded_modules
from titans_platform.tasks import Context, Measurement, Task, build_task, row_length

__all__ = ["Request", "Score", "Scorer", "evaluate", "evaluating"]


def evaluate(
    model: nn.Module, prepared: Any, config: EvalConfig, sequence_length: int, *,
    device: str | torch.device = "cpu", precision: str = "fp32", ngrams: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:  # fmt: skip
    """Measure every column of `config` on `model`; the model's training mode is restored.

    A task is measured at each of its lengths (multiples of `sequence_length` tokens); its value is their
    mean, and a column's value the mean of its tasks. Items are a function of `config.seed`, the task's
    options and the length alone, so every model gets the same ones.

    In a process group every rank calls this: each measures its share of the batches, and all return the same
    result, bit for bit as a single process would.

    Args:
        model: called as `model(tokens [B, T], document_starts=None or bool [B, T])`, gives `.logits`.
        prepared: the data trained on: `.tokenizer`, `.item_hashes`, `.validation(rows)`.
        config: columns, items, seed, budget of a forward pass.
        sequence_length: T of a training row, tokens.
        device: where the model is.
        precision: "bf16" measures under autocast, as a run with that `optim.precision` trains.
        ngrams: returns the `NGrams` of the text trained on, the floor of a perplexity; None: no floor.

    Returns:
        `columns` {column: value}, `chance` {column: value}, `buckets` {column/task@tokens: {bucket: value}},
        `tasks` {column/task@tokens: {value, stderr, chance, floor, heuristic, items}}.

    Raises:
        UsageError: a task, option or length is not valid, or no unseen item is left.
    """
    tasks = {column: _labelled(configs) for column, configs in config.columns.items()}
    # data other than tokens have no tokenizer, and their tasks need none
    tokenizer: Any = getattr(prepared, "tokenizer", None)
    scorer = Scorer(model, tokenizer, torch.device(device), config.batch_tokens)
    result: dict[str, Any] = {"columns": {}, "tasks": {}, "chance": {}, "buckets": {}}
    known: dict[tuple[str, int], Measurement] = {}
    counted = cache(ngrams)
    lower = torch.autocast(scorer.device.type, torch.bfloat16, enabled=precision == "bf16")
    with evaluating(model), lower:
        for column, labelled in tasks.items():
            values, chances = [], []
            for label, task, task_config in labelled:
                measured: list[Measurement] = []
                for length in (row_length(multiple, sequence_length) for multiple in task_config.lengths):
                    # columns may share a task, as an average and its parts do
                    same = task_config.model_dump_json(exclude={"lengths"}), length
                    if same not in known:
                        known[same] = task.measure(Context(scorer, prepared, config, length, counted))
                    measured.append(known[same])
                    key = f"{column}/{label}@{length}"
                    fields = asdict(measured[-1]) | {"chance": _finite(measured[-1].chance)}
                    if buckets := fields.pop("buckets"):
                        result["buckets"][key] = buckets
                    result["tasks"][key] = fields
                values.append(fmean(m.value for m in measured))
                chances.append(fmean(m.chance for m in measured))
            result["columns"][column] = fmean(values)
            result["chance"][column] = _finite(fmean(chances))
    return result


def _labelled(configs: tuple[TaskConfig, ...]) -> list[tuple[str, Task, TaskConfig]]:
    """Tasks of a column with unique labels and their configs."""
    seen: Counter[str] = Counter()
    labelled = []
    for config, task in zip(configs, map(build_task, configs), strict=True):
        seen[label := task.label] += 1
        labelled.append((label if seen[label] == 1 else f"{label}-{seen[label]}", task, config))
    return labelled


def _finite(chance: float) -> float | None:
    """Return the chance level for JSON: None if it is not finite, as for a rate."""
    return chance if math.isfinite(chance) else None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Enter evaluation mode without gradients; on exit the mode of every submodule is restored."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        # parameters gathered in inference mode could not be trained with afterwards
        with torch.no_grad() if sharded_modules(model) else torch.inference_mode():
            yield
    finally:
        # free the parameters gathered by the last forward pass, as a backward pass would
        for module in sharded_modules(model):
            module.reshard()
        for module, mode in modes.items():
            module.training = mode
