"""A search: Optuna proposes, ASHA stops, and every trial is a cell that is never run twice.

A trial's folder keeps what its rungs measured, and a mark where it was stopped, so that a search that is
begun again replays what it knows in moments: the sampler and ASHA see the same numbers, and only what is
missing is trained, from its checkpoints.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titans_platform.config import RunConfig
from titans_platform.errors import TitansError, UsageError
from titans_platform.files import read_json, write_json
from titans_platform.runs.folder import RUNGS, STOPPED, RunFolder
from titans_platform.study.columns import params as columns
from titans_platform.study.run import StudyRun, run_trials
from titans_platform.study.space import Parameter, Search
from titans_platform.study.spec import Cell, Resources, Row, overlay, resolve
from titans_platform.study.trial import fit_cell

if TYPE_CHECKING:
    from titans_platform.tracking import Store

FOUND = "found"
TRIALS = "trials"


@dataclass(frozen=True)
class Trial:
    """A proposed configuration and how far it came."""

    cell: str
    number: int
    params: dict[str, Any]
    state: str
    """As of a cell, and `stopped` where ASHA ended it at a rung."""
    steps: int
    value: float | None
    """The metric at the last rung it reached, the end for one that is done."""


@dataclass(frozen=True)
class Searched:
    """How a search stands: its trials in the order they were proposed."""

    search: Search
    higher_is_better: bool
    tokens_per_step: int
    steps: int
    trials: tuple[Trial, ...]

    @property
    def over(self) -> bool:
        """Whether as many trials as the search has are behind it."""
        ended = [trial for trial in self.trials if trial.state in ("done", "stopped")]
        return len(ended) >= self.search.trials

    @property
    def best(self) -> Trial | None:
        """The best of those that were trained to the end."""
        done = [trial for trial in self.trials if trial.state == "done" and trial.value is not None]
        sign = -1 if self.higher_is_better else 1
        return min(done, key=lambda trial: sign * float(trial.value or 0), default=None)

    @property
    def tokens(self) -> int:
        """Tokens that the trials were trained on."""
        return self.tokens_per_step * sum(trial.steps for trial in self.trials)

    @property
    def tokens_of_grid(self) -> int:
        """Tokens of as many trials, each trained to the end."""
        return self.tokens_per_step * self.steps * max(len(self.trials), self.search.trials)


def trial_row(run: StudyRun, params: dict[str, Any], name: str = FOUND) -> Row:
    """The study's first row with a trial's parameters laid over it."""
    first = run.study.rows_at(run.scale_name)[0]
    return Row(name=name, set=overlay(first.set, params))


def trial_config(run: StudyRun, search: Search, params: dict[str, Any]) -> RunConfig:
    """The config of a trial. Raises UsageError."""
    config = resolve(run.study, run.scale_name, trial_row(run, params), run.overrides)
    return config.model_copy(update={"seed": search.seed})


def check_space(run: StudyRun, search: Search) -> list[RunConfig]:
    """Configs at the corners of the space, every one valid. Raises UsageError that names the corner."""
    corners = []
    for params in search.corners():
        try:
            corners.append(trial_config(run, search, params))
        except UsageError as error:
            at = ", ".join(f"{key}={value}" for key, value in params.items())
            raise UsageError(f"search.space at {at}: {error}") from None
    return corners


def read_search(run: StudyRun) -> Searched | None:
    """How the study's search stands, from its files; None where it has none."""
    search = run.study.search_at(run.scale_name)
    if search is None:
        return None
    config = resolve(run.study, run.scale_name, run.study.rows_at(run.scale_name)[0], run.overrides)
    listed = [found for path in (run.folder / TRIALS).glob("*.json") if (found := read_json(path))]
    listed.sort(key=lambda entry: entry["began"])
    trials = tuple(_read_trial(run.root, entry, search.metric) for entry in listed)
    return Searched(
        search,
        run.study.columns[search.metric].higher_is_better,
        config.optim.global_batch_size * config.data.sequence_length,
        config.optim.steps,
        trials,
    )


def _read_trial(root: Path, entry: dict[str, Any], metric: str) -> Trial:
    folder = RunFolder(root, entry["cell"])
    rungs = {int(step): value for step, value in (read_json(folder.path / RUNGS) or {}).items()}
    result, stopped = folder.result(), read_json(folder.path / STOPPED)
    if result:
        rungs[result["config"]["optim"]["steps"]] = result["columns"][metric]
    last = max(rungs, default=0)
    steps = last or int((folder.progress() or {}).get("step", 0))
    state = "done" if result else "stopped" if stopped else folder.state()
    return Trial(entry["cell"], entry["number"], entry["params"], state, steps, rungs.get(last))


def execute_search(run: StudyRun, search: Search, data: str, resources: Resources, slots: int) -> None:
    """Run what the search has not tried yet; Ray must be there. ``data`` is the data's fingerprint."""
    from ray.tune.schedulers import ASHAScheduler

    known = read_search(run)
    assert known is not None
    steps = search.milestones(known.steps)
    mode = "max" if known.higher_is_better else "min"
    asha = ASHAScheduler(
        time_attr="steps",
        metric="value",
        mode=mode,
        grace_period=steps[0],
        max_t=steps[-1],
        reduction_factor=search.reduction,
    )
    task = _task(run, search, data, resources, steps)
    try:
        run_trials(
            run,
            _trial,
            {"task": task},
            resources,
            slots,
            search_alg=_sampler(search, mode, [trial.params for trial in known.trials]),
            scheduler=asha,
            num_samples=search.trials,
        )
    except BaseException:
        _end_runs(run, task, "KILLED")
        raise
    _end_runs(run, task, None)


def _end_runs(run: StudyRun, task: dict[str, Any], parent: str | None) -> None:
    """End the MLflow runs of trials that did not end them, and with ``parent`` the study's own so."""
    from titans_platform.tracking import CELL_TAG, open_store

    store = open_store(task["store"])
    ends = {"stopped": "FINISHED", "failed": "FAILED"}
    found = read_search(run)
    for trial in found.trials if found else ():
        if trial.state != "done" and (run_id := store.find(CELL_TAG, trial.cell)):
            store.run(run_id).close(ends.get(trial.state, "KILLED"))
    if parent:
        store.run(task["parent"]).close(parent)


@contextmanager
def followed(run: StudyRun, tell: Callable[[str], None], every: float = 2.0) -> Iterator[None]:
    """Say how the search stands whenever that has changed, by its files."""
    stop = threading.Event()

    def watch() -> None:
        said = ""
        while not stop.wait(every):
            found = read_search(run)
            if found and (line := search_line(found)) != said:
                tell(line)
                said = line

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()


def search_line(found: Searched) -> str:
    """How a search stands, in a sentence."""
    counts = {
        state: sum(t.state == state for t in found.trials)
        for state in ("done", "stopped", "running", "failed")
    }
    counted = ", ".join(f"{n} {state}" for state, n in counts.items() if n)
    best = found.best
    said = f"; best {found.search.metric} {best.value:.4g} (trial {best.number})" if best else ""
    share = found.tokens / found.tokens_of_grid
    return (
        f"Search: {len(found.trials)} of {found.search.trials} trials ({counted or 'none ended'}){said}; "
        f"{found.tokens:,} tokens, {share:.0%} of all trials to their end"
    )


def search_record(found: Searched) -> dict[str, Any]:
    """How a search stands, as a JSON value; ``set`` is the best configuration for a command line."""
    best = found.best
    return {
        "line": search_line(found),
        "over": found.over,
        "trials": [asdict(trial) for trial in found.trials],
        "tokens": found.tokens,
        "tokens_of_grid": found.tokens_of_grid,
        "best": asdict(best) if best else None,
        "set": set_line(best.params) if best else None,
    }


def set_line(params: dict[str, Any]) -> str:
    """Parameters as options of the command line."""
    return " ".join(f"--set {key}={_shown(value)}" for key, value in params.items())


def _shown(value: Any) -> str:
    # all digits: the config must be the trial's own
    return repr(value) if isinstance(value, float) else json.dumps(value).strip('"')


def _sampler(search: Search, mode: str, known: Sequence[dict[str, Any]]) -> Any:
    """Optuna's tree-structured Parzen estimator, which is first asked for what is known already."""
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    # a sampler that begins anew must not draw again what it drew the first time
    sampler = optuna.samplers.TPESampler(
        seed=search.seed + len(known), n_startup_trials=min(8, search.trials)
    )
    space = {key: _distribution(parameter) for key, parameter in search.space.items()}
    points = [dict(params) for params in known[: search.trials] if params.keys() == space.keys()]
    return OptunaSearch(space, metric="value", mode=mode, sampler=sampler, points_to_evaluate=points)


def _distribution(parameter: Parameter) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    if parameter.choices:
        return CategoricalDistribution(parameter.choices)
    assert parameter.low is not None
    assert parameter.high is not None
    return FloatDistribution(parameter.low, parameter.high, log=parameter.log)


def _task(
    run: StudyRun, search: Search, data: str, resources: Resources, milestones: list[int]
) -> dict[str, Any]:
    """What every trial is told beside its parameters."""
    from titans_platform.tracking import open_store

    store = open_store(run.root)
    return {
        "run": run,
        "search": search,
        "data": data,
        "resources": resources.model_dump(),
        "milestones": milestones,
        "store": store.uri,
        "parent": store.study_run(run.label, {"titans.scale": run.scale_name, "titans.commit": run.commit}),
    }


def _trial(space: dict[str, Any]) -> None:
    """One trial on a worker: from rung to rung, until the end or until ASHA stops it."""
    from ray import tune

    task = space["task"]
    run, search = task["run"], task["search"]
    params = {key: value for key, value in space.items() if key != "task"}
    config = trial_config(run, search, params)
    folder = RunFolder(run.root, _cell_name(config, task["data"]))
    number = _enrol(run, folder.name, params)
    try:
        with folder.hold():
            for step in task["milestones"]:
                value = _climb(task, config, folder, number, step)
                if value is None:
                    return
                tune.report({"steps": step, "value": value})
    except SystemExit:
        # how Tune ends a trial, inside of report
        if not folder.result():
            write_json(folder.path / STOPPED, {"reason": "ASHA", "commit": run.commit})
        raise


def _cell_name(config: RunConfig, data: str) -> str:
    from titans_platform.objectives import build_objective

    return build_objective(config).run_name(data)


def _enrol(run: StudyRun, cell: str, params: dict[str, Any]) -> int:
    """Put the trial on the study's list; its number there."""
    path = run.folder / TRIALS / f"{cell}.json"
    if (known := read_json(path)) is not None:
        return int(known["number"])
    number = len(list(path.parent.glob("*.json")))
    write_json(path, {"cell": cell, "number": number, "began": time.time(), "params": params})
    return number


def _climb(
    task: dict[str, Any], config: RunConfig, folder: RunFolder, number: int, step: int
) -> float | None:
    """The metric at a rung, from the files or by training up to it; None where the trial ended before."""
    metric = task["search"].metric
    if (result := folder.result()) and step == config.optim.steps:
        return float(result["columns"][metric])
    if (known := (read_json(folder.path / RUNGS) or {}).get(str(step))) is not None:
        return float(known)
    if read_json(folder.path / STOPPED):
        return None
    try:
        return float(_fit(task, config, folder, number, step)[metric])
    except TitansError as error:
        # a learning rate that diverges would diverge again
        folder.record_failure(error, task["run"].commit)
        write_json(folder.path / STOPPED, {"reason": str(error), "commit": task["run"].commit})
        return None
    except Exception as error:
        folder.record_failure(error, task["run"].commit)
        return None


def _fit(
    task: dict[str, Any], config: RunConfig, folder: RunFolder, number: int, step: int
) -> dict[str, Any]:
    """Train on to ``step``; the columns measured there."""
    from titans_platform.runs.execute import Rung, Tracked
    from titans_platform.tracking import open_store

    run, last = task["run"], step == config.optim.steps
    folder.begin(run.commit)
    tracked = Tracked(
        task["store"], _mlflow_run(open_store(task["store"]), task, folder.name, config, number)
    )
    found = fit_cell(
        config,
        run.root,
        folder.name,
        task["resources"],
        extra={"study": run.study.name, "row": f"trial {number}"},
        tracked=tracked,
        rung=None if last else Rung(step, task["search"].metric),
    )
    return found["columns"] if last else found


def _mlflow_run(store: Store, task: dict[str, Any], cell: str, config: RunConfig, number: int) -> str:
    tags = {
        "titans.row": f"trial {number}",
        "titans.seed": str(config.seed),
        "titans.scale": task["run"].scale_name,
    }
    searched = trial_row(task["run"], next(iter(task["search"].corners())))
    return store.cell_run(
        cell,
        f"trial {number}",
        parent=task["parent"],
        params=columns(Cell(f"trial {number}", config.seed, config), [searched]),
        config=config.model_dump(mode="json"),
        tags=tags,
    )
