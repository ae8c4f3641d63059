"""What a sweep is about to do: which cells are missing, how many run at once, how long it may take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titans_platform.config import RunConfig
from titans_platform.runs.resources import Machine, Resources, concurrency
from titans_platform.study.spec import Cell

CALIBRATION_LIMIT = 50e6
"""Parameters above which steps are not timed on the spot."""

TIMED = 5
"""Rows that are timed, spread over the grid: a deep memory takes longer than a linear one."""

STARTUP, CELL_OVERHEAD = 15.0, 2.0
"""Seconds before the first step, and of each cell beside training and evaluation (measured on two cores)."""


@dataclass(frozen=True)
class Plan:
    """Cells to run and cells that need not."""

    cells: tuple[Cell, ...]
    todo: tuple[Cell, ...]
    stale: tuple[Cell, ...]
    """Finished cells that another commit made."""
    concurrency: int
    resources: Resources


def make_plan(
    cells: Sequence[Cell],
    root: Path,
    commit: str,
    *,
    resources: Resources,
    machine: Machine,
    requested: int | None = None,
    rerun_stale: bool = False,
) -> Plan:
    """Sort cells into done and to do; with ``rerun_stale`` what another commit made is to do again."""
    results = [(cell, cell.folder(root).result() if cell.name else None) for cell in cells]
    stale = tuple(cell for cell, result in results if result and result.get("commit") != commit)
    todo = [cell for cell, result in results if result is None or (rerun_stale and cell in stale)]
    return Plan(tuple(cells), tuple(todo), stale, concurrency(resources, machine, requested), resources)


@dataclass(frozen=True)
class Estimate:
    """Wall-clock seconds a plan may take, or None, and what that rests on."""

    seconds: float | None
    basis: str


def estimate(plan: Plan, root: Path) -> Estimate:
    """From finished cells of this study and scale; without any, from a few steps timed on the spot."""
    if not plan.todo:
        return Estimate(0.0, "nothing to run")
    known = _finished_seconds(plan, root)
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


def _finished_seconds(plan: Plan, root: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for cell in plan.cells:
        result = cell.folder(root).shown_result() if cell.name else None
        if result and result.get("train_seconds"):
            seconds = float(result["train_seconds"]) + float(result.get("eval_seconds") or 0)
            found.setdefault(cell.row, []).append(seconds)
    return found


def _calibrated(plan: Plan) -> Estimate:
    import torch

    from titans_platform.objectives import build_objective

    config = plan.todo[0].config
    with torch.device("meta"):
        parameters = build_objective(config).build_model().num_parameters()
    if parameters > CALIBRATION_LIMIT:
        flop = sum(6 * parameters * train_tokens(cell.config) for cell in plan.todo)
        return Estimate(None, f"no cell is finished yet; about 6ND = {flop:.1e} FLOP of training in all")
    rows = {cell.row: cell.config for cell in plan.todo}
    timed = dict(list(rows.items())[:: -(-len(rows) // TIMED)])
    seconds = [_seconds_per_token(config) for config in timed.values()]
    if None in seconds:
        return Estimate(None, "no cell is finished yet, and the objective has no sample rows to time")
    per_token = statistics.fmean(filter(None, seconds))
    each = [per_token * (train_tokens(cell.config) + eval_tokens(cell.config) / 3) for cell in plan.todo]
    of = next(iter(timed)) if len(timed) == 1 else f"{len(timed)} rows"
    return Estimate(_wall(plan, each), f"two optimiser steps of {of} timed now")


def train_tokens(config: RunConfig) -> int:
    """Tokens a run trains on."""
    return config.optim.steps * config.optim.global_batch_size * config.data.sequence_length


def eval_tokens(config: RunConfig) -> float:
    """Tokens a run is measured on, as near as its config tells."""
    lengths = sum(
        length for tasks in config.eval.columns.values() for task in tasks for length in task.lengths
    )
    return config.eval.items * lengths * config.data.sequence_length


def _seconds_per_token(config: RunConfig) -> float | None:
    """Time two steps after one to warm up, on rows of random content: no data are needed."""
    from titans_platform.objectives import build_objective
    from titans_platform.training.loop import Trainer, deterministic

    rows = min(
        config.optim.micro_batch_size or config.optim.global_batch_size, config.optim.global_batch_size
    )
    optim = config.optim.model_copy(update={"global_batch_size": rows, "micro_batch_size": None})
    with deterministic(0, config.threads):
        objective, length = build_objective(config), config.data.sequence_length
        if (batch := objective.sample_batch(rows)) is None:
            return None
        model = objective.build_model()
        trainer = Trainer(model, optim, _Repeated(batch), objective=objective, sequence_length=length)
        trainer.step()
        started = time.perf_counter()
        for _ in range(2):
            trainer.step()
        seconds = time.perf_counter() - started
    return seconds / (2 * rows * config.data.sequence_length)


class _Repeated:
    """A stream whose every batch is the same."""

    def __init__(self, batch: Any):
        self.only = batch

    def batch(self, step: int) -> Any:
        """The batch, whatever the step."""
        return self.only
