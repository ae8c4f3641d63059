"""What of a cell's config MLflow shows as columns: few, and named as people say them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from titans_platform.report.series import flat
from titans_platform.study.spec import Cell, Row

ALWAYS = {
    "variant": "model.variant",
    "depth": "model.memory.depth",
    "chunk_size": "model.memory.chunk_size",
    "d_model": "model.d_model",
    "layers": "model.n_layers",
    "sequence_length": "data.sequence_length",
    "steps": "optim.steps",
    "global_batch_size": "optim.global_batch_size",
    "lr": "optim.lr",
}


def params(cell: Cell, rows: Iterable[Row]) -> dict[str, Any]:
    """Row, seed, the fields that every study is looked at by, and those that these rows change."""
    config = flat(cell.config.model_dump(mode="json"))
    return {"row": cell.row, "seed": cell.seed} | {
        name: config[field] for name, field in fields(rows).items() if field in config
    }


def fields(rows: Iterable[Row]) -> dict[str, str]:
    """The config's fields by the name of their column."""
    changed = dict.fromkeys(key for row in rows for key in flat(row.set))
    known = set(ALWAYS.values())
    return ALWAYS | _short([key for key in changed if key not in known])


def _short(keys: list[str]) -> dict[str, str]:
    """Each field by its last word, or whole where two share it."""
    last = [key.rpartition(".")[2] for key in keys]
    return {
        word if last.count(word) == 1 and word not in ALWAYS else key: key
        for word, key in zip(last, keys, strict=True)
    }


def shown(rows: Iterable[Row], measures: Mapping[str, Any]) -> list[str]:
    """The columns of the runs' list in MLflow, left to right: what rows differ in, then what was measured."""
    rows = list(rows)
    changed = {key for row in rows for key in flat(row.set)}
    named = [name for name, field in fields(rows).items() if field in changed]
    params = [f"params.`{name}`" for name in ("seed", *named)]
    numbers = [f"metrics.`{name}`" for name in (*measures, "parameters", "train_seconds")]
    return [*params, *numbers]
