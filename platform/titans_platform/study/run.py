"""Running a study: what is missing becomes trials of Ray Tune, what is done is left alone."""

from __future__ import annotations

import logging
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from titans_platform.config import DataConfig, RunConfig, digest
from titans_platform.errors import TitansError, UsageError
from titans_platform.files import held, write_json
from titans_platform.runs.folder import RunFolder
from titans_platform.study.columns import params
from titans_platform.study.ledger import Marks
from titans_platform.study.plan import DRIVER_CPU, Plan
from titans_platform.study.progress import View, showing
from titans_platform.study.spec import Cell, Resources, Study
from titans_platform.study.trial import run_trial

if TYPE_CHECKING:
    from titans_platform.data import PreparedData
    from titans_platform.tracking import Store

MANIFEST, STUDY = "cells.json", "study.json"
SEARCH = "search.json"
"""The record of a study's search: its trials, a line on how it went, and what it found."""
MAX_DEATHS = 3
"""Times a trial whose process died is started again."""

# read by Ray when it is imported: no result files beside ours, no change of directory, Ctrl-C to us
QUIET = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # as nice as whoever started the study, not 15 below everything else on the machine
    "RAY_worker_niceness": "0",
}


@dataclass(frozen=True)
class StudyRun:
    """One study at one scale under one storage root."""

    study: Study
    scale_name: str
    root: Path
    commit: str
    overrides: tuple[str, ...] = ()
    """What --set changed for every row: the table of another study than the file's own."""

    @property
    def label(self) -> str:
        """The name of its folder and of its parent run."""
        changed = f"-set-{digest(sorted(self.overrides), 6)}" if self.overrides else ""
        return f"{self.study.name}-{self.scale_name}{changed}"

    @property
    def folder(self) -> Path:
        """Where the views go."""
        return self.root / "studies" / self.label


def naming(prepare: Callable[[DataConfig], PreparedData]) -> Callable[[RunConfig], str]:
    """Names of cells, each data config prepared (or opened) once."""
    from titans_platform.runs.execute import cell_name

    known: dict[str, PreparedData] = {}

    def name(config: RunConfig) -> str:
        key = digest(config.data.model_dump(mode="json"))
        if key not in known:
            known[key] = prepare(config.data)
        return cell_name(config, known[key])

    return name


@contextmanager
def only_driver(run: StudyRun) -> Iterator[None]:
    """Keep a second driver off the same study; the lock dies with the process."""
    # longer than another shell's sweep status looks at it
    with held(run.folder / "lock", timeout=2) as got:
        if not got:
            raise UsageError(f"{run.label}: another sweep run works on it under {run.root}; see sweep status")
        yield


def write_manifest(run: StudyRun, cells: tuple[Cell, ...]) -> None:
    """Say which cells the study has, and what it is, for whoever looks at it from outside."""
    listed = [
        {"cell": c.name, "row": c.row, "seed": c.seed, "config": c.config.model_dump(mode="json")}
        for c in cells
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


def execute(run: StudyRun, plan: Plan, console: Console, marks: Marks) -> None:
    """Run the plan's missing cells. A cell that fails is written down and stops no other one."""
    for cell in plan.todo:
        cell.folder(run.root).forget_failure()
    view = View(f"{run.study.name} at {run.scale_name}", plan.cells, plan.todo, run.root)
    with showing(view, console), aside(run.folder / "ray.log"):
        view.note = "opening the MLflow store"
        marks.mark("MLflow runs")
        store, parent, tasks = _tasks(run, plan)
        for cell in plan.stale:
            if cell in plan.todo:
                cell.folder(run.root).set_aside()
        view.note = "starting Ray"
        marks.mark("start of Ray")
        try:
            with ray_of(plan):
                view.note = "starting workers"
                marks.mark("cells")
                _tune(run, plan, tasks)
                marks.mark("end of Ray")
                view.note = "ending Ray"
        except BaseException:
            # a study that ends by itself is closed with its table; this one would be shown as running
            store.run(parent).close("KILLED")
            raise
        finally:
            marks.mark("report")
            _settle(store, tasks)


def _tasks(run: StudyRun, plan: Plan) -> tuple[Store, str, list[dict[str, Any]]]:
    """The store, the parent run, and what each trial is told.

    Their MLflow runs are created here, where there is one writer.
    """
    from titans_platform.tracking import open_store

    store = open_store(run.root)
    parent = store.study_run(run.label, {"titans.scale": run.scale_name, "titans.commit": run.commit})
    tasks = [
        {
            "root": str(run.root),
            "study": run.study.name,
            "row": cell.row,
            "cell": cell.name,
            "config": cell.config.model_dump_json(),
            "commit": run.commit,
            "resources": plan.resources.model_dump(),
            "tracked": (store.uri, _cell_run(store, run, cell, parent)),
        }
        for cell in plan.todo
    ]
    return store, parent, tasks


def _settle(store: Store, tasks: list[dict[str, Any]]) -> None:
    """End the MLflow runs of cells whose process had no chance to."""
    for task in tasks:
        folder = RunFolder(Path(task["root"]), task["cell"])
        # those too that were listed and never begun
        if (state := folder.state()) != "done":
            store.run(task["tracked"][1]).close("FAILED" if state == "failed" else "KILLED")


def _cell_run(store: Store, run: StudyRun, cell: Cell, parent: str) -> str:
    assert cell.name is not None
    config = cell.config.model_dump(mode="json")
    tags = {"titans.row": cell.row, "titans.seed": str(cell.seed), "titans.scale": run.scale_name}

    def create() -> str:
        name = f"{cell.row} · seed {cell.seed}"
        columns = params(cell, run.study.rows_at(run.scale_name))
        return store.cell_run(str(cell.name), name, parent=parent, params=columns, config=config, tags=tags)

    run_id = create()
    if cell.folder(run.root).commit() not in (None, run.commit):
        # what other code made is made again from nothing, so its log starts again too
        store.discard_run(run_id)
        run_id = create()
    return run_id


@contextmanager
def aside(path: Path) -> Iterator[None]:
    """Send what Ray prints to a file; the console that draws was opened before and stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", buffering=1) as log, redirect_stdout(log), redirect_stderr(log):
        yield


@contextmanager
def ray_of(plan: Plan) -> Iterator[None]:
    """A Ray instance of our own, as large as the plan needs, gone when the study ends."""
    os.environ.update({key: value for key, value in QUIET.items() if key not in os.environ})
    from titans_platform.runs.session import session

    resources = plan.resources
    # a trial that only drives other workers takes a sliver of a CPU beside theirs
    cpus = resources.workers * resources.cpus_per_worker * plan.concurrency + (resources.workers > 1)
    gpus = resources.workers * resources.gpus_per_worker * plan.concurrency
    with session(cpus, gpus):
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
        yield


def _tune(run: StudyRun, plan: Plan, tasks: list[dict[str, Any]]) -> None:
    """Every task as a trial, first come first served."""
    from ray import tune

    space = {"task": tune.grid_search(tasks)}
    _record_deaths(run, run_trials(run, _trial, space, plan.resources, plan.concurrency))


def run_trials(
    run: StudyRun,
    trainable: Callable[[dict[str, Any]], Any],
    space: dict[str, Any],
    resources: Resources,
    slots: int,
    **config: Any,
) -> Any:
    """What Tune's trials of ``trainable`` over ``space`` gave; ``config`` is for its TuneConfig.

    Tune keeps nothing: what a trial leaves lies in its cell's folder.
    """
    from ray import tune

    alone = resources.workers == 1
    # a trial that only drives other workers takes a sliver beside theirs
    share = {"CPU": resources.cpus_per_worker, "GPU": resources.gpus_per_worker} if alone else {}
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
    results = tuner.fit()
    shutil.rmtree(storage, ignore_errors=True)
    return results


def _trial(space: dict[str, Any]) -> dict[str, Any]:
    return run_trial(space["task"])


def _record_deaths(run: StudyRun, results: Any) -> None:
    """A trial whose process kept dying had no chance to say so itself."""
    for result in results:
        if result.error is not None:
            folder = RunFolder(run.root, result.config["task"]["cell"])
            folder.record_failure(TitansError(f"its process died {MAX_DEATHS + 1} times"), run.commit)
