"""A search: Optuna proposes, ASHA stops, and every trial is a cell that is never run twice.

A trial's folder keeps what its rungs measured, and a mark where it was stopped, so that a search that is
begun again replays what it knows in moments: the sampler and ASHA see the same numbers, and only what is
missing is trained, from its checkpoints.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from titans_platform.config import RunConfig
from titans_platform.errors import Interrupted, TitansError, UsageError
from titans_platform.files import file_lock, read_json, write_json
from titans_platform.loading import overlay
from titans_platform.runs.folder import Busy, RunFolder
from titans_platform.runs.ray_session import die_with_parent
from titans_platform.runs.result import Result
from titans_platform.runs.spec import Rung, RunSpec
from titans_platform.study.grid import Cell
from titans_platform.study.plan import StudyRun
from titans_platform.study.schedule import run_trials
from titans_platform.study.spec import Parameter, Row, Search
from titans_platform.study.tracker import Tracker, tracked

FOUND = "found"
"""The row that the best trial becomes."""
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
    def milestones(self) -> list[int]:
        """The optimiser steps that are rungs, and the end."""
        return self.search.milestones(self.steps)

    @property
    def finished(self) -> int:
        """Trials that were trained to the end or stopped at a rung."""
        return sum(trial.state in ("done", "stopped") for trial in self.trials)

    @property
    def over(self) -> bool:
        """Whether as many trials have ended as the search asks for."""
        return self.finished >= self.search.trials

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

    @property
    def line(self) -> str:
        """How the search stands, in a sentence."""
        states = Counter(trial.state for trial in self.trials)
        counted = [f"{states[s]} {s}" for s in ("done", "stopped", "running", "failed") if states[s]]
        best = self.best
        shown = f"; best {self.search.metric} {best.value:.4g} (trial {best.number})" if best else ""
        share = self.tokens / self.tokens_of_grid
        return (
            f"Search: {len(self.trials)} of {self.search.trials} trials "
            f"({', '.join(counted) or 'none ended'}){shown}; "
            f"{self.tokens:,} tokens, {share:.0%} of all trials to their end"
        )

    def record(self) -> dict[str, Any]:
        """How the search stands, as a JSON value; ``set`` is the best configuration for a command line."""
        best = self.best
        return {
            "line": self.line,
            "over": self.over,
            "trials": [asdict(trial) for trial in self.trials],
            "tokens": self.tokens,
            "tokens_of_grid": self.tokens_of_grid,
            "best": asdict(best) if best else None,
            "set": set_line(best.params) if best else None,
        }


def set_line(params: dict[str, Any]) -> str:
    """Parameters as options of the command line."""
    return " ".join(f"--set {key}={_shown(value)}" for key, value in params.items())


def _shown(value: Any) -> str:
    # all digits: the config must be the trial's own
    return repr(value) if isinstance(value, float) else json.dumps(value).strip('"')


def trial_row(run: StudyRun, params: dict[str, Any], name: str = FOUND) -> Row:
    """The study's first row with a trial's parameters laid over it."""
    return Row(name=name, set=overlay(run.rows[0].set, params))


def with_found(run: StudyRun, searched: Searched) -> StudyRun:
    """The study with the best trial as a row, where there is one yet."""
    if (best := searched.best) is None:
        return run
    rows = [row for row in run.study.rows if row.name != FOUND]
    study = run.study.model_copy(update={"rows": (*rows, trial_row(run, best.params))})
    return replace(run, study=study)


def trial_config(run: StudyRun, search: Search, params: dict[str, Any]) -> RunConfig:
    """The config of a trial. Raises UsageError."""
    return run.config(trial_row(run, params)).model_copy(update={"seed": search.seed})


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
    config = run.config(run.rows[0])
    listed = [found for path in (run.folder / TRIALS).glob("*.json") if (found := read_json(path))]
    listed.sort(key=lambda entry: entry["began"])
    trials = tuple(_read_trial(run.root, entry, search.metric) for entry in listed)
    higher = run.columns[search.metric].higher_is_better
    return Searched(search, higher, config.tokens_per_step, config.optim.steps, trials)


def _read_trial(root: Path, entry: dict[str, Any], metric: str) -> Trial:
    folder = RunFolder(root, entry["cell"])
    rungs, result = folder.rungs(), folder.result()
    if result:
        rungs[result.steps] = result.columns[metric]
    last = max(rungs, default=0)
    steps = last or int((folder.progress() or {}).get("step", 0))
    state = "done" if result else "stopped" if folder.was_stopped() else folder.state()
    return Trial(entry["cell"], entry["number"], entry["params"], state, steps, rungs.get(last))


@dataclass(frozen=True)
class TrialContext:
    """What every trial of a search shares."""

    tracker: Tracker
    search: Search
    data: str
    """Fingerprint of the data."""


def run_search(run: StudyRun, known: Searched, data: str, slots: int) -> None:
    """Run what the search has not tried yet, on data of this fingerprint; a Ray session must be open."""
    from ray.tune.schedulers import ASHAScheduler

    search, steps = known.search, known.milestones
    mode = "max" if known.higher_is_better else "min"
    asha = ASHAScheduler(
        time_attr="steps",
        metric="value",
        mode=mode,
        grace_period=steps[0],
        max_t=steps[-1],
        reduction_factor=search.reduction,
    )
    with tracked(run) as tracker:
        run_trials(
            run,
            run_trial,
            {"shared": TrialContext(tracker, search, data)},
            slots,
            lambda: [RunFolder(run.root, path.stem) for path in (run.folder / TRIALS).glob("*.json")],
            search_alg=_sampler(search, mode, [trial.params for trial in known.trials]),
            scheduler=asha,
            num_samples=search.trials,
        )


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


def run_trial(space: dict[str, Any]) -> None:
    """On a worker: train the parameters in ``space`` from rung to rung; each measurement goes to ASHA."""
    from ray import tune

    die_with_parent()
    params = dict(space)
    shared: TrialContext = params.pop("shared")
    search, spec = shared.search, _trial_spec(shared, params)
    try:
        for step in search.milestones(spec.config.optim.steps):
            value = _measured(spec, Rung(step, search.metric))
            if value is None:
                return
            tune.report({"steps": step, "value": value})
    except SystemExit:
        # how Tune ends a trial, inside of report
        if not spec.folder.result():
            spec.folder.stop("ASHA")
        raise


def _trial_spec(shared: TrialContext, params: dict[str, Any]) -> RunSpec:
    from titans_platform.objectives import build_objective
    from titans_platform.runs.load import located

    run = shared.tracker.run
    config = located(trial_config(run, shared.search, params), run.root)
    name = build_objective(config).run_name(shared.data, run.resources.named)
    title = f"trial {_number(run, name, params)}"
    searched = trial_row(run, next(iter(shared.search.corners())))
    return shared.tracker.spec(Cell(title, config.seed, config, name), title, [searched])


def _number(run: StudyRun, name: str, params: dict[str, Any]) -> int:
    """The trial's number on the study's list, where it is put the first time."""
    listed = run.folder / TRIALS
    path = listed / f"{name}.json"
    # trials that start together must not take the same number
    with file_lock(listed / ".lock", timeout=30):
        if (known := read_json(path)) is not None:
            return int(known["number"])
        number = len(list(listed.glob("*.json")))
        write_json(path, {"cell": name, "number": number, "began": time.time(), "params": params})
    return number


def _measured(spec: RunSpec, rung: Rung) -> float | None:
    """The metric at a rung, from the files or by training up to it; None where the trial has ended."""
    from titans_platform.runs.execute import execute

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
