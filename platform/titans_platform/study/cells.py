"""The cells of a study: which there are, whether they can run, and their names once data are prepared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from titans_platform.config import RunConfig, digest
from titans_platform.errors import UsageError
from titans_platform.files import read_json
from titans_platform.objectives import Data, build_objective
from titans_platform.provenance import commit
from titans_platform.runs.check import check_batch, check_resources, check_start
from titans_platform.runs.cost import sizes
from titans_platform.runs.folder import RunFolder
from titans_platform.runs.load import located
from titans_platform.study.grid import Cell, expand, load_study
from titans_platform.study.plan import StudyRun
from titans_platform.study.schedule import MANIFEST
from titans_platform.study.search import check_space, read_search, with_found


def open_study(
    study: str,
    scale: str,
    root: Path,
    *,
    rows: Sequence[str] = (),
    seeds: Sequence[int] = (),
    overrides: Sequence[str] = (),
) -> StudyRun:
    """Read and check a study; cells get their names where the data are prepared already."""
    found = load_study(study)
    run = StudyRun(found, found.scale_name(scale), root.resolve(), commit(), tuple(overrides))
    if search := read_search(run):
        for config in check_space(run, search.search):
            sizes(config)
        # until it is over, the best may yet be another
        run = with_found(run, search) if search.over else run
    cells = expand(run.study, scale, rows=rows, seeds=seeds, overrides=overrides)
    whole = expand(run.study, scale, overrides=overrides)
    check(whole)
    keyed = {(cell.row, cell.seed): cell for cell in (*_begun(run, whole), *cells)}
    own = {(cell.row, cell.seed) for cell in whole}
    whole += [cell for key, cell in keyed.items() if key not in own]
    return named(replace(run, cells=tuple(cells), whole=tuple(whole)))


def _begun(run: StudyRun, whole: Sequence[Cell]) -> list[Cell]:
    """Cells of other seeds that earlier runs were asked for and that have left something."""
    configs = {cell.row: cell.config for cell in whole}
    manifest = read_json(run.folder / MANIFEST) or {"cells": []}
    return [
        Cell(entry["row"], entry["seed"], configs[entry["row"]].model_copy(update={"seed": entry["seed"]}))
        for entry in manifest["cells"]
        if entry["row"] in configs
        and entry["cell"]
        # under this name or an older one: its number was wanted
        and RunFolder(run.root, entry["cell"]).state() != "missing"
    ]


def check(cells: Iterable[Cell]) -> None:
    """Find a wrong variant, task or option before anything runs. Raises UsageError."""
    _each_row(cells, lambda config: build_objective(config).check())


def check_dry(run: StudyRun) -> None:
    """What a run would find out later, as far as it can be seen without data. Raises UsageError."""
    unnamed = [cell for cell in run.cells if not cell.name]
    _each_row(unnamed, lambda config: build_objective(config).check_sources())
    _each_row(run.cells, lambda config: check_resources(config, run.resources))


def check_against_data(run: StudyRun) -> None:
    """What a cell would find out on a worker, found before any is begun. Raises UsageError."""

    def whole(config: RunConfig) -> None:
        check_batch(config, run.resources)
        check_start(config)
        objective = build_objective(config)
        objective.check(objective.open(run.root))

    _each_row(run.cells, whole)


def _each_row(cells: Iterable[Cell], look: Callable[[RunConfig], None]) -> None:
    for row, config in {cell.row: cell.config for cell in cells}.items():
        try:
            look(config)
        except UsageError as error:
            raise UsageError(f"row {row!r}: {error}") from None


Prepare = Callable[[RunConfig], Data]


def named(run: StudyRun, prepare: Prepare | None = None) -> StudyRun:
    """Names for the cells asked for, by ``prepare``, and for all whose data are there."""

    at_hand = _once(lambda config: build_objective(config).open(run.root))
    cells = _with_names(run, run.cells, _once(prepare) if prepare else at_hand)
    return replace(run, cells=cells, whole=_with_names(run, run.whole, at_hand))


def _once(prepare: Prepare) -> Prepare:
    """Call ``prepare`` once for configs of equal data."""
    known: dict[str, Data] = {}

    def data(config: RunConfig) -> Data:
        key = digest([config.data.model_dump(mode="json"), config.objective.model_dump(mode="json")])
        if key not in known:
            known[key] = prepare(config)
        return known[key]

    return data


def _with_names(run: StudyRun, cells: Iterable[Cell], data: Prepare) -> tuple[Cell, ...]:
    from titans_platform.data import NotPrepared

    starts: dict[str | None, str | None] = {}
    named = []
    for cell in cells:
        with suppress(NotPrepared):
            fingerprint, given = data(cell.config).fingerprint, cell.config.start_from
            if given not in starts:
                # a checkpoint is hashed to be found, so once
                starts[given] = located(cell.config, run.root).start_from
            config = cell.config.model_copy(update={"start_from": starts[given]})
            name = build_objective(config).run_name(fingerprint, run.resources.named)
            cell = replace(cell, config=config, name=name)
        named.append(cell)
    return tuple(named)
