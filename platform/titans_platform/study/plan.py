"""`open_study` reads and checks a study, `place` sets how many cells run at once, `prepare` names them all.

`estimate` and `costs` predict what they take.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from titans_platform.config import RunConfig, digest
from titans_platform.data.parts import PrepareProgress
from titans_platform.errors import UsageError, within
from titans_platform.files import read_json
from titans_platform.objectives import Data, build_objective, run_name
from titans_platform.provenance import commit
from titans_platform.runs.check import (
    check_resources,
    machine_memory,
    needed_memory,
    seconds_per_token,
    sizes,
    training_flops,
)
from titans_platform.runs.folder import RunFolder
from titans_platform.runs.load import check_start, located
from titans_platform.runs.ray_session import available
from titans_platform.runs.spec import concurrency
from titans_platform.study.grid import RECORD, Cell, StudyRun, chosen_cells, chosen_rows, expand, load_study
from titans_platform.training.optim import Diverged

TIMING_SECONDS = 20.0
"""Maximum seconds spent timing rows; the remaining rows get the mean."""
STARTUP, CELL_OVERHEAD = 20.0, 4.0
"""Seconds before the first step, and of each cell beside training and evaluation, measured on two cores."""
GIB = 2**30
MFU = 0.15
"""Model FLOPs utilisation that is assumed of GPUs on which nothing was timed: on one H200 a step of LMM at
340M reached 16%, of Transformer++ 47%."""


def open_study(
    name: str, scale: str, root: Path, *, rows: Sequence[str] = (), seeds: Sequence[int] = (),
    overrides: Sequence[str] = (),
) -> StudyRun:  # fmt: skip
    """Read and check a study and expand it to cells. Cells whose data are prepared have names.

    If its search has finished, the best trial is a row. Raises UsageError.
    """
    file = load_study(name)
    study = StudyRun(file, file.scale_name(scale), root.resolve(), commit(), tuple(overrides)).with_search()
    if study.search:
        for config in check_space(study):
            sizes(config)
        # until it finishes, another trial may become the best
        study = study.with_found() if study.search.over else study
    whole = expand(study.study, scale, overrides=overrides)
    _check_rows(whole, lambda config: build_objective(config).check())
    configs = {cell.row: cell.config for cell in whole}
    cells = chosen_cells(study.scale, configs, chosen_rows(rows, study.rows, file.name), seeds)
    # names of the scale's own cells come first, then other seeds'
    keyed = {(cell.row, cell.seed): cell for cell in (*whole, *_of_other_seeds(study, configs), *cells)}
    return name_cells(replace(study, cells=tuple(cells), whole=tuple(keyed.values())))


def _of_other_seeds(study: StudyRun, configs: dict[str, RunConfig]) -> list[Cell]:
    """Cells that earlier runs of the study requested and started, of any seed."""
    listed = (read_json(study.path / RECORD) or {}).get("cells", [])
    started = [entry for entry in listed if entry["cell"] and entry["row"] in configs]
    return [
        Cell(entry["row"], entry["seed"], study.scale.seeded(configs[entry["row"]], entry["seed"]))
        for entry in started
        if RunFolder(study.root, entry["cell"]).state() != "missing"
    ]


def check_space(study: StudyRun) -> list[RunConfig]:
    """Configs at the corners of the search's space, all valid. Raises UsageError that names the corner."""
    assert study.search
    corners = []
    for params in study.search.search.corners():
        at = ", ".join(f"{key}={value}" for key, value in params.items())
        with within(f"search.space at {at}", sep=": "):
            corners.append(study.trial_config(params))
    return corners


def check_without_data(study: StudyRun) -> None:
    """Check batch, resources and memory, and sources without their data. Raises UsageError, ClusterError."""
    _check_rows(study.cells, lambda config: check_resources(config, study.scale.resources, study.machine))
    unnamed = (cell for cell in study.cells if not cell.name)
    _check_rows(unnamed, lambda config: build_objective(config).check_sources())


def prepare(study: StudyRun, progress: PrepareProgress | None = None) -> StudyRun:
    """Prepare the data, name the cells, run a worker's checks on each row, and write the study's record.

    The study's lock must be held. ``progress`` is called with a source and how far it is; None: the data are
    prepared. Raises UsageError, StorageError.
    """
    make = lambda config: build_objective(config).prepare(study.root, progress)  # noqa: E731
    if study.search:
        make(study.config(study.rows[0]))
        study = study.with_search()
        study = study if study.searching else study.with_found()
    study = name_cells(study, make if progress else None)

    def check(config: RunConfig) -> None:
        check_start(config)
        objective = build_objective(config)
        objective.check(objective.open(study.root))

    _check_rows(study.cells, check)
    study.write()
    return study


def _check_rows(cells: Iterable[Cell], check: Callable[[RunConfig], None]) -> None:
    """Call ``check`` with the config of each row. Raises UsageError that names the row."""
    for row, config in {cell.row: cell.config for cell in cells}.items():
        with within(f"row {row!r}", sep=": "):
            check(config)


def name_cells(study: StudyRun, prepare: Callable[[RunConfig], Data] | None = None) -> StudyRun:
    """Name the requested cells, preparing their data, and all others whose data exist."""
    from titans_platform.data import NotPrepared

    known: dict[str, Data] = {}
    starts: dict[str | None, str | None] = {}

    def named(cell: Cell, open_data: Callable[[RunConfig], Data]) -> Cell:
        config = cell.config
        key = digest([config.data.model_dump(mode="json"), config.objective.model_dump(mode="json")])
        try:
            if key not in known:
                known[key] = open_data(config)
        except NotPrepared:
            return cell
        except UsageError as error:
            raise UsageError(f"row {cell.row!r}: {error}") from None
        if config.start_from not in starts:
            # finding a checkpoint hashes it, so once
            starts[config.start_from] = located(config, study.root).start_from
        config = config.model_copy(update={"start_from": starts[config.start_from]})
        data = known[key].fingerprint
        name = run_name(config, data, study.scale.resources.hashed_workers)
        return replace(cell, config=config, name=name, data=data)

    def at_hand(config: RunConfig) -> Data:
        return build_objective(config).open(study.root)

    cells = tuple(named(cell, prepare or at_hand) for cell in study.cells)
    return replace(study, cells=cells, whole=tuple(named(cell, at_hand) for cell in study.whole))


def place(study: StudyRun, rerun_stale: bool = False, requested: int | None = None) -> tuple[StudyRun, str]:
    """Set the study's concurrency on its machine, by default this one or the cluster of the job.

    ``requested`` cells run concurrently, by default as many as fit; fewer, with a warning, if the peak memory
    of finished cells shows that these would not fit. Raises UsageError, for a cluster ClusterError, if not
    even one cell fits, or fewer than requested.
    """
    machine = study.machine or available(study.scale.resources)
    fit, memory = concurrency(study.scale.resources, machine, requested), machine_memory()
    placed = replace(study, machine=machine, concurrency=fit, rerun_stale=rerun_stale)
    peaks = [result.peak_rss_bytes or 0 for _, result in placed.results if result]
    cell = max(peaks, default=0) * study.scale.resources.max_workers
    if machine.nodes or fit * cell <= memory:
        return placed, ""
    fewer = max(1, memory // cell)
    text = (
        f"{fit} cells at once need {fit * cell / GIB:.1f} GiB of memory "
        f"({cell / GIB:.1f} GiB each, measured), this machine has {memory / GIB:.1f}"
    )
    if requested:
        raise UsageError(f"--concurrency {requested}: {text}; give {fewer}")
    return replace(placed, concurrency=fewer), f"{text}; {fewer} at a time"


def estimate(study: StudyRun) -> tuple[float | None, str]:
    """Estimated wall-clock seconds, None if unknown, and the basis of the estimate.

    From finished cells of this study and scale; without any, from the FLOPs of a step on GPUs that are known,
    else from optimiser steps timed now. A search before the cells is included.
    """
    todo, search = study.todo, study.search
    if not todo and not study.searching:
        return 0.0, "nothing to run"
    # if only the search is left, estimate from cells of the first row
    timed = todo or study.cells[:1] * study.concurrency
    estimated = _from_finished(study, timed) or _from_flops(study, timed)
    seconds, basis = estimated or _from_timed_steps(study, timed)
    if seconds is None or search is None or search.over:
        return seconds, basis
    # a rung trains about as long as the first one; the best trial becomes a row with all seeds
    run = search.search.rungs * search.milestones[0] / search.steps
    trials = (search.search.trials - search.finished) * run
    return seconds * (trials + len(todo) + len({cell.seed for cell in study.cells})) / len(timed), basis


def wall_seconds(cells: Sequence[float], concurrency: int) -> float:
    """Wall-clock seconds of cells that take this long: start-up, then the mean load of a slot.

    Never less than the longest cell.
    """
    loads = [seconds + CELL_OVERHEAD for seconds in cells]
    return STARTUP + max(sum(loads) / concurrency, max(loads))


def _from_finished(study: StudyRun, todo: Sequence[Cell]) -> tuple[float, str] | None:
    """Estimate from the mean seconds of each row's finished cells; None without any."""
    known: dict[str, list[float]] = {}
    for cell in study.cells:
        if (result := cell.folder(study.root).shown_result()) and result.train_seconds:
            known.setdefault(cell.row, []).append(result.seconds)
    if not known:
        return None
    overall = statistics.fmean(statistics.fmean(times) for times in known.values())
    each = [statistics.fmean(known.get(cell.row, [overall])) for cell in todo]
    return wall_seconds(each, study.concurrency), f"{sum(map(len, known.values()))} finished cells"


def _from_flops(study: StudyRun, todo: Sequence[Cell]) -> tuple[float, str] | None:
    """Estimate from the FLOPs of each row at an assumed MFU; None if the GPU or a row's FLOPs are unknown."""
    speeds = {row: speed(config, study) for row, config in {cell.row: cell.config for cell in todo}.items()}
    if not all(speeds.values()):
        return None
    each = [(c.config.tokens + eval_tokens(c.config) / 3) / (speeds[c.row] or 1) for c in todo]
    return wall_seconds(each, study.concurrency), f"FLOPs at an assumed MFU of {MFU:.0%}"


def speed(config: RunConfig, study: StudyRun) -> float | None:
    """Return an estimate of a cell's training tokens a second on the study's GPUs, if they are known."""
    gpu, gpus = study.machine and study.machine.gpu, study.scale.resources.gpus
    if not gpus or gpu is None or not gpu.flops or (flops := training_flops(config)) is None:
        return None
    # float32 products are half as fast, in TF32; recomputation is another forward pass
    peak = gpu.flops if config.optim.precision == "bf16" else gpu.flops / 2
    whole = config.optim.recompute is True
    return MFU * peak * gpus * config.row_tokens / (flops * (4 / 3 if whole else 1))


def costs(study: StudyRun) -> list[dict[str, Any]]:
    """Return estimates of a cell of each row on the study's GPUs, by the keys of ``--dry-run --json``.

    The memory of one GPU, the state of a sequence, tokens a second, hours and GPU hours.
    """
    rows = []
    if study.machine is None or study.machine.gpu is None:
        return rows
    for row, config in {cell.row: cell.config for cell in study.cells}.items():
        rate = speed(config, study)
        hours = config.tokens / rate / 3600 if rate else None
        rows.append({
            "row": row, "gpu_bytes": sum(needed_memory(config, study.scale.resources).values()),
            "state_bytes": sizes(config)["state_bytes"], "tokens_per_second": rate, "hours": hours,
            "gpu_hours": hours and hours * study.scale.resources.gpus,
        })  # fmt: skip
    return rows


def _from_timed_steps(study: StudyRun, todo: Sequence[Cell]) -> tuple[float | None, str]:
    """Time a step of each row's own model: a deep memory takes several times as long as a Transformer."""
    rows = {cell.row: cell.config for cell in todo}
    timed, diverged = dict[str, float](), list[str]()
    began, stride = time.monotonic(), -(-len(rows) // 5)
    # an order in which every prefix is spread over all rows
    for row in (row for first in range(stride) for row in list(rows)[first::stride]):
        try:
            per_token = seconds_per_token(rows[row])
        except Diverged:  # the other rows can still be timed
            diverged.append(row)
            continue
        if not per_token:
            return None, "no cell is finished yet, and a step of its rows is too large to be timed here"
        timed[row] = per_token
        if time.monotonic() - began > TIMING_SECONDS:
            break
    if not timed:
        return None, f"no cell is finished yet, and {', '.join(diverged)} diverged in the steps timed now"
    mean = statistics.fmean(timed.values())
    # a forward pass takes a third of an optimiser step
    each = [timed.get(c.row, mean) * (c.config.tokens + eval_tokens(c.config) / 3) for c in todo]
    names = next(iter(timed)) if len(timed) == 1 else f"{len(timed)} of {len(rows)} rows"
    lost = f"; {', '.join(diverged)} diverged in them" if diverged else ""
    return wall_seconds(each, study.concurrency), f"optimiser steps of {names} timed now{lost}"


def eval_tokens(config: RunConfig) -> float:
    """Estimate the number of evaluation tokens of a run from its config."""
    tasks = [task for column in config.eval.columns.values() for task in column]
    lengths = sum(length for task in tasks for length in task.lengths)
    return config.eval.items * lengths * config.data.sequence_length
