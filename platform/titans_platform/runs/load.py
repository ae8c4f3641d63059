"""Find a trained run by name, folder, MLflow run id or checkpoint; load its model, or resume from it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from titans_core import Model
from titans_kernels import accelerate
from titans_platform.config import VOCABULARIES, RunConfig
from titans_platform.data import NotPrepared, Tokenizer, load_tokenizer
from titans_platform.data.parts import PrepareProgress
from titans_platform.errors import UsageError, within
from titans_platform.files import read_json
from titans_platform.loading import config_from
from titans_platform.objectives import Objective, build_objective, build_small, run_name
from titans_platform.provenance import commit
from titans_platform.runs.folder import CHECKPOINTS, RECORD, TOKENIZER, RunFolder, runs_under
from titans_platform.runs.reporter import send_left
from titans_platform.runs.spec import Resources, RunSpec
from titans_platform.text import flatten
from titans_platform.training.checkpoint import (
    MANIFEST,
    at_step,
    check_weights,
    find_corruption,
    load_model,
    read_manifest,
    saved,
    step_of,
)
from titans_platform.training.optim import equal_steps

SCHEDULE = ("steps", "schedule", "min_lr_ratio", "warmup_fraction", "warmup_steps")
"""Fields of `OptimConfig` that affect only the learning rate of each step."""
NOT_TRAINED = {"checkpoint": True, "log": True}
"""Sections that do not affect training."""


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
    """Find the folder of the checkpoint that ``run`` names: of a run the newest, or its best (``eval.at``).

    A model of `titans adapt` names its last run.

    Raises UsageError if there is none, or it is damaged.
    """
    path = Path(run)
    if not run:
        raise UsageError("RUN: is empty; give a run's name")
    if (path / MANIFEST).is_file() or path.name.startswith("step-"):
        if not path.is_dir():
            raise UsageError(f"{run}: no such checkpoint")
        return path.resolve()
    if trained := (read_json(path / "adapt.json") or {}).get("run"):  # of `titans adapt`: its last run
        return find_checkpoint(trained, root)
    if (path / "config.json").is_file():
        fix = "give the run that trained it (titans runs list); titans generate takes a model of titans adapt"
        raise UsageError(f"{run}: a transformers model, and not a run; {fix}")
    folder = path if path.is_dir() else find_run(run, root).path
    if not (points := saved(folder / CHECKPOINTS)):
        raise UsageError(f"{run}: {folder} has no checkpoint; train it first")
    # an older checkpoint has other weights, so the user must choose it explicitly
    if damage := find_corruption(points[0]):
        older = next((point for point in points[1:] if find_corruption(point) is None), None)
        fix = f"to use an older checkpoint, give {older}" if older else "no older checkpoint is intact"
        raise UsageError(f"{run}: checkpoint {points[0]} is damaged: {damage}; {fix}")
    best = read_manifest(points[0]).progress.best_step
    if best and config_of(points[0].parents[1]).eval.at == "best":
        return at_step(points[0].parent, best).resolve()
    return points[0].resolve()


def located(cfg: RunConfig, root: Path) -> RunConfig:
    """Resolve ``start_from`` of the config to the folder of a checkpoint. Raises UsageError."""
    if cfg.start_from is None:
        return cfg
    with within("start_from", sep=": "):
        return cfg.model_copy(update={"start_from": str(find_checkpoint(cfg.start_from, root))})


def check_start(cfg: RunConfig) -> None:
    """Check that the checkpoint at ``start_from`` has the weights of the run's model. Raises UsageError."""
    if cfg.start_from is not None:
        model = build_small(build_objective(cfg), cfg.model.n_layers)
        with within("start_from", sep=": "):
            check_weights(Path(cfg.start_from), model)


def prepared_spec(
    cfg: RunConfig, root: Path, resources: Resources, resume_from: str | None = None,
    progress: PrepareProgress | None = None,
) -> RunSpec | None:  # fmt: skip
    """Return the spec of a run outside a study, which starts from the shorter run ``resume_from``.

    ``progress`` is called while the data are prepared; None: only opened, and the spec is None if they are
    not prepared. Raises UsageError, StorageError.
    """
    cfg = located(cfg, root)
    check_start(cfg)
    objective = build_objective(cfg)
    if progress:
        from titans_platform.tracking import check_store

        # refused before time is spent on data
        check_store(root)
        send_left(root)
        data = objective.prepare(root, progress)
    else:
        try:
            data = objective.open(root)
        except NotPrepared:
            if resume_from:
                _shorter_run(resume_from, root)
            return objective.check_sources()
    objective.check(data)
    spec = spec_for(cfg, root, resources)
    # a run that has a checkpoint of its own resumes from that
    if not resume_from or any((spec.folder.path / CHECKPOINTS).glob("step-*")):
        return spec
    return replace(spec, start=checkpoint_of_shorter(spec, _shorter_run(resume_from, root)))


def _shorter_run(resume_from: str, root: Path) -> RunFolder:
    path = Path(resume_from).resolve()
    return RunFolder.at(path) if path.is_dir() else find_run(resume_from, root.resolve())


def spec_for(cfg: RunConfig, root: Path, resources: Resources = Resources(), **fields: Any) -> RunSpec:
    """Build a `RunSpec` for a config whose data are prepared under ``root``; ``fields`` replace its own.

    Raises UsageError if the data are not prepared.
    """
    data = build_objective(cfg).open(root).fingerprint
    name = run_name(cfg, data, resources.hashed_workers)
    return replace(RunSpec(cfg, root.resolve(), name, commit(), data, resources), **fields)


def read_config(point: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Return the config of the run that wrote the checkpoint at ``point``. Raises UsageError.

    It names the run's own copy of its tokenizer: the file that the config names may have changed since.
    """
    folder = point.parents[1]
    cfg, record = config_of(folder, overrides), RunFolder.at(folder).record()
    if (spec := cfg.data.tokenizer) in VOCABULARIES:
        return cfg
    kept = next(map(str, folder.glob(f"{TOKENIZER}.*")), None)
    if kept is None or load_tokenizer(kept).fingerprint != record.get("tokenizer"):
        why = f"{folder} has no intact copy of its tokenizer {spec}"
        raise UsageError(f"data.tokenizer: {why}; train the run again")
    return cfg.model_copy(update={"data": cfg.data.model_copy(update={"tokenizer": kept})})


def config_of(folder: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read the config of the run in ``folder``. Raises UsageError."""
    if not (config := RunFolder.at(folder).record().get("config")):
        raise UsageError(f"{folder / RECORD}: has no config; is it the folder of a run?")
    return config_from(config, overrides)


def load_checkpoint(point: Path, cfg: RunConfig) -> tuple[Model, int, Objective[Any]]:
    """Build the model of ``cfg`` and load a checkpoint into it. Returns model, step and objective.

    Raises UsageError if the checkpoint's weights do not match the model.
    """
    objective = build_objective(cfg)
    model = accelerate(objective.build_model())
    return model, load_model(point, model), objective


def find_run(run: str, root: Path) -> RunFolder:
    """Find a run by the beginning of its name or its MLflow run id. Raises UsageError: none, or several."""
    folders = runs_under(root)
    named = [folder for folder in folders if run and folder.name.startswith(run)]
    named = named or [f for f in folders if f.record().get("mlflow", {}).get("run_id") == run]
    if len(named) == 1:
        return named[0]
    under = root / "cells"
    if named:
        names = ", ".join(folder.name for folder in named[:5])
        raise UsageError(f"{run}: {len(named)} runs under {under} begin so: {names}; give more of the name")
    raise UsageError(f"{run}: no such run under {under}; give its name, folder or MLflow run id")


def checkpoint_of_shorter(spec: RunSpec, shorter: RunFolder) -> Path:
    """Find the checkpoint of a shorter run of the same config from which a run can start.

    Two runs that differ only in their schedule take the same steps as long as their learning rates and
    windows are equal, so the result is identical to training from the start. Raises UsageError with the
    reason if no checkpoint of the shorter run will do.
    """
    cfg, at = config_of(shorter.path), f"--resume-from {shorter.name}"
    if reason := _why_not_resumed(spec, shorter, cfg):
        raise UsageError(f"{at}: {reason}; leave it out to train from the start")
    # the final loss is a mean over the last twentieth of the steps, so none of those may be done yet
    optim = spec.config.optim
    last = min(equal_steps(cfg.optim, optim, cfg.seed), int(0.95 * optim.steps))
    points = (point for point in saved(shorter.path / CHECKPOINTS) if step_of(point) <= last)
    if (point := next((point for point in points if find_corruption(point) is None), None)) is None:
        raise UsageError(
            f"{at}: it keeps no checkpoint of its first {last} steps, which are equal; give "
            "optim.schedule constant or wsd, equal warmup_steps, or a larger checkpoint.keep"
        )
    return point


def _why_not_resumed(spec: RunSpec, shorter: RunFolder, cfg: RunConfig) -> str | None:
    """Return None if the steps of another run may count for this one, else the reason."""
    this, other = (
        flatten(c.model_dump(mode="json", exclude={"optim": set(SCHEDULE), "eval": {"every"}} | NOT_TRAINED))
        for c in (spec.config, cfg)
    )
    if key := next((key for key in sorted(this | other) if this.get(key) != other.get(key)), None):
        return f"its {key} is {other.get(key)}, this run's {this.get(key)}"
    if spec.config.eval.at == "best" or spec.config.eval.patience:
        return "its best checkpoint (eval.at, eval.patience) may be one that this run would not have written"
    # an equal name means equal data, evaluation and number of workers
    if run_name(cfg, spec.data, spec.resources.hashed_workers) != shorter.name:
        return "its data, versions of tasks or number of workers are not this run's"
    if shorter.commit() != spec.commit:
        return "other code trained it"
    return "a process still trains it" if shorter.is_held() else None
