"""What of a cell's config MLflow shows as columns: few, and named as people say them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from titans_core.config import ModelConfig
from titans_platform.study.spec import Cell, Row
from titans_platform.text import flatten

MEMORY = "model.memory."
ALWAYS = {
    "variant": "model.variant",
    "depth": f"{MEMORY}depth",
    "chunk_size": f"{MEMORY}chunk_size",
    "d_model": "model.d_model",
    "layers": "model.n_layers",
    "sequence_length": "data.sequence_length",
    "steps": "optim.steps",
    "global_batch_size": "optim.global_batch_size",
    "lr": "optim.lr",
}
SHOWN = 4
"""Columns of parameters before those of the measures; one screen of MLflow's list holds both."""


def params(cell: Cell, rows: Iterable[Row]) -> dict[str, Any]:
    """Row, seed, the fields that every study is looked at by, and those that these rows change.

    A model without a neural memory has none of the memory's fields.
    """
    config = flatten(cell.config.model_dump(mode="json"))
    if not _has_memory(cell.config.model.model_copy(update={"n_layers": 1}).model_dump_json()):
        config = {field: value for field, value in config.items() if not field.startswith(MEMORY)}
    named = {name: config[field] for name, field in fields(rows).items() if field in config}
    return {"row": cell.row, "seed": cell.seed} | named


@cache
def _has_memory(model: str) -> bool:
    import torch

    from titans_core import LanguageModel, NeuralMemory

    with torch.device("meta"):
        built = LanguageModel(ModelConfig.model_validate_json(model))
    return any(isinstance(module, NeuralMemory) for module in built.modules())


def fields(rows: Iterable[Row]) -> dict[str, str]:
    """The config's fields by the name of their column: the last word, or the whole where two share it."""
    changed = dict.fromkeys(key for row in rows for key in flatten(row.set))
    more = [key for key in changed if key not in ALWAYS.values()]
    last = [key.rpartition(".")[2] for key in more]
    unique = [word not in ALWAYS and last.count(word) == 1 for word in last]
    return ALWAYS | {word if alone else key: key for word, key, alone in zip(last, more, unique, strict=True)}


def shown(rows: Iterable[Row], measures: Mapping[str, Any]) -> list[str]:
    """The columns of the runs' list in MLflow, left to right: what is measured within the first screen.

    Seed and the first of the fields that rows differ in come before the measures, the others after them.
    """
    rows = list(rows)
    changed = {key for row in rows for key in flatten(row.set)}
    named = ["seed", *(name for name, field in fields(rows).items() if field in changed)]
    params = [f"params.`{name}`" for name in named]
    numbers = [f"metrics.`{name}`" for name in (*measures, "parameters", "train_seconds")]
    return [*params[:SHOWN], *numbers[: len(measures)], *params[SHOWN:], *numbers[len(measures) :]]
