"""Running a study's cells: what is missing becomes trials of Ray Tune, what is done is left alone."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from titans_platform.config import digest
from titans_platform.errors import TitansError, UsageError
from titans_platform.files import held, write_json
from titans_platform.runs.execute import execute
from titans_platform.runs.folder import Busy, RunFolder
from titans_platform.runs.ray_session import die_with_parent, ray_session
from titans_platform.runs.reporter import finish
from titans_platform.runs.resources import DRIVER_CPU, Resources
from titans_platform.runs.spec import RunSpec, Tracking
from titans_platform.study.columns import params
from titans_platform.study.ledger import Marks
from titans_platform.study.plan import Plan
from titans_platform.study.progress import View, showing
from titans_platform.study.spec import Cell, Row, Study

if TYPE_CHECKING:
    from titans_platform.tracking import Store

MANIFEST, STUDY = "cells.json", "study.json"
SEARCH = "search.json"
"""The record of a study's search: its trials, a line on how it went, and what it found."""
MAX_DEATHS = 3
"""Times a trial whose process died is started again."""


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
        # how often a run is saved changes no number
        changes = sorted(change for change in self.overrides if not change.startswith("checkpoint."))
        changed = f"-set-{digest(changes, 6)}" if changes else ""
        return f"{self.study.name}-{self.scale_name}{changed}"

    @property
    def folder(self) -> Path:
        """Where its manifest, logs and views go."""
        return self.root / "studies" / self.label

    @property
    def resources(self) -> Resources:
        """What each of its cells is trained on."""
        return self.study.scales[self.scale_name].resources

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of its table."""
        return self.study.rows_at(self.scale_name)


@dataclass(frozen=True)
class Tracker:
    """The study's parent run in MLflow: what a worker needs to log its cell below it."""

    run: StudyRun
    uri: str
    parent: str
    """Its run id."""

    def tracking(self, cell: Cell, title: str, rows: Iterable[Row]) -> Tracking:
        """Where a cell is logged, with the fields that ``rows`` change as columns."""
        tags = {"titans.row": cell.row, "titans.seed": str(cell.seed), "titans.scale": self.run.scale_name}
        return Tracking(self.uri, title, self.parent, params(cell, rows), tags)

    def end(self, status: str) -> None:
        """End the parent run."""
        self._store().end(self.parent, status)

    def settle(self) -> None:
        """End the runs of cells whose process had no chance to: those of a driver that was killed, too."""
        store = self._store()
        for name, run_id in store.running(self.parent).items():
            folder = RunFolder(self.run.root, name)
            state = folder.state()
            if state == "done":
                finish(store.run(run_id), folder.result() or {})
            elif state != "running":
                ends = {"failed": "FAILED"} | ({"interrupted": "FINISHED"} if folder.was_stopped() else {})
                store.end(run_id, ends.get(state, "KILLED"))

    def _store(self) -> Store:
        from titans_platform.tracking import open_store

        return open_store(self.uri)


def open_tracker(run: StudyRun) -> Tracker:
    """The study's parent run; what a dead driver left open under it is ended.

    The driver calls this before a worker writes to the store, which is created and migrated here. Raises
    UsageError.
    """
    from titans_platform.tracking import open_store

    store = open_store(run.root)
    tags = {"titans.scale": run.scale_name, "titans.commit": run.commit}
    tracker = Tracker(run, store.uri, store.study_run(run.label, tags))
    tracker.settle()
    return tracker


@contextmanager
def only_driver(run: StudyRun) -> Iterator[None]:
    """Keep a second driver off the same study; the lock dies with the process."""
    # longer than another shell's sweep status looks at it
    with held(run.folder / "lock", timeout=2) as got:
        if not got:
            raise UsageError(f"{run.label}: another sweep run works on it under {run.root}; see sweep status")
        yield


def write_manifest(run: StudyRun, cells: tuple[Cell, ...]) -> None:
    """Write which cells the study has, and what it is, for `sweep status` and for reports."""
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


def run_cells(run: StudyRun, plan: Plan, console: Console, marks: Marks) -> None:
    """Run the plan's missing cells. A cell that fails is written down and stops no other one."""
    for cell in plan.todo:
        cell.folder(run.root).forget_failure()
    view = View(f"{run.study.name} at {run.scale_name}", plan.cells, plan.todo, run.root, run.study.columns)
    with showing(view, console), output_to(run.folder / "ray.log"):
        view.note = "opening the MLflow store"
        marks.mark("MLflow runs")
        tracker = open_tracker(run)
        specs = [cell_spec(tracker, cell) for cell in plan.todo]
        for cell in plan.stale:
            if cell in plan.todo:
                cell.folder(run.root).set_aside()
        view.note = "starting Ray"
        marks.mark("start of Ray")
        try:
            with ray_for(plan):
                view.note = "starting workers"
                marks.mark("cells")
                _tune(run, plan, specs)
                marks.mark("end of Ray")
                view.note = "ending Ray"
        except BaseException:
            # a study that ends by itself is closed with its table; this one would be shown as running
            tracker.end("KILLED")
            raise
        finally:
            marks.mark("report")
            tracker.settle()


def cell_spec(tracker: Tracker, cell: Cell) -> RunSpec:
    """The run of a cell, under the study's parent run."""
    run = tracker.run
    assert cell.name is not None
    return RunSpec(
        cell.config,
        run.root,
        cell.name,
        run.commit,
        run.resources,
        tracker.tracking(cell, f"{cell.row} · seed {cell.seed}", run.rows),
        {"study": run.study.name, "row": cell.row},
    )


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Send what Ray prints to a file; the console that draws was opened before and stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", buffering=1) as log, redirect_stdout(log), redirect_stderr(log):
        yield


@contextmanager
def ray_for(plan: Plan) -> Iterator[None]:
    """A Ray session as large as the plan needs; inside a job the cluster's."""
    resources = plan.resources
    cpus = resources.workers * resources.cpus_per_worker * plan.concurrency + (resources.workers > 1)
    with ray_session(cpus, resources.gpus * plan.concurrency):
        yield


def _tune(run: StudyRun, plan: Plan, specs: Sequence[RunSpec]) -> None:
    """Every run as a trial, first come first served."""
    from ray import tune

    space = {"spec": tune.grid_search(list(specs))}
    for result in run_trials(run, _trial, space, plan.concurrency):
        # a trial whose process kept dying could not record it
        if result.error is not None:
            died = TitansError(f"its process died {MAX_DEATHS + 1} times")
            result.config["spec"].folder.record_failure(died, run.commit)


def _trial(space: dict[str, Any]) -> dict[str, Any]:
    """Run one cell on a worker. A failure is in its folder and is not raised: Tune would try again."""
    die_with_parent()
    try:
        execute(space["spec"])
    except Exception as error:
        return {"state": "busy" if isinstance(error, Busy) else "failed"}
    return {"state": "done"}


def run_trials(
    run: StudyRun,
    trainable: Callable[[dict[str, Any]], Any],
    space: dict[str, Any],
    slots: int,
    **config: Any,
) -> Any:
    """The results of Tune's trials of ``trainable`` over ``space``; ``config`` is for its TuneConfig.

    Tune keeps nothing: what a trial leaves is in its run's folder.
    """
    from ray import tune

    alone = run.resources.workers == 1
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
    results = tuner.fit()
    shutil.rmtree(storage, ignore_errors=True)
    return results
