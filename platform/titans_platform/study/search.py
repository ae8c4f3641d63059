"""A search: Optuna proposes, ASHA stops, and every trial is a cell that is never run twice.

A trial's folder keeps what its rungs measured, and a mark where it was stopped, so that a search that is
begun again replays what it knows in moments: the sampler and ASHA see the same numbers, and only what is
missing is trained, from its checkpoints.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from titans_platform.config import RunConfig
from titans_platform.errors import UsageError
from titans_platform.files import read_json
from titans_platform.runs.folder import RunFolder
from titans_platform.study.schedule import StudyRun, open_tracker, run_trials
from titans_platform.study.space import Parameter, Search
from titans_platform.study.spec import resolve
from titans_platform.study.trial import TRIALS, Climb, run_trial, trial_config


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
        """Whether as many trials have ended as the search asks for."""
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
        config.tokens_per_step,
        config.optim.steps,
        trials,
    )


def _read_trial(root: Path, entry: dict[str, Any], metric: str) -> Trial:
    folder = RunFolder(root, entry["cell"])
    rungs, result = folder.rungs(), folder.result()
    if result:
        rungs[result["config"]["optim"]["steps"]] = result["columns"][metric]
    last = max(rungs, default=0)
    steps = last or int((folder.progress() or {}).get("step", 0))
    state = "done" if result else "stopped" if folder.was_stopped() else folder.state()
    return Trial(entry["cell"], entry["number"], entry["params"], state, steps, rungs.get(last))


def run_search(run: StudyRun, search: Search, data: str, slots: int) -> None:
    """Run what the search has not tried yet, on data of this fingerprint; a Ray session must be open."""
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
    tracker = open_tracker(run)
    climb = Climb(tracker, search, tuple(steps), data)
    try:
        run_trials(
            run,
            run_trial,
            {"climb": climb},
            slots,
            search_alg=_sampler(search, mode, [trial.params for trial in known.trials]),
            scheduler=asha,
            num_samples=search.trials,
        )
    except BaseException:
        tracker.end("KILLED")
        raise
    finally:
        tracker.settle()


@contextmanager
def followed(run: StudyRun, tell: Callable[[str], None], every: float = 2.0) -> Iterator[None]:
    """Print how the search stands whenever that has changed, by its files."""
    stop = threading.Event()

    def watch() -> None:
        printed = ""
        while not stop.wait(every):
            found = read_search(run)
            if found and (line := search_line(found)) != printed:
                tell(line)
                printed = line

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
    shown = f"; best {found.search.metric} {best.value:.4g} (trial {best.number})" if best else ""
    share = found.tokens / found.tokens_of_grid
    return (
        f"Search: {len(found.trials)} of {found.search.trials} trials ({counted or 'none ended'}){shown}; "
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
