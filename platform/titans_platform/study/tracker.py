"""A study in MLflow: its parent run, the runs of its cells below it, and the columns they are compared by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from titans_core.config import ModelConfig
from titans_platform.runs.reporter import end_orphaned_runs
from titans_platform.runs.spec import RunSpec, Tracking
from titans_platform.study.grid import Cell, StudyRun
from titans_platform.study.spec import Row
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


@dataclass(frozen=True)
class Tracker:
    """The study's parent run in MLflow; cells are logged below it."""

    study: StudyRun
    uri: str
    parent: str
    """Its run id."""

    def spec(self, cell: Cell, title: str, rows: Iterable[Row]) -> RunSpec:
        """The spec of a named cell's run, logged as ``title``; the fields that ``rows`` change are params."""
        study = self.study
        assert cell.name is not None
        tags = {"titans.row": cell.row, "titans.seed": str(cell.seed), "titans.scale": study.scale_name}
        tracking = Tracking(self.uri, title, self.parent, params(cell, rows), tags)
        labels = {"study": study.study.name, "row": cell.row}
        return RunSpec(cell.config, study.root, cell.name, study.commit, study.resources, tracking, labels)


@contextmanager
def tracked(study: StudyRun) -> Iterator[Tracker]:
    """Open the study's parent run before any worker writes to the store.

    MLflow runs of cells that a killed driver left open are ended, before and after. Raises UsageError.
    """
    from titans_platform.tracking import open_store

    store = open_store(study.root)
    parent = store.study_run(study.label, {"titans.scale": study.scale_name, "titans.commit": study.commit})
    end_orphaned_runs(store, parent, study.root)
    try:
        yield Tracker(study, store.uri, parent)
    except BaseException:
        # a study that is done is closed with its table; this one would stay RUNNING
        store.end(parent, "KILLED")
        raise
    finally:
        end_orphaned_runs(store, parent, study.root)


def params(cell: Cell, rows: Iterable[Row]) -> dict[str, Any]:
    """MLflow params of a cell: row, seed, the fields of every study, and those that ``rows`` change.

    Fields of the neural memory are left out for a model without one.
    """
    memory = _has_memory(cell.config.model.model_copy(update={"n_layers": 1}).model_dump_json())
    columns, config = fields(rows), flatten(cell.config.model_dump(mode="json"))
    known = {field for field in config if memory or not field.startswith(MEMORY)}
    named = {name: config[field] for name, field in columns.items() if field in known}
    return {"row": cell.row, "seed": cell.seed} | named


@cache
def _has_memory(model: str) -> bool:
    import torch

    from titans_core import LanguageModel, NeuralMemory

    with torch.device("meta"):
        built = LanguageModel(ModelConfig.model_validate_json(model))
    return any(isinstance(module, NeuralMemory) for module in built.modules())


def fields(rows: Iterable[Row]) -> dict[str, str]:
    """Config fields by column name: the field's last word, or all of it where two fields share the word."""
    changed = dict.fromkeys(key for row in rows for key in flatten(row.set))
    more = [key for key in changed if key not in ALWAYS.values()]
    last = [key.rpartition(".")[2] for key in more]
    unique = [word not in ALWAYS and last.count(word) == 1 for word in last]
    return ALWAYS | {word if alone else key: key for word, key, alone in zip(last, more, unique, strict=True)}
