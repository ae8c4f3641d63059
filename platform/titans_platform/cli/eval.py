"""`titans eval`: measure a run again, or one checkpoint of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from titans_platform.cli.measures import measures_table
from titans_platform.cli.options import echo_json, json_option, root_option, set_option
from titans_platform.errors import UsageError

if TYPE_CHECKING:
    from titans_platform.config import RunConfig


@click.command("eval")
@click.argument("run")
@set_option
@root_option
@json_option
def evaluate(run: str, overrides: tuple[str, ...], root: Path, as_json: bool) -> None:
    """Measure RUN and print the table, chance beside each value.

    RUN is a run's name (or how it begins), its folder, its MLflow run id, or the folder of one checkpoint.
    --set changes what is measured: only eval.* may be set.

    \b
    Example:
      titans eval 3f2a91c0 --set eval.items=500
    """
    console = Console(stderr=as_json)
    point = find_checkpoint(run, root)
    cfg = _config(point, overrides)
    with console.status(f"measuring {point.name}"):
        measured = _measure(cfg, point, root)
    if as_json:
        echo_json(measured)
    else:
        console.print(measures_table(measured))
        console.print(f"run {measured['cell']}, step {measured['step']:,}")


def find_checkpoint(run: str, root: Path) -> Path:
    """The folder of the checkpoint that ``run`` names. Raises UsageError."""
    from titans_platform.runs.folder import CHECKPOINTS
    from titans_platform.training.checkpoint import newest
    from titans_platform.training.manifest import MANIFEST

    path = Path(run)
    if (path / MANIFEST).is_file() or path.name.startswith("step-"):
        if not path.is_dir():
            raise UsageError(f"{run}: no such checkpoint")
        return path.resolve()
    folder = path if path.is_dir() else _folder_named(run, root)
    point = newest(folder / CHECKPOINTS)
    if point is None:
        raise UsageError(f"{run}: {folder} has no whole checkpoint; train it first")
    return point.resolve()


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


def _config(point: Path, overrides: tuple[str, ...]) -> RunConfig:
    from titans_platform.loading import load_config
    from titans_platform.runs.folder import CONFIG

    other = next((o for o in overrides if not o.startswith("eval.")), None)
    if other:
        raise UsageError(f"--set {other}: the run is trained; only eval.* may be set")
    # JSON is YAML
    return load_config(point.parents[1] / CONFIG, overrides)


def _measure(cfg: RunConfig, point: Path, root: Path) -> dict[str, Any]:
    import torch

    from titans_platform.objectives import build_objective
    from titans_platform.training.checkpoint import load_model
    from titans_platform.training.loop import deterministic

    objective = build_objective(cfg)
    data = objective.open(root)
    with deterministic(cfg.seed, cfg.threads):
        model = objective.build_model()
        step = load_model(point, model)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        measured = objective.evaluate(model.to(device), data, device=device)
    return {"cell": point.parents[1].name, "step": step, **measured}
