"""Cells and trials of a search as trials of Ray Tune."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from titans_platform.errors import Interrupted, TitansError
from titans_platform.objectives import build_objective
from titans_platform.runs.execute import execute, last_checkpoint_step
from titans_platform.runs.folder import Busy, RunFolder
from titans_platform.runs.load import located
from titans_platform.runs.preemption import end_at_checkpoints
from titans_platform.runs.ray_session import die_with_parent
from titans_platform.runs.result import Result
from titans_platform.runs.spec import DRIVER_CPU, Rung, RunSpec
from titans_platform.study.grid import Cell, StudyRun
from titans_platform.study.plan import Plan
from titans_platform.study.search import SearchState, number_trial, tune_sampler
from titans_platform.study.tracker import Tracker

MAX_FAILURES = 3
"""How often Tune restarts a trial whose process died without writing a new checkpoint."""


def run_cells(plan: Plan, specs: Sequence[RunSpec]) -> None:
    """Run each spec as a trial, first come first served. A cell that fails does not stop the others.

    A cell whose process keeps dying is restarted for as long as it writes new checkpoints in between.
    """
    from ray import tune

    left = list(specs)
    while left:
        space = {"spec": tune.grid_search(left)}
        folders, kept = (
            [spec.folder for spec in left],
            {spec.name: last_checkpoint_step(spec) for spec in left},
        )
        results = _run_trials(plan, _run_cell, space, lambda folders=folders: folders)
        died = [result.config["spec"] for result in results if result.error is not None]
        left = [spec for spec in died if last_checkpoint_step(spec) > kept[spec.name]]
        for spec in died:
            if spec not in left:
                # a process that dies cannot record it itself
                error = TitansError(
                    f"its worker died {MAX_FAILURES + 1} times without a new checkpoint; "
                    f"see {plan.study.folder.path / 'ray.log'}"
                )
                spec.folder.record_failure(error, plan.study.commit)


def _run_cell(space: dict[str, Any]) -> dict[str, Any]:
    """Run one cell on a worker. A failure is recorded in its folder, not raised: Tune would retry it."""
    die_with_parent()
    try:
        execute(space["spec"])
    except Interrupted:
        return {"state": "interrupted"}
    except Exception as error:
        return {"state": "busy" if isinstance(error, Busy) else "failed"}
    return {"state": "done"}


@dataclass(frozen=True)
class TrialContext:
    """State shared by all trials of a search."""

    tracker: Tracker
    data_fingerprint: str


def run_search(plan: Plan, tracker: Tracker) -> None:
    """Run the trials that the search still needs; the data must be prepared and a Ray session open."""
    from ray.tune.schedulers import ASHAScheduler

    study, state = plan.study, plan.study.search
    assert state
    mode = "max" if state.higher_is_better else "min"
    asha = ASHAScheduler(
        time_attr="steps",
        metric="value",
        mode=mode,
        grace_period=state.milestones[0],
        max_t=state.milestones[-1],
        reduction_factor=state.search.reduction,
    )
    fingerprint = build_objective(study.cells[0].config).open(study.root).fingerprint
    _run_trials(
        plan,
        _run_trial,
        {"context": TrialContext(tracker, fingerprint)},
        lambda: [RunFolder(study.root, path.stem) for path in study.folder.trials.glob("*.json")],
        search_alg=tune_sampler(state.search, mode, [trial.params for trial in state.trials]),
        scheduler=asha,
        num_samples=state.search.trials,
    )


def _run_trial(space: dict[str, Any]) -> None:
    """Train the parameters in ``space`` on a worker, from rung to rung; report the metric to ASHA."""
    from ray import tune

    die_with_parent()
    params = dict(space)
    context: TrialContext = params.pop("context")
    study = context.tracker.study
    state = study.search
    assert state
    spec = _trial_spec(context, study, state, params)
    try:
        for step in state.search.milestones(spec.config.optim.steps):
            value = _measure(spec, Rung(step, state.search.metric))
            if value is None:
                return
            tune.report({"steps": step, "value": value})
    except SystemExit:
        # how Tune stops a trial, inside report
        if not spec.folder.result():
            spec.folder.stop("ASHA")
        raise


def _trial_spec(
    context: TrialContext, study: StudyRun, state: SearchState, params: dict[str, Any]
) -> RunSpec:
    config = located(study.trial_config(params), study.root)
    name = build_objective(config).run_name(context.data_fingerprint, study.resources.hashed_workers)
    title = f"trial {number_trial(study.folder, name, params)}"
    # the fields that the search varies are columns in MLflow
    varied = study.trial_row(next(iter(state.search.corners())))
    return context.tracker.spec(Cell(title, config.seed, config, name), title, [varied])


def _measure(spec: RunSpec, rung: Rung) -> float | None:
    """The metric at a rung, from the folder or by training up to it; None if the trial has ended."""
    folder, last = spec.folder, rung.step == spec.config.optim.steps
    if last and (result := folder.result()):
        return result.columns[rung.column]
    if (known := folder.rungs().get(rung.step)) is not None:
        return known
    if folder.was_stopped():
        return None
    try:
        found = execute(spec) if last else execute(spec, rung)
    except TitansError as error:
        if not isinstance(error, Busy | Interrupted):
            # a learning rate that diverges would diverge again
            folder.stop(str(error))
        return None
    except Exception:
        return None
    return (found.columns if isinstance(found, Result) else found)[rung.column]


def _run_trials(
    plan: Plan,
    trainable: Callable[[dict[str, Any]], Any],
    space: dict[str, Any],
    folders: Callable[[], Sequence[RunFolder]],
    **config: Any,
) -> Any:
    """Run ``trainable`` over ``space`` with Tune and return its results; ``config`` goes to its TuneConfig.

    On Ctrl-C the runs in ``folders()`` end at a checkpoint. Tune's own files are deleted: the state of a
    trial is in its run's folder.
    """
    from ray import tune

    resources, storage = plan.study.resources, plan.study.folder.tune
    needed = {"CPU": DRIVER_CPU}
    if not resources.several:
        share = {"CPU": resources.cpus_per_worker, "GPU": resources.gpus_per_worker}
        needed = {kind: amount for kind, amount in share.items() if amount}
    shutil.rmtree(storage, ignore_errors=True)
    tuner = tune.Tuner(
        tune.with_resources(trainable, needed),
        param_space=space,
        tune_config=tune.TuneConfig(
            max_concurrent_trials=plan.concurrency,
            # so that the next cell reuses a process with torch imported
            reuse_actors=True,
            # by default the name holds every value of the grid, here a whole config
            trial_name_creator=lambda trial: trial.trial_id,
            trial_dirname_creator=lambda trial: trial.trial_id,
            **config,
        ),
        run_config=tune.RunConfig(
            name=storage.name,
            storage_path=str(storage.parent),
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=MAX_FAILURES),
        ),
    )
    try:
        results = tuner.fit()
    except KeyboardInterrupt:
        end_at_checkpoints(folders())
        raise
    shutil.rmtree(storage, ignore_errors=True)
    return results
