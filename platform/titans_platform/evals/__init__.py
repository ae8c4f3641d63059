"""Evaluation: `evaluate` measures the columns of the table on a model; a registry of tasks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from statistics import fmean
from typing import Any

import torch
from torch import nn

from titans_core.interventions import Intervention, has_effect, intervene
from titans_platform.config import EvalConfig, TaskConfig
from titans_platform.errors import UsageError
from titans_platform.evals.items import Item, encode_item
from titans_platform.evals.registry import (
    TASKS,
    Context,
    GeneratedTask,
    Measurement,
    Task,
    build_generated,
    build_task,
    eval_version,
    register,
)
from titans_platform.evals.scoring import Request, Score, Scorer, sharded_modules

__all__ = [
    "TASKS", "GeneratedTask", "Item", "Measurement", "Request", "Score", "Scorer", "Task", "build_generated",
    "build_task", "encode_item", "eval_version", "evaluate", "register", "row_length",
]  # fmt: skip

PATHWAYS = {
    "memory": Intervention(memory=False), "attention": Intervention(attention="off"),
    "cut": Intervention(attention="cut"), "decay": Intervention(decay=False),
}  # fmt: skip
"""The parts that `EvalConfig.pathways` switches off."""


def evaluate(
    model: nn.Module, prepared: Any, config: EvalConfig, sequence_length: int, *,
    device: str | torch.device = "cpu",
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

    Returns:
        `columns` {column: value}, `chance` {column: value}, `buckets` {column/task@tokens: {bucket: value}},
        `tasks` {column/task@tokens: {value, stderr, chance, floor, heuristic, items}}, `pathways` {part of
        `config.pathways` that was off: {column: value}}.

    Raises:
        UsageError: a task, option or length is not valid, or no unseen item is left.
    """
    tasks = {column: _labelled(configs) for column, configs in config.columns.items()}
    # data other than tokens have no tokenizer, and their tasks need none
    tokenizer: Any = getattr(prepared, "tokenizer", None)
    scorer = Scorer(model, tokenizer, torch.device(device), config.batch_tokens)
    result: dict[str, Any] = {"columns": {}, "tasks": {}, "chance": {}, "buckets": {}, "pathways": {}}
    known: dict[tuple[str, int], Measurement] = {}
    with evaluating(model):
        for column, labelled in tasks.items():
            values, chances = [], []
            for label, task, asked in labelled:
                found: list[Measurement] = []
                for length in (row_length(multiple, sequence_length) for multiple in asked.lengths):
                    # columns may share a task, as an average and its parts do
                    same = asked.model_dump_json(exclude={"lengths"}), length
                    if same not in known:
                        known[same] = task.measure(Context(scorer, prepared, config, length))
                    found.append(known[same])
                    key = f"{column}/{label}@{length}"
                    fields = asdict(found[-1]) | {"chance": _finite(found[-1].chance)}
                    if buckets := fields.pop("buckets"):
                        result["buckets"][key] = buckets
                    result["tasks"][key] = fields
                values.append(fmean(m.value for m in found))
                chances.append(fmean(m.chance for m in found))
            result["columns"][column] = fmean(values)
            result["chance"][column] = _finite(fmean(chances))
    generated = [c for c, found in tasks.items() if all(isinstance(t, GeneratedTask) for _, t, _ in found)]
    answers = {column: config.columns[column] for column in generated}
    again = {"columns": answers, "items": config.pathway_items or config.items, "pathways": ()}
    for part in config.pathways:
        if has_effect(model, change := PATHWAYS[part]):
            with intervene(model, change):
                asked = config.model_copy(update=again)
                measured = evaluate(model, prepared, asked, sequence_length, device=device)
            result["pathways"][part] = measured["columns"]
    return result


def row_length(multiple: float, sequence_length: int) -> int:
    """Tokens of an evaluation row that is ``multiple`` training rows long."""
    return max(2, round(multiple * sequence_length))


def _labelled(configs: tuple[TaskConfig, ...]) -> list[tuple[str, Task, TaskConfig]]:
    """Tasks of a column with unique labels and their configs."""
    if not configs:
        raise UsageError("columns: a column needs at least one task")
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
