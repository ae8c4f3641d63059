"""Extend a run: start a longer run from the checkpoint of a shorter one, where the result is identical.

Two runs that differ only in their schedule take the same steps as long as their learning rates are equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from titans_platform.config import CheckpointConfig, OptimConfig, RunConfig
from titans_platform.errors import UsageError
from titans_platform.objectives import Objective, build_objective
from titans_platform.runs.folder import CHECKPOINTS, CONFIG, RunFolder
from titans_platform.runs.reporter import mlflow_run
from titans_platform.runs.spec import RunSpec
from titans_platform.training.checkpoint import copy_checkpoint, saved, step_of
from titans_platform.training.loop import Progress
from titans_platform.training.manifest import find_corruption
from titans_platform.training.rates import equal_rates, warmup_steps

SCHEDULE = ("steps", "schedule", "min_lr_ratio", "warmup_fraction", "warmup_steps")
"""Fields of `OptimConfig` that affect only the learning rate of each step."""


class Earlier(NamedTuple):
    """An earlier run whose config differs from the new run's only in its schedule."""

    folder: RunFolder
    optim: OptimConfig
    commit: str | None
    exact: int
    """Number of initial steps that are identical in both runs."""
    point: Path | None
    """The last checkpoint within those steps, or None."""


def resume_from_shorter(spec: RunSpec, data_fingerprint: str) -> str | None:
    """Start a run from the checkpoint of a shorter run of the same config. Returns a message that names the
    checkpoint or says why there is none.

    The result is identical to training from the start: up to the checkpoint's step the learning rates, data,
    code and number of workers are the same. Returns None if the run has begun, if it uses its best checkpoint
    (``eval.at``, ``eval.patience``), or if there is no shorter run.
    """
    if spec.folder.state() != "missing" or saved(spec.folder.path / CHECKPOINTS):
        return None
    if spec.config.eval.at == "best" or spec.config.eval.patience:
        # the earlier run's best checkpoint may be one that this run would not have written
        return None
    found = list(_earlier(spec, data_fingerprint))
    usable = [one for one in found if one.point and one.commit == spec.commit]
    if usable:
        return _take(spec, max(usable, key=lambda one: one.point.name if one.point else ""))
    shorter = [one for one in found if _same_command(one.optim, spec.config.optim)]
    if not shorter:
        return None
    longest = max(shorter, key=lambda one: one.optim.steps)
    return (
        f"cannot resume from run {longest.folder.name} of {longest.optim.steps} steps: "
        f"{_why_not(longest, spec)}; training from the start"
    )


def _earlier(spec: RunSpec, data_fingerprint: str) -> Iterator[Earlier]:
    wanted = _but_schedule(spec.config)
    for path in sorted((spec.root / "cells").glob(f"*/{CONFIG}")):
        folder = RunFolder(spec.root, path.parent.name)
        objective = _objective_of(path)
        if objective is None or _but_schedule(objective.cfg) != wanted or folder.is_held():
            continue
        # an equal name means equal data, evaluation and number of workers
        if objective.run_name(data_fingerprint, spec.resources.hashed_workers) == folder.name != spec.name:
            optim, target = objective.cfg.optim, spec.config.optim
            exact = equal_rates(optim, target)
            # the final loss is a mean over the last twentieth of the steps, so none of those may be done yet
            point = _last(folder, min(exact, int(0.95 * target.steps)))
            yield Earlier(folder, optim, folder.commit(), exact, point)


def _objective_of(path: Path) -> Objective | None:
    """The objective of a run, from its config.json; None if this version cannot read the file."""
    try:
        return build_objective(RunConfig.model_validate_json(path.read_bytes()))
    except (OSError, ValidationError, UsageError):
        return None


def _but_schedule(cfg: RunConfig) -> RunConfig:
    """The config with its schedule, and the fields that do not affect training, at their defaults."""
    defaults = {name: OptimConfig.model_fields[name].default for name in SCHEDULE}
    plain, rewinds = RunConfig(), cfg.optim.on_divergence == "rewind"
    return cfg.model_copy(
        update={
            "optim": cfg.optim.model_copy(update=defaults),
            "eval": cfg.eval.model_copy(update={"every": None}),
            # a rewind restores a checkpoint, so the interval matters
            "checkpoint": CheckpointConfig(every=cfg.checkpoint_interval) if rewinds else plain.checkpoint,
            "log": plain.log,
        }
    )


def _same_command(one: OptimConfig, longer: OptimConfig) -> bool:
    """Whether the configs differ only in the number of steps, and ``one`` has fewer."""
    kept = {"steps": longer.steps, "warmup_steps": longer.warmup_steps}
    return one.steps < longer.steps and one.model_copy(update=kept) == longer


def _last(folder: RunFolder, most: int) -> Path | None:
    """The last intact checkpoint at or before step ``most``."""
    points = (path for path in saved(folder.path / CHECKPOINTS) if step_of(path) <= most)
    return next((path for path in points if find_corruption(path) is None), None)


def _take(spec: RunSpec, earlier: Earlier) -> str:
    point = earlier.point
    assert point
    step = step_of(point)
    with spec.folder.hold(wait=10):
        spec.folder.begin(spec.commit)
        copy_checkpoint(point, spec.folder.path / CHECKPOINTS, _begun)
        result = earlier.folder.result()
        if spec.tracking and result and (logged := result.mlflow_run_id):
            store, run_id = mlflow_run(spec.folder, spec.tracking)
            store.copy_curves(logged, run_id, step)
    return f"resuming from step {step} of run {earlier.folder.name}, which trained the same steps"


def _begun(progress: Progress) -> Progress:
    """The progress of the longer run at this step: none of its last twentieth is done."""
    return replace(progress, tail_loss=0.0, tail_steps=0)


def _why_not(earlier: Earlier, spec: RunSpec) -> str:
    one, target = earlier.optim, spec.config.optim
    if earlier.commit != spec.commit:
        return "other code trained it"
    if warmup_steps(one) != warmup_steps(target):
        return (
            f"its warm-up has {warmup_steps(one)} steps, this one's {warmup_steps(target)} "
            f"(optim.warmup_steps={warmup_steps(one)} makes them equal)"
        )
    if target.schedule in ("constant", "wsd"):
        return f"no checkpoint of its first {earlier.exact} steps is kept (checkpoint.keep)"
    return (
        f"optim.schedule {target.schedule} falls over all steps, so that rates differ from step "
        f"{earlier.exact + 1} on (constant and wsd can be extended)"
    )
