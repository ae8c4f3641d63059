"""A study's search: Optuna proposes, ASHA stops trials early, and no trial is run twice.

A trial is a run like any other. Its folder keeps the metric at each rung and whether ASHA stopped it, so a
search that is resumed replays these numbers to the sampler and to ASHA, and trains only what is missing.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from titans_platform.files import file_lock, read_json, write_json
from titans_platform.runs.folder import RunFolder
from titans_platform.study.spec import Search

FOUND = "found"
"""The row that the best trial becomes."""
TRIALS = "trials"
PROPOSED = "proposed"
"""The file beside the trials with the number of proposals; a sampler may repeat one."""


@dataclass(frozen=True)
class Trial:
    """A proposed configuration and its progress."""

    cell: str
    number: int
    params: dict[str, Any]
    state: str
    """A run's state, or `stopped` if ASHA ended it at a rung or its metric was not finite."""
    steps: int
    value: float | None
    """The metric at the last rung it reached; at the end of training if it is done."""


@dataclass(frozen=True)
class SearchState:
    """A search and its trials so far, in the order they were proposed."""

    folder: Path
    """The study's folder; its subfolder `trials/KEY` has a JSON file for each trial, named by its cell."""
    search: Search
    higher_is_better: bool
    tokens_per_step: int
    steps: int
    """Optimiser steps of a trial that is not stopped."""
    key: str
    """Hash of the first row's config and data and of the search; trials of another search do not count."""
    data: str | None
    """Fingerprint of the trials' data; None: not prepared."""
    trials: tuple[Trial, ...] = ()

    def read(self) -> SearchState:
        """Reload the search's trials from their files."""
        listed = [entry for path in self.trial_files.glob("*.json") if (entry := read_json(path))]
        listed.sort(key=lambda entry: entry["began"])
        return replace(self, trials=tuple(self._trial(entry) for entry in listed))

    def _trial(self, entry: dict[str, Any]) -> Trial:
        folder = RunFolder(self.folder.parents[1], entry["cell"])
        rungs, result = folder.rungs(self.search.metric), folder.result()
        if result:
            rungs[result.steps] = result.columns[self.search.metric]
        last = max(rungs, default=0)
        steps = last or int((folder.progress() or {}).get("step", 0))
        state = folder.state()
        if state != "done" and folder.was_stopped(self.key):
            state = "stopped"
        return Trial(entry["cell"], entry["number"], entry["params"], state, steps, rungs.get(last))

    @property
    def trial_files(self) -> Path:
        """The folder of the files of its trials."""
        return self.folder / TRIALS / self.key

    @property
    def milestones(self) -> list[int]:
        """The optimiser steps of the rungs, the last step included."""
        return self.search.milestones(self.steps)

    @property
    def finished(self) -> int:
        """Number of trials that were trained to the end or stopped at a rung."""
        return sum(trial.state in ("done", "stopped") for trial in self.trials)

    @property
    def over(self) -> bool:
        """True if all trials have finished; of a small space the sampler repeats some, so there are fewer."""
        path = self.trial_files / PROPOSED
        proposed = int(path.read_text()) if path.is_file() else 0
        needed = self.search.trials
        if proposed >= needed:
            needed = min(needed, len(self.trials))
        return self.finished >= needed

    @property
    def best(self) -> Trial | None:
        """The best of the trials that were trained to the end."""
        ended = [trial for trial in self.trials if trial.state == "done"]
        done = [trial for trial in ended if trial.value is not None and math.isfinite(trial.value)]
        sign = -1 if self.higher_is_better else 1
        return min(done, key=lambda trial: sign * float(trial.value or 0), default=None)

    @property
    def tokens(self) -> int:
        """Tokens of all trials together."""
        return self.tokens_per_step * sum(trial.steps for trial in self.trials)

    @property
    def tokens_of_grid(self) -> int:
        """Tokens of a grid search: the same number of trials, each trained to the end."""
        return self.tokens_per_step * self.steps * max(len(self.trials), self.search.trials)

    @property
    def line(self) -> str:
        """The state in one sentence."""
        states = Counter(trial.state for trial in self.trials)
        ended = [f"{states[s]} {s}" for s in ("done", "stopped", "running", "failed") if states[s]]
        best, share = self.best, self.tokens / self.tokens_of_grid
        shown = f"; best {self.search.metric} {best.value:.4g} (trial {best.number})" if best else ""
        return (
            f"Search: {len(self.trials)} of {self.search.trials} trials ({', '.join(ended) or 'none ended'})"
            f"{shown}; {self.tokens:,} tokens, {share:.0%} of all trials to their end"
        )

    def record(self) -> dict[str, Any]:
        """Return the state as a JSON value; ``set`` is the best configuration for a command line."""
        best = self.best
        return {
            "line": self.line, "over": self.over, "data": self.data,
            "trials": [asdict(trial) for trial in self.trials], "tokens": self.tokens,
            "tokens_of_grid": self.tokens_of_grid,
            "best": asdict(best) if best else None, "set": set_line(best.params) if best else None,
        }  # fmt: skip


def search_lines(record: Mapping[str, Any] | None) -> list[str]:
    """Return lines on a search from its record: its state, and the best configuration if there is one."""
    lines = [record.get("line"), record.get("set") and f"Found: {record['set']}"] if record else []
    return [line for line in lines if line]


def set_line(params: dict[str, Any]) -> str:
    """Parameters as options of the command line."""
    # floats with all digits: the config must be the trial's own
    values = [repr(v) if isinstance(v, float) else json.dumps(v).strip('"') for v in params.values()]
    return " ".join(f"--set {key}={value}" for key, value in zip(params, values, strict=True))


def number_trial(trials: Path, name: str, params: dict[str, Any]) -> int:
    """Return the number of the trial in run ``name``; list it in the folder ``trials`` if it is new."""
    path = trials / f"{name}.json"
    # two trials that start together must not get the same number
    with file_lock(trials / ".lock", timeout=-1):
        if (known := read_json(path)) is not None:
            return int(known["number"])
        number = len(list(trials.glob("*.json")))
        write_json(path, {"cell": name, "number": number, "began": time.time(), "params": params})
    return number
