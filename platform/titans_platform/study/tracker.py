"""A study in MLflow: its parent run, the runs of its cells below it, and the columns they are compared by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titans_core.config import ModelConfig
from titans_platform.runs.folder import RunFolder
from titans_platform.runs.reporter import log_result
from titans_platform.runs.spec import RunSpec, Tracking
from titans_platform.study.grid import Cell
from titans_platform.study.plan import StudyRun
from titans_platform.study.spec import Row
from titans_platform.text import flatten

if TYPE_CHECKING:
    from titans_platform.tracking import Store

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
    """The study's parent run in MLflow: what a worker needs to log its cell below it."""

    run: StudyRun
    uri: str
    parent: str
    """Its run id."""

    def spec(self, cell: Cell, title: str, rows: Iterable[Row]) -> RunSpec:
        """The run of a named cell, logged as ``title`` with the fields that ``rows`` change as columns."""
        run = self.run
        assert cell.name is not None
        tags = {"titans.row": cell.row, "titans.seed": str(cell.seed), "titans.scale": run.scale_name}
        tracking = Tracking(self.uri, title, self.parent, params(cell, rows), tags)
        labels = {"study": run.study.name, "row": cell.row}
        return RunSpec(cell.config, run.root, cell.name, run.commit, run.resources, tracking, labels)


@contextmanager
def tracked(run: StudyRun) -> Iterator[Tracker]:
    """Open the study's parent run, which the driver does before a worker writes to the store.

    What cells left open under it is ended before and after: a killed driver's too. Raises UsageError.
    """
    from titans_platform.tracking import open_store

    store = open_store(run.root)
    parent = store.study_run(run.label, {"titans.scale": run.scale_name, "titans.commit": run.commit})
    _settle(store, parent, run.root)
    try:
        yield Tracker(run, store.uri, parent)
    except BaseException:
        # a study that ends by itself is closed with its table; this one would be shown as running
        store.end(parent, "KILLED")
        raise
    finally:
        _settle(store, parent, run.root)


def _settle(store: Store, parent: str, root: Path) -> None:
    """End the runs of cells whose process had no chance to."""
    for name, run_id in store.running(parent).items():
        folder = RunFolder(root, name)
        state = folder.state()
        if result := folder.result():
            log_result(store.run(run_id), result, folder.ended())
        elif state != "running":
            ends = {"failed": "FAILED"} | ({"interrupted": "FINISHED"} if folder.was_stopped() else {})
            store.end(run_id, ends.get(state, "KILLED"), folder.ended())


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
