"""Find a trained run by name, folder, MLflow run id or checkpoint, and load its model."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titans_core import Model
from titans_platform.config import RunConfig
from titans_platform.errors import UsageError
from titans_platform.loading import load_config
from titans_platform.objectives import Objective, build_objective
from titans_platform.runs.folder import CHECKPOINTS, CONFIG
from titans_platform.training.checkpoint import at_step, load_model, saved
from titans_platform.training.manifest import MANIFEST, find_corruption, read_manifest

if TYPE_CHECKING:
    from titans_platform.data import Tokenizer


def load_run(
    path_or_name: Path | str, root: Path | str | None = None
) -> tuple[Model, Tokenizer | None, RunConfig]:
    """Load a run's model in eval mode on the CPU, with its tokenizer and config.

    Of a run the best checkpoint is loaded if ``eval.at`` is best, else the newest. ``path_or_name`` is the
    run's name (or a prefix of it), its folder, its MLflow run id, or the folder of one checkpoint; names are
    looked up under ``root``, by default TITANS_HOME, else `titans-runs`. The tokenizer is None for an
    objective without one.
    Raises UsageError if there is no such run, it has no checkpoint, or its newest one is damaged.
    """
    point = find_checkpoint(str(path_or_name), Path(root or os.environ.get("TITANS_HOME") or "titans-runs"))
    model, _, objective = load_checkpoint(point, read_config(point))
    return model.eval(), objective.tokenizer(), objective.cfg


def find_checkpoint(run: str, root: Path) -> Path:
    """The folder of the checkpoint that ``run`` names. For a run it is the newest one, or the best one if
    ``eval.at`` is best. Raises UsageError if there is none, or it is damaged.
    """
    path = Path(run)
    if (path / MANIFEST).is_file() or path.name.startswith("step-"):
        if not path.is_dir():
            raise UsageError(f"{run}: no such checkpoint")
        return path.resolve()
    folder = path if path.is_dir() else _folder_named(run, root)
    points = saved(folder / CHECKPOINTS)
    if not points:
        raise UsageError(f"{run}: {folder} has no checkpoint; train it first")
    # an older checkpoint has other weights, so the user must choose it explicitly
    if damage := find_corruption(points[0]):
        older = next((point for point in points[1:] if find_corruption(point) is None), None)
        fix = f"to use an older checkpoint, give {older}" if older else "no older checkpoint is intact"
        raise UsageError(f"{run}: checkpoint {points[0]} is damaged: {damage}; {fix}")
    return _measured(points[0]).resolve()


def _measured(newest: Path) -> Path:
    if read_config(newest).eval.at == "last":
        return newest
    best = read_manifest(newest).progress.best_step
    return at_step(newest.parent, best) if best else newest


def located(cfg: RunConfig, root: Path) -> RunConfig:
    """The config with ``start_from`` resolved to the folder of a checkpoint. Raises UsageError."""
    if cfg.start_from is None:
        return cfg
    try:
        point = find_checkpoint(cfg.start_from, root)
    except UsageError as error:
        raise UsageError(f"start_from: {error}") from None
    return cfg.model_copy(update={"start_from": str(point)})


def read_config(point: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """The config of the run that wrote the checkpoint at ``point``. Raises UsageError."""
    # JSON is YAML
    return load_config(point.parents[1] / CONFIG, overrides)


def load_checkpoint(point: Path, cfg: RunConfig) -> tuple[Model, int, Objective[Any]]:
    """Build the model of ``cfg`` and load a checkpoint into it. Returns model, step and objective.

    Raises UsageError if the checkpoint's weights do not match the model.
    """
    objective = build_objective(cfg)
    model = objective.build_model()
    return model, load_model(point, model), objective


def _folder_named(run: str, root: Path) -> Path:
    cells = root / "cells"
    matches = sorted(p for p in cells.glob(f"{run}*") if p.is_dir()) if run.isalnum() else []
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UsageError(f"{run}: {len(matches)} runs begin so: {', '.join(p.name for p in matches[:5])}")
    # an MLflow run id is 32 hex digits, a cell's name 12
    if len(run) == 32 and (root / "mlflow.db").is_file():
        from titans_platform.tracking import open_store

        return cells / open_store(root).cell_of(run)
    raise UsageError(f"{run}: no such run under {cells}; give its name, folder or MLflow run id")
