"""Running a study's cells: what is missing becomes trials of Ray Tune, what is done is left alone."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from titans_platform.errors import Interrupted, TitansError, UsageError
from titans_platform.files import file_lock, write_json
from titans_platform.runs.folder import Busy, RunFolder
from titans_platform.runs.ray_session import die_with_parent, ray_session
from titans_platform.runs.spec import DRIVER_CPU, RunSpec
from titans_platform.study.ledger import Marks
from titans_platform.study.plan import Plan, StudyRun
from titans_platform.study.tracker import tracked

MANIFEST, STUDY = "cells.json", "study.json"
SEARCH = "search.json"
"""The record of a study's search: its trials, a line on how it went, and what it found."""
MAX_DEATHS = 3
"""Times a trial whose process died is started again without having come further."""


@contextmanager
def only_driver(run: StudyRun) -> Iterator[None]:
    """Keep a second driver off the same study; the lock dies with the process."""
    # longer than another shell's sweep status looks at it
    with file_lock(run.folder / "lock", timeout=2) as got:
        if not got:
            raise UsageError(f"{run.label}: another sweep run works on it under {run.root}; see sweep status")
        yield


def write_manifest(run: StudyRun) -> None:
    """Write which cells the study has, and what it is, for `sweep status` and for reports."""
    listed = [
        {"cell": c.name, "row": c.row, "seed": c.seed, "config": c.config.model_dump(mode="json")}
        for c in run.whole
    ]
    manifest = {
        "study": run.study.name,
        "scale": run.scale_name,
        "set": list(run.overrides),
        "commit": run.commit,
        "host": platform.node(),
        "mlflow": os.environ.get("TITANS_MLFLOW"),
        "cells": listed,
    }
    write_json(run.folder / STUDY, run.study.model_dump(mode="json"))
    write_json(run.folder / MANIFEST, manifest)


def run_cells(run: StudyRun, plan: Plan, marks: Marks) -> None:
    """Run the plan's missing cells. A cell that fails is written down and stops no other one."""
    for cell in plan.todo:
        cell.folder(run.root).forget_failure()
    marks.mark("MLflow runs")
    with output_to(run.folder / "ray.log"), tracked(run) as tracker:
        specs = [tracker.spec(cell, f"{cell.row} · seed {cell.seed}", run.rows) for cell in plan.todo]
        for cell in plan.stale:
            if cell in plan.todo:
                cell.folder(run.root).set_aside()
        marks.mark("start of Ray")
        with ray_for(run, plan):
            marks.mark("cells")
            _tune(run, plan, specs)
            marks.mark("end of Ray")
        marks.mark("report")


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Send what Ray prints to a file; the console that draws was opened before and stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", buffering=1) as log, redirect_stdout(log), redirect_stderr(log):
        yield


@contextmanager
def ray_for(run: StudyRun, plan: Plan) -> Iterator[None]:
    """A Ray session as large as the plan needs; inside a job the cluster's."""
    resources = run.resources
    cpus = resources.most * resources.cpus_per_worker * plan.concurrency + (resources.most > 1)
    with ray_session(cpus, resources.gpus * plan.concurrency):
        yield


def _tune(run: StudyRun, plan: Plan, specs: Sequence[RunSpec]) -> None:
    """Every run as a trial, first come first served.

    One whose process kept dying is begun again for as long as it comes further in between.
    """
    from ray import tune

    from titans_platform.runs.execute import kept_steps

    left = list(specs)
    while left:
        space = {"spec": tune.grid_search(left)}
        folders, kept = [spec.folder for spec in left], {spec.name: kept_steps(spec) for spec in left}
        results = run_trials(run, _trial, space, plan.concurrency, lambda folders=folders: folders)
        died = [result.config["spec"] for result in results if result.error is not None]
        left = [spec for spec in died if kept_steps(spec) > kept[spec.name]]
        for spec in died:
            if spec not in left:
                # it could not record it itself
                error = TitansError(f"its process died {MAX_DEATHS + 1} times")
                spec.folder.record_failure(error, run.commit)


def _trial(space: dict[str, Any]) -> dict[str, Any]:
    """Run one cell on a worker. A failure is in its folder and is not raised: Tune would try again."""
    from titans_platform.runs.execute import execute

    die_with_parent()
    try:
        execute(space["spec"])
    except Interrupted:
        return {"state": "interrupted"}
    except Exception as error:
        return {"state": "busy" if isinstance(error, Busy) else "failed"}
    return {"state": "done"}


def run_trials(
    run: StudyRun,
    trainable: Callable[[dict[str, Any]], Any],
    space: dict[str, Any],
    slots: int,
    runs: Callable[[], Sequence[RunFolder]],
    **config: Any,
) -> Any:
    """The results of Tune's trials of ``trainable`` over ``space``; ``config`` is for its TuneConfig.

    ``runs`` gives their folders: when interrupted, those in progress end at a checkpoint. Tune keeps nothing:
    what a trial leaves is in its run's folder.
    """
    from ray import tune

    alone = run.resources.most == 1
    share = {"CPU": run.resources.cpus_per_worker, "GPU": run.resources.gpus_per_worker} if alone else {}
    storage = run.folder / "tune"
    shutil.rmtree(storage, ignore_errors=True)
    tuner = tune.Tuner(
        tune.with_resources(trainable, {k: v for k, v in share.items() if v} or {"CPU": DRIVER_CPU}),
        param_space=space,
        tune_config=tune.TuneConfig(
            max_concurrent_trials=slots,
            # the next cell finds torch imported
            reuse_actors=True,
            # the default holds every value of the grid, here a whole config
            trial_name_creator=lambda trial: trial.trial_id,
            trial_dirname_creator=lambda trial: trial.trial_id,
            **config,
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(run.folder),
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=MAX_DEATHS),
        ),
    )
    try:
        results = tuner.fit()
    except KeyboardInterrupt:
        from titans_platform.runs.notice import end_at_checkpoints

        end_at_checkpoints(runs())
        raise
    shutil.rmtree(storage, ignore_errors=True)
    return results
