"""A training step of every row of a study timed, alone or beside another checkout: `titans bench step`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from titans_platform import step_worker
from titans_platform.config import RunConfig
from titans_platform.errors import TitansError, UsageError
from titans_platform.study.spec import expand, load_study

PACKAGES = ("kernels", "", "platform")
"""Folders of a checkout that hold packages."""
SAME_LOSS = 1e-5
"""Relative difference of losses that rounding in float32 explains, after a few steps."""

Progress = Callable[[str], None]


class Worker:
    """One row's steps in a process of its own; a context manager.

    Args:
        job: as `step_worker.trainer_of` takes it.
        checkout: the tree whose code runs; None: this one's.
        folder: for the job and the process's errors.

    Raises:
        TitansError: the process ended; its last line is the reason.
    """

    def __init__(self, job: Mapping[str, Any], checkout: Path | None, folder: Path):
        self.steps: list[tuple[float, float]] = []
        self._errors = (folder / "errors").open("w+")
        (folder / "job.json").write_text(json.dumps(job))
        environment = os.environ | {"OMP_NUM_THREADS": str(job["threads"])}
        if checkout is not None:
            environment["PYTHONPATH"] = os.pathsep.join(str(checkout / name) for name in PACKAGES)
        # -P: the folder of the file, which is a package's, stays off the path
        command = [sys.executable, "-P", step_worker.__file__, str(folder / "job.json")]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env=environment,
        )  # fmt: skip

    def __enter__(self) -> Worker:
        self.about = self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def turn(self, steps: int) -> None:
        """Time some steps; seconds of CPU and of wall clock of one of them are added."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{steps}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer says why
        cpu, wall = self._answer()
        self.steps.append((cpu / steps, wall / steps))

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        raise TitansError(f"the training step failed: {(lines or [f'exit code {code}'])[-1]}")


def run(
    study: str, scale: str, *, rows: Sequence[str] = (), against: Path | None = None, rounds: int = 5,
    steps: int = 4, threads: int = 1, overrides: Sequence[str] = (),
    progress: Progress = lambda message: None,
) -> dict[str, Any]:  # fmt: skip
    """Time ``rounds`` of ``steps`` training steps of each row; with ``against`` the two trees take turns.

    A row with the same config in both trees but other losses is not timed: ``refused`` says why. Where a tree
    has fields that the other has not, ``same_losses`` says whether they train one model.

    Raises:
        UsageError: no such study, scale or row; no checkout at ``against``; a row not trained on tokens.
        TitansError: a step failed.
    """
    if against is not None and not (against / "titans_core").is_dir():
        raise UsageError(f"--against: {against} is no checkout of this project: titans_core is not in it")
    cells = {
        cell.row: cell.config for cell in expand(load_study(study), scale, rows=rows, overrides=overrides)
    }
    jobs = {name: _job(name, config, threads) for name, config in cells.items()}
    results = []
    for name, job in jobs.items():
        say = lambda message, name=name: progress(f"{name}: {message}")  # noqa: E731
        results.append({"row": name} | _time(job, against, rounds, steps, say))
    return {
        "study": study, "scale": scale, "threads": threads, "rounds": rounds, "steps": steps,
        "against": str(against) if against else None, "rows": results,
    }  # fmt: skip


def _job(name: str, config: RunConfig, threads: int) -> dict[str, Any]:
    if config.objective.kind != "next_token":
        raise UsageError(f"row {name!r}: only steps of objective next_token can be timed")
    optim = config.optim
    return {
        # what is as it is by default is left out: an older tree does not know every field
        "model": config.model.model_dump(mode="json", exclude_defaults=True),
        "optim": optim.model_dump(mode="json", exclude_defaults=True),
        "rows": optim.global_batch_size,
        "length": config.data.sequence_length,
        "threads": threads,
    }


def _time(
    job: dict[str, Any], against: Path | None, rounds: int, steps: int, progress: Progress
) -> dict[str, Any]:
    trees = {"ours": None} | ({"theirs": against} if against else {})
    tokens = job["rows"] * job["length"]
    with ExitStack() as stack:
        workers = {}
        for name, checkout in trees.items():
            progress(f"starting {name}")
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            workers[name] = stack.enter_context(Worker(job, checkout, folder))
        compared = _compare(workers["ours"].about, workers["theirs"].about) if against else {}
        if "refused" in compared:
            return compared
        for i in range(rounds):
            progress(f"round {i + 1} of {rounds}")
            for worker in list(workers.values())[:: -1 if i % 2 else 1]:
                worker.turn(steps)
    row: dict[str, Any] = {
        name: _summary(worker.steps, tokens) for name, worker in workers.items()
    } | compared
    if against:
        both = zip(workers["theirs"].steps, workers["ours"].steps, strict=True)
        ratios = [theirs[0] / ours[0] for theirs, ours in both]
        row["times"] = {"median": median(ratios), "least": min(ratios), "most": max(ratios)}
    return row


def _compare(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Whether the two trees compute the same; where they do not, their configs must differ."""
    off = max(abs(a - b) / abs(b) for a, b in zip(ours["losses"], theirs["losses"], strict=True))
    same = off <= SAME_LOSS and ours["parameters"] == theirs["parameters"]
    found = {"same_losses": same, "loss_off": off}
    if not same and ours["config"] == theirs["config"]:
        found["refused"] = f"same config, but its losses differ by {off:.1e}"
    return found


def _summary(steps: Sequence[tuple[float, float]], tokens: int) -> dict[str, Any]:
    cpu, wall = (median(step[i] for step in steps) for i in (0, 1))
    return {
        "cpu_ms": 1e3 * cpu,
        "wall_ms": 1e3 * wall,
        "tokens_per_second": tokens / cpu,
        "samples": list(steps),
    }
