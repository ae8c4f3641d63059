"""A study at one scale: what of it is missing, how many cells run at once, how long that may take."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from titans_platform.config import RunConfig, digest
from titans_platform.runs.ray_session import available
from titans_platform.runs.spec import Machine, Resources, concurrency
from titans_platform.study.grid import Cell, resolve
from titans_platform.study.spec import Column, Row, Study

TIMED = 5
"""Rows that are timed, spread over the grid: a deep memory takes longer than a linear one."""
STARTUP, CELL_OVERHEAD = 15.0, 2.0
"""Seconds before the first step, and of each cell beside training and evaluation (measured on two cores)."""


@dataclass(frozen=True)
class StudyRun:
    """One study at one scale under one storage root, and its cells."""

    study: Study
    scale_name: str
    root: Path
    commit: str
    overrides: tuple[str, ...] = ()
    """What --set changed for every row: the table of another study than the file's own."""
    cells: tuple[Cell, ...] = ()
    """The cells asked for."""
    whole: tuple[Cell, ...] = ()
    """All cells of the table: the scale's own, those asked for, and those of other seeds that have begun."""

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

    @property
    def columns(self) -> dict[str, Column]:
        """The columns of its table."""
        return self.study.columns_at(self.scale_name)

    def config(self, row: Row) -> RunConfig:
        """The config of a row, which need not be one of the table's. Raises UsageError."""
        return resolve(self.study, self.scale_name, row, self.overrides)


@dataclass(frozen=True)
class Plan:
    """What a study is about to do."""

    todo: tuple[Cell, ...]
    """The cells asked for that are to be run."""
    stale: tuple[Cell, ...]
    """Finished cells that another commit made."""
    concurrency: int


def make_plan(
    run: StudyRun, rerun_stale: bool = False, requested: int | None = None, machine: Machine | None = None
) -> Plan:
    """What is missing, and with ``rerun_stale`` what another commit made; ``requested`` cells at once.

    Cells are placed on ``machine``, where None on what there is. Raises UsageError, for a cluster
    ClusterError, where they cannot be.
    """
    results = [(cell, cell.folder(run.root).result()) for cell in run.cells]
    stale = tuple(cell for cell, result in results if result and result.commit != run.commit)
    todo = tuple(cell for cell, result in results if result is None or (rerun_stale and cell in stale))
    return Plan(todo, stale, concurrency(run.resources, machine or available(run.resources), requested))


class Estimate(NamedTuple):
    """Wall-clock seconds a plan may take, or None, and what that rests on."""

    seconds: float | None
    basis: str


def estimate(run: StudyRun, plan: Plan) -> Estimate:
    """From finished cells of this study and scale; without any, from a few steps timed on the spot."""
    if not plan.todo:
        return Estimate(0.0, "nothing to run")
    known = _finished_seconds(run)
    if known:
        overall = statistics.fmean(statistics.fmean(times) for times in known.values())
        each = [statistics.fmean(known.get(cell.row, [overall])) for cell in plan.todo]
        done = sum(len(times) for times in known.values())
        return Estimate(_wall(plan, each), f"{done} finished cells")
    return _calibrated(plan)


def _wall(plan: Plan, each: Sequence[float]) -> float:
    """Start-up, the average load of a slot, and never less than the longest cell."""
    loads = [seconds + CELL_OVERHEAD for seconds in each]
    return STARTUP + max(sum(loads) / plan.concurrency, max(loads))


def _finished_seconds(run: StudyRun) -> dict[str, list[float]]:
    """Seconds of the finished cells of each row."""
    found: dict[str, list[float]] = {}
    for cell in run.cells:
        result = cell.folder(run.root).shown_result()
        if result and result.train_seconds:
            found.setdefault(cell.row, []).append(result.seconds)
    return found


def _calibrated(plan: Plan) -> Estimate:
    from titans_platform.runs.cost import seconds_per_token, training_flops

    rows = {cell.row: cell.config for cell in plan.todo}
    timed = dict(list(rows.items())[:: -(-len(rows) // TIMED)])
    seconds = [seconds_per_token(config) for config in timed.values()]
    if None in seconds:
        flops = {row: training_flops(config) for row, config in rows.items()}
        if None in flops.values():
            return Estimate(None, "no cell is finished yet, and the objective has no sample rows to time")
        steps = [cell.config.optim.steps * cell.config.optim.global_batch_size for cell in plan.todo]
        total = sum((flops[cell.row] or 0) * rows for cell, rows in zip(plan.todo, steps, strict=True))
        return Estimate(None, f"no cell is finished yet; {total:.1e} FLOP of training in all")
    per_token = statistics.fmean(filter(None, seconds))
    each = [per_token * (cell.config.tokens + eval_tokens(cell.config) / 3) for cell in plan.todo]
    of = next(iter(timed)) if len(timed) == 1 else f"{len(timed)} rows"
    return Estimate(_wall(plan, each), f"two optimiser steps of {of} timed now")


def eval_tokens(config: RunConfig) -> float:
    """Tokens a run is measured on, as near as its config tells."""
    tasks = [task for column in config.eval.columns.values() for task in column]
    lengths = sum(length for task in tasks for length in task.lengths)
    return config.eval.items * lengths * config.data.sequence_length
