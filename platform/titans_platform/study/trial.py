"""One trial of a search on a worker: from rung to rung, until its end or until ASHA stops it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from titans_platform.config import RunConfig
from titans_platform.errors import TitansError
from titans_platform.files import held, read_json, write_json
from titans_platform.runs.check import run_name
from titans_platform.runs.execute import execute
from titans_platform.runs.folder import Busy
from titans_platform.runs.ray_session import die_with_parent
from titans_platform.runs.spec import Rung, RunSpec
from titans_platform.study.schedule import StudyRun, Tracker
from titans_platform.study.space import Search
from titans_platform.study.spec import Cell, Row, overlay, resolve

FOUND = "found"
"""The row that the best trial becomes."""
TRIALS = "trials"


@dataclass(frozen=True)
class Climb:
    """What every trial of a search shares."""

    tracker: Tracker
    search: Search
    milestones: tuple[int, ...]
    """The optimiser steps at which a trial is measured."""
    data: str
    """Fingerprint of the data."""


def trial_row(run: StudyRun, params: dict[str, Any], name: str = FOUND) -> Row:
    """The study's first row with a trial's parameters laid over it."""
    first = run.study.rows_at(run.scale_name)[0]
    return Row(name=name, set=overlay(first.set, params))


def trial_config(run: StudyRun, search: Search, params: dict[str, Any]) -> RunConfig:
    """The config of a trial. Raises UsageError."""
    config = resolve(run.study, run.scale_name, trial_row(run, params), run.overrides)
    return config.model_copy(update={"seed": search.seed})


def run_trial(space: dict[str, Any]) -> None:
    """Train the parameters in ``space`` from rung to rung; each measurement goes to ASHA."""
    from ray import tune

    die_with_parent()
    params = dict(space)
    climb: Climb = params.pop("climb")
    run = climb.tracker.run
    config = trial_config(run, climb.search, params)
    name = run_name(config, climb.data, run.resources)
    spec = _spec(climb, config, name, _number(run, name, params))
    try:
        for step in climb.milestones:
            value = _measured(spec, Rung(step, climb.search.metric))
            if value is None:
                return
            tune.report({"steps": step, "value": value})
    except SystemExit:
        # how Tune ends a trial, inside of report
        if not spec.folder.result():
            spec.folder.stop("ASHA")
        raise


def _spec(climb: Climb, config: RunConfig, name: str, number: int) -> RunSpec:
    run, title = climb.tracker.run, f"trial {number}"
    searched = trial_row(run, next(iter(climb.search.corners())))
    tracking = climb.tracker.tracking(Cell(title, config.seed, config, name), title, [searched])
    labels = {"study": run.study.name, "row": title}
    return RunSpec(config, run.root, name, run.commit, run.resources, tracking, labels)


def _number(run: StudyRun, name: str, params: dict[str, Any]) -> int:
    """The trial's number on the study's list, where it is put the first time."""
    listed = run.folder / TRIALS
    path = listed / f"{name}.json"
    # trials that start together must not take the same number
    with held(listed / ".lock", timeout=30):
        if (known := read_json(path)) is not None:
            return int(known["number"])
        number = len(list(listed.glob("*.json")))
        write_json(path, {"cell": name, "number": number, "began": time.time(), "params": params})
    return number


def _measured(spec: RunSpec, rung: Rung) -> float | None:
    """The metric at a rung, from the files or by training up to it; None where the trial has ended."""
    folder, last = spec.folder, rung.step == spec.config.optim.steps
    if last and (result := folder.result()):
        return float(result["columns"][rung.column])
    if (known := folder.rungs().get(rung.step)) is not None:
        return known
    if folder.was_stopped():
        return None
    try:
        found = execute(spec, None if last else rung)
    except TitansError as error:
        if not isinstance(error, Busy):
            # a learning rate that diverges would diverge again
            folder.stop(str(error))
        return None
    except Exception:
        return None
    return float((found["columns"] if last else found)[rung.column])
