"""Run a study: its search and its missing cells, as trials of Ray Tune.

The study is a parent run in MLflow; its cells and trials are logged below it.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from typing import Any

from titans_platform.errors import ClusterError, Interrupted, NotWritable, StorageError, TitansError
from titans_platform.files import write_text
from titans_platform.objectives import run_name
from titans_platform.provenance import die_with_parent
from titans_platform.runs.execute import execute
from titans_platform.runs.folder import CHECKPOINTS, Busy, RunFolder
from titans_platform.runs.load import located
from titans_platform.runs.preemption import end_at_checkpoints
from titans_platform.runs.ray_session import ray_session
from titans_platform.runs.reporter import end_orphans
from titans_platform.runs.spec import DRIVER_CPU, RunSpec, Tracking
from titans_platform.study.grid import Cell, StudyRun
from titans_platform.study.search import PROPOSED, SearchState, number_trial
from titans_platform.study.spec import Search
from titans_platform.training.checkpoint import last_step

LOG = "ray.log"
TRANSIENT = Busy, Interrupted, StorageError, NotWritable, ClusterError
"""Errors after which a trial may run again; others would recur, such as a learning rate that diverges."""
MAX_FAILURES = 3
"""Number of times that Tune restarts a trial whose process died without writing a new checkpoint."""


@contextmanager
def session(study: StudyRun) -> Iterator[StudyRun]:
    """Ray for the cells, and the study's parent run in MLflow, opened before any worker writes to the store.

    What Ray prints goes to ``ray.log``. MLflow runs of cells that a killed driver left open are ended, before
    and after. On Ctrl-C the cells and trials that this study trains end at a checkpoint. Raises UsageError,
    ClusterError.
    """
    from titans_platform.tracking import open_store

    resources, store = study.scale.resources, open_store(study.root)
    tags = {"titans.scale": study.scale_name, "titans.commit": study.commit}
    seeds = ", ".join(map(str, sorted({cell.seed for cell in study.whole})))
    columns = {"study": study.study.name, "scale": study.scale_name, "seeds": seeds}
    cpus, gpus = math.ceil(resources.cpus * study.concurrency), resources.whole_gpus(study.concurrency)
    with (
        (study.path / LOG).open("w", buffering=1, encoding="utf-8") as log,
        redirect_stdout(log),
        redirect_stderr(log),
    ):
        parent = store.study_run(study.label, tags, columns)
        end_orphans(store, parent, study.root)
        try:
            with ExitStack() as after, ray_session(cpus, gpus):
                after.callback(end_orphans, store, parent, study.root)
                try:
                    yield replace(study, tracking=Tracking(store.uri, study.label, parent))
                except KeyboardInterrupt:
                    # another study may be training cells that both have
                    end_at_checkpoints([run for run in study.folders() if run.study_run_id() == parent])
                    raise
        except BaseException:
            # a study that is done is closed with its table; this one would stay RUNNING
            store.run(parent).close("KILLED")
            raise


def run_search(study: StudyRun) -> StudyRun:
    """Run the trials that the search still needs, in a `session`.

    Returns the study with the best trial as another row, with the seeds of the others, to be prepared. Raises
    TitansError: no trial was trained to the end.
    """
    from ray.tune.schedulers import ASHAScheduler

    state = study.search
    assert state
    mode, factor = "max" if state.higher_is_better else "min", state.search.reduction
    first, last = state.milestones[0], state.milestones[-1]
    asha = ASHAScheduler(
        time_attr="steps", metric="value", mode=mode, grace_period=first, max_t=last, reduction_factor=factor
    )
    sampler = tune_sampler(state.search, mode, [trial.params for trial in state.trials])
    how = {"search_alg": sampler, "scheduler": asha, "num_samples": state.search.trials}
    results = _run_trials(study, _run_trial, {"study": study}, **how)
    if not any(result.error for result in results):
        write_text(state.trial_files / PROPOSED, str(state.search.trials))
    ended = state.read()
    if ended.best is None:
        raise TitansError(f"{study.label}: no trial was trained to the end; {ended.line}")
    return replace(study, search=ended).with_found()


def tune_sampler(search: Search, mode: str, known: Sequence[dict[str, Any]]) -> Any:
    """Optuna's tree-structured Parzen estimator; the known trials are replayed to it first."""
    import optuna
    from optuna.distributions import CategoricalDistribution, FloatDistribution
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    # a resumed sampler must not propose again what it proposed the first time
    seed, startup = search.seed + len(known), min(8, search.trials)
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup)
    space = {
        key: CategoricalDistribution(p.choices) if p.choices else FloatDistribution(*p.ends(), log=p.log)
        for key, p in search.space.items()
    }
    points = [dict(params) for params in known[: search.trials] if params.keys() == space.keys()]
    return OptunaSearch(space, metric="value", mode=mode, sampler=sampler, points_to_evaluate=points)


def run_cells(study: StudyRun) -> None:
    """Run the missing cells in a `session`.

    A cell that fails is recorded and does not stop the others. A cell whose process keeps dying is restarted
    for as long as it writes new checkpoints in between.
    """
    from ray import tune

    for cell in study.todo:
        if cell.folder(study.root).failure():
            cell.folder(study.root).update(failure=None)
        if cell in study.stale:
            with suppress(Busy), cell.folder(study.root).hold(0):  # another study may train it already
                cell.folder(study.root).set_aside()
    left = [spec_of(study, cell, f"{cell.row} · seed {cell.seed}") for cell in study.todo]
    while left:
        kept = {spec.name: last_step(spec.folder.path / CHECKPOINTS) for spec in left}
        results = _run_trials(study, _run_cell, {"spec": tune.grid_search(left)})
        died = [result.config["spec"] for result in results if result.error is not None]
        left = [spec for spec in died if last_step(spec.folder.path / CHECKPOINTS) > kept[spec.name]]
        for spec in died:
            if spec not in left:
                # a process that dies cannot record it itself
                cause = f"its worker died {MAX_FAILURES + 1} times without a new checkpoint"
                spec.folder.record_failure(TitansError(f"{cause}; see {study.path / LOG}"), study.commit)


def _run_cell(space: dict[str, Any]) -> dict[str, Any]:
    """Run one cell on a worker. A failure is recorded in its folder, not raised: Tune would retry it."""
    die_with_parent()
    with suppress(Exception):
        execute(space["spec"])
    return {"ended": True}


def _run_trial(space: dict[str, Any]) -> None:
    """Train the parameters in ``space`` on a worker, from rung to rung; report the metric to ASHA."""
    from ray import tune

    die_with_parent()
    study = space["study"]
    search, data = study.search.search, study.search.data
    params = {key: space[key] for key in search.space}
    config = located(study.trial_config(params), study.root)
    name = run_name(config, data, study.scale.resources.hashed_workers)
    title = f"trial {number_trial(study.search.trial_files, name, params)}"
    spec = spec_of(study, Cell(title, config.seed, config, name, data), title)
    try:
        for step in search.milestones(spec.config.optim.steps):
            if _beyond(spec, step, search.metric):
                continue
            value = _measure(spec, step, study.search)
            if value is None:
                return
            if not math.isfinite(value):
                _stop(spec.folder, study.search, f"{search.metric} is {value} at step {step}")
                return
            tune.report({"steps": step, "value": value})
    except SystemExit:
        # how Tune stops a trial, inside report
        if not spec.folder.result():
            _stop(spec.folder, study.search, "ASHA")
        raise


def _beyond(spec: RunSpec, step: int, metric: str) -> bool:
    """Return True if the run, which another search trained past this rung, has no metric at it."""
    if step == spec.config.optim.steps or step in spec.folder.rungs(metric):
        return False
    return bool(spec.folder.result()) or last_step(spec.folder.path / CHECKPOINTS) > step


def _stop(folder: RunFolder, search: SearchState, reason: str) -> None:
    """Record why a search has stopped the run; other searches may have stopped it too."""
    folder.update(stopped=folder.record().get("stopped", {}) | {search.key: reason})


def _measure(spec: RunSpec, step: int, search: SearchState) -> float | None:
    """Return the metric at a rung, from the folder or by training up to it; None if the trial has ended."""
    folder, metric = spec.folder, search.search.metric
    rung = None if step == spec.config.optim.steps else (step, metric)
    if not rung and (result := folder.result()):
        return result.columns[metric]
    if (known := folder.rungs(metric).get(step)) is not None:
        return known
    if folder.was_stopped(search.key):
        return None
    try:
        return execute(replace(spec, rung=rung)).columns[metric]
    except Exception as error:
        if isinstance(error, TitansError) and not isinstance(error, TRANSIENT):
            _stop(folder, search, str(error))
        return None


def _run_trials(
    study: StudyRun, trainable: Callable[[dict[str, Any]], Any], space: dict[str, Any], **config: Any
) -> Any:
    """Run ``trainable`` over ``space`` with Tune and return its results; ``config`` goes to its TuneConfig.

    Tune's own files are deleted: the state of a trial is in its run's folder.
    """
    from ray import tune

    # Ray Tune's own files
    resources, storage = study.scale.resources, study.path / "tune"
    needed = {"CPU": DRIVER_CPU}
    if not resources.several:
        share = {"CPU": resources.cpus_per_worker, "GPU": resources.gpus_per_worker}
        needed = {kind: amount for kind, amount in share.items() if amount}
    shutil.rmtree(storage, ignore_errors=True)
    tuner = tune.Tuner(
        tune.with_resources(trainable, needed),
        param_space=space,
        tune_config=tune.TuneConfig(
            max_concurrent_trials=study.concurrency,
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
    results = tuner.fit()
    shutil.rmtree(storage, ignore_errors=True)
    return results


def spec_of(study: StudyRun, cell: Cell, title: str) -> RunSpec:
    """Return the spec of a named cell's run, logged as ``title``."""
    assert cell.name is not None
    assert study.tracking
    tags = {"titans.row": cell.row, "titans.seed": str(cell.seed), "titans.scale": study.scale_name}
    tracking = replace(study.tracking, title=title, params=study.varied, tags=tags)
    labels = {"study": study.study.name, "row": cell.row}
    run = cell.config, study.root, cell.name, study.commit, cell.data
    return RunSpec(*run, study.scale.resources, tracking, labels)
