"""More steps for a run that is there: a longer run goes on from a checkpoint of it where that is exact.

Two runs that differ in their schedules alone make the same steps for as long as their rates are the same.
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
"""Fields of `OptimConfig` that decide the rate of each step, and nothing else."""


class Earlier(NamedTuple):
    """A run like the one that is to begin, but for its schedule."""

    folder: RunFolder
    optim: OptimConfig
    commit: str | None
    exact: int
    """Steps from the first on that the two have in common."""
    point: Path | None
    """The last checkpoint within them; None where there is none."""


def go_on_from_shorter(spec: RunSpec, data_fingerprint: str) -> str | None:
    """Give a run that has not begun what an earlier one trained of it; a line that says so, or why not.

    The numbers are those of a run from the start: the checkpoint is from a step up to which every rate is
    the same, of the same data, code and number of workers. None: there is no run to go on from.
    """
    if spec.folder.state() != "missing" or saved(spec.folder.path / CHECKPOINTS):
        return None
    if spec.config.eval.at == "best" or spec.config.eval.patience:
        # the best of the earlier run may be a checkpoint that this one would not have
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
        f"run {longest.folder.name} of {longest.optim.steps} steps cannot be gone on with: "
        f"{_why_not(longest, spec)}; training from the start"
    )


def _earlier(spec: RunSpec, data_fingerprint: str) -> Iterator[Earlier]:
    wanted = _but_schedule(spec.config)
    for path in sorted((spec.root / "cells").glob(f"*/{CONFIG}")):
        folder = RunFolder(spec.root, path.parent.name)
        objective = _objective_of(path)
        if objective is None or _but_schedule(objective.cfg) != wanted or folder.is_held():
            continue
        # the name says that data, evaluation and number of workers are ours too
        if objective.run_name(data_fingerprint, spec.resources.hashed_workers) == folder.name != spec.name:
            optim, target = objective.cfg.optim, spec.config.optim
            exact = equal_rates(optim, target)
            # the loss that a result tells is of the last twentieth of the steps, none of which are done
            point = _last(folder, min(exact, int(0.95 * target.steps)))
            yield Earlier(folder, optim, folder.commit(), exact, point)


def _objective_of(path: Path) -> Objective | None:
    """What a run trained on, from its config.json; None where this version does not read it."""
    try:
        return build_objective(RunConfig.model_validate_json(path.read_bytes()))
    except (OSError, ValidationError, UsageError):
        return None


def _but_schedule(cfg: RunConfig) -> RunConfig:
    """The config with what is of no account at its default."""
    defaults = {name: OptimConfig.model_fields[name].default for name in SCHEDULE}
    plain, rewinds = RunConfig(), cfg.optim.on_divergence == "rewind"
    return cfg.model_copy(
        update={
            "optim": cfg.optim.model_copy(update=defaults),
            "eval": cfg.eval.model_copy(update={"every": None}),
            # a rewind goes back to a checkpoint
            "checkpoint": CheckpointConfig(every=cfg.checkpoint_interval) if rewinds else plain.checkpoint,
            "log": plain.log,
        }
    )


def _same_command(one: OptimConfig, longer: OptimConfig) -> bool:
    """Whether one only has fewer steps."""
    kept = {"steps": longer.steps, "warmup_steps": longer.warmup_steps}
    return one.steps < longer.steps and one.model_copy(update=kept) == longer


def _last(folder: RunFolder, most: int) -> Path | None:
    """The last whole checkpoint after at most so many steps."""
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
    return f"going on from step {step} of run {earlier.folder.name}, which trained the same steps"


def _begun(progress: Progress) -> Progress:
    """Where a run with more steps is at this point: none of its last twentieth are done."""
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
        f"{earlier.exact + 1} on (constant and wsd can be gone on with)"
    )
