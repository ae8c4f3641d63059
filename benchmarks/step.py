"""`titans bench step`: a training step of every row of a study, alone or beside another checkout."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console

from benchmarks import step_worker
from titans_kernels.bench.process import Answering
from titans_kernels.bench.timing import Failed
from titans_platform.cli import echo_json, json_option, set_option
from titans_platform.config import RunConfig
from titans_platform.errors import TitansError, UsageError
from titans_platform.study.grid import expand, load_study

PACKAGES = ("kernels", "", "platform")
"""Folders of a checkout that hold packages."""
SAME_LOSS = 1e-5
"""Relative difference of losses that rounding in float32 explains, after a few steps."""

Progress = Callable[[str], None]


class StepWorker(Answering):
    """One row's steps in a process of its own; a context manager.

    Args:
        job: as `step_worker.trainer_of` takes it.
        checkout: the tree whose code runs; None: this one's.
        label: names the row in errors.
    """

    def __init__(self, job: Mapping[str, Any], checkout: Path | None, label: str):
        path = {"PYTHONPATH": os.pathsep.join(str(checkout / name) for name in PACKAGES)} if checkout else {}
        # -P: the folder of the file, which is a package's, stays off the path
        super().__init__(["-P", step_worker.__file__, json.dumps(job)], job["threads"], label, path)
        self.steps: list[tuple[float, float]] = []
        """Seconds of CPU and of wall clock of a step, one entry a turn."""

    def turn(self, steps: int) -> None:
        """Time some steps. Raises Failed where the process has ended."""
        cpu, wall = self.ask(str(steps))
        self.steps.append((cpu / steps, wall / steps))


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
        TitansError: a step failed; its last line is the reason.
    """
    if against is not None and not (against / "titans_core").is_dir():
        raise UsageError(f"--against: {against} is no checkout of this project: titans_core is not in it")
    cells = {
        cell.row: cell.config for cell in expand(load_study(study), scale, rows=rows, overrides=overrides)
    }
    jobs = {name: _job(name, config, threads) for name, config in cells.items()}
    results = []
    for name, job in jobs.items():
        try:
            results.append({"row": name} | _time(name, job, against, rounds, steps, progress))
        except Failed as error:
            raise TitansError(f"the training step failed: {error}") from None
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
    name: str, job: dict[str, Any], against: Path | None, rounds: int, steps: int, progress: Progress
) -> dict[str, Any]:
    trees = {"ours": None} | ({"theirs": against} if against else {})
    tokens = job["rows"] * job["length"]
    with ExitStack() as stack:
        progress(f"{name}: starting")
        workers = {
            tree: stack.enter_context(StepWorker(job, checkout, f"{name}, {tree}"))
            for tree, checkout in trees.items()
        }
        about = {tree: worker.answer() for tree, worker in workers.items()}
        compared = _compare(about["ours"], about["theirs"]) if against else {}
        if "refused" in compared:
            return compared
        for i in range(rounds):
            progress(f"{name}: round {i + 1} of {rounds}")
            for worker in list(workers.values())[:: -1 if i % 2 else 1]:
                worker.turn(steps)
    row: dict[str, Any] = {tree: _summary(worker.steps, tokens) for tree, worker in workers.items()}
    row |= compared
    if against:
        both = zip(workers["theirs"].steps, workers["ours"].steps, strict=True)
        ratios = [theirs[0] / ours[0] for theirs, ours in both]
        row["times"] = {"median": median(ratios), "least": min(ratios), "most": max(ratios)}
    return row


def _compare(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Compare the losses of two trees; they may differ only if their configs do."""
    off = max(abs(a - b) / abs(b) for a, b in zip(ours["losses"], theirs["losses"], strict=True))
    same = off <= SAME_LOSS and ours["parameters"] == theirs["parameters"]
    comparison = {"same_losses": same, "loss_off": off}
    if not same and ours["config"] == theirs["config"]:
        comparison["refused"] = f"same config, but its losses differ by {off:.1e}"
    return comparison


def _summary(steps: Sequence[tuple[float, float]], tokens: int) -> dict[str, Any]:
    cpu, wall = (median(step[i] for step in steps) for i in (0, 1))
    return {
        "cpu_ms": 1e3 * cpu,
        "wall_ms": 1e3 * wall,
        "tokens_per_second": tokens / cpu,
        "samples": list(steps),
    }


@click.command()
@click.argument("study", default="ablation")
@click.option("--scale", default="laptop", show_default=True, help="Size of the study.")
@click.option("--rows", multiple=True, metavar="NAME", help="Only this row. May be repeated.")
@click.option(
    "--against", type=click.Path(path_type=Path), metavar="CHECKOUT",
    help="Also time the code of another checkout of this project, in turns.",
)  # fmt: skip
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Times each is timed.")
@click.option("--steps", type=click.IntRange(1), default=4, show_default=True, help="Steps of a round.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Threads of torch.")
@set_option
@json_option
def step(study: str, overrides: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Time a training step of every row of a study: forward, backward, optimiser.

    Rows are random tokens, a document each. Rates are tokens per second of CPU time, which other work on the
    machine changes less than the clock's. Beside another checkout a row must have the same losses in both:
    otherwise it is not timed (exit 1), or is marked if a field of its config is new. To have an
    earlier commit beside this one: git worktree add ../before COMMIT.

    \b
    Example:
      titans bench step ablation --scale laptop --against ../before
    """
    with Console(stderr=True).status("starting") as status:
        result = run(study, overrides=overrides, progress=status.update, **options)
    if as_json:
        echo_json(result)
    else:
        click.echo("\n".join(lines_of_steps(result)))
    if any("refused" in row for row in result["rows"]):
        raise click.exceptions.Exit(1)


_STEP = "{:<24} {:>9} {:>8} {:>10} {:>8} {:>18}"


def lines_of_steps(result: dict[str, Any]) -> list[str]:
    """Return the table of ``run`` as text of 80 columns."""
    lines = [
        f"Training steps of {result['study']} at {result['scale']}; threads: {result['threads']}, "
        f"median of {result['rounds']}.",
        _STEP.format("row", "tokens/s", "CPU ms", "clock ms", "before", "ratio").rstrip(),
    ]
    for row in result["rows"]:
        if "refused" in row:
            lines.append(f"{row['row'][:24]:<24} not timed: {row['refused']}")
            continue
        before, ratio, ours = "", "", row["ours"]
        if "theirs" in row:
            r = row["times"]
            before = f"{row['theirs']['cpu_ms']:.1f}"
            mark = "" if row["same_losses"] else "*"
            ratio = f"{r['median']:.2f}x{mark} ({r['least']:.2f}-{r['most']:.2f})"
        lines.append(
            _STEP.format(
                row["row"][:24], f"{ours['tokens_per_second']:,.0f}", f"{ours['cpu_ms']:.1f}",
                f"{ours['wall_ms']:.1f}", before, ratio,
            ).rstrip()
        )  # fmt: skip
    if result["against"]:
        lines.append(f"before: CPU ms of {result['against']}; ratio: before over now.")
    if any(not row.get("same_losses", True) for row in result["rows"]):
        lines.append("* other losses in that checkout, whose config lacks a field: another model.")
    return lines
