"""A study at a scale, read and checked whole, its cells named as far as their data are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from titans_platform.config import RunConfig, digest
from titans_platform.errors import UsageError
from titans_platform.files import read_json
from titans_platform.objectives import Data, build_objective
from titans_platform.runs.check import (
    check_batch,
    check_config,
    check_data,
    check_resources,
    check_sources,
    parameters,
    run_name,
)
from titans_platform.runs.folder import RunFolder
from titans_platform.study.schedule import MANIFEST, StudyRun
from titans_platform.study.search import Searched, check_space, read_search
from titans_platform.study.space import Search
from titans_platform.study.spec import Cell, expand, load_study
from titans_platform.study.trial import FOUND, trial_row


@dataclass(frozen=True)
class Opened:
    """A study at a scale with the cells asked for, every config and task checked."""

    run: StudyRun
    cells: tuple[Cell, ...]
    whole: tuple[Cell, ...]
    """All cells of the table: the scale's own, those asked for, and those of other seeds that have begun."""

    @property
    def is_named(self) -> bool:
        """Whether the data are prepared, so that cells have names."""
        return all(cell.name for cell in self.cells)


def open_study(
    study: str,
    scale: str,
    root: Path,
    *,
    rows: Sequence[str] = (),
    seeds: Sequence[int] = (),
    overrides: Sequence[str] = (),
) -> Opened:
    """Read and check a study; cells get their names where the data are prepared already."""
    from titans_platform.provenance import commit

    found = load_study(study)
    run = StudyRun(found, found.scale_name(scale), root.resolve(), commit(), tuple(overrides))
    search = read_search(run)
    if search:
        _check_search(run, search.search)
        # until it is over, the best may yet be another
        run = with_found(run, search) if search.over else run
    found = run.study
    cells = expand(found, scale, rows=rows, seeds=seeds, overrides=overrides)
    whole = expand(found, scale, overrides=overrides)
    check(whole)
    others = {**_keyed(_begun(run, whole)), **_keyed(cells)}
    whole += [cell for key, cell in others.items() if key not in _keyed(whole)]
    return named(Opened(run, tuple(cells), tuple(whole)))


def _check_search(run: StudyRun, search: Search) -> None:
    for config in check_space(run, search):
        parameters(config)


def with_found(run: StudyRun, searched: Searched) -> StudyRun:
    """The study with the best trial as a row, where there is one yet."""
    if (best := searched.best) is None:
        return run
    rows = [row for row in run.study.rows if row.name != FOUND]
    study = run.study.model_copy(update={"rows": (*rows, trial_row(run, best.params))})
    return replace(run, study=study)


def _keyed(cells: Iterable[Cell]) -> dict[tuple[str, int], Cell]:
    return {(cell.row, cell.seed): cell for cell in cells}


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
    _each_row(cells, check_config)


def check_dry(opened: Opened) -> None:
    """What a run would find out later, as far as it can be seen without data. Raises UsageError."""
    _each_row([cell for cell in opened.cells if not cell.name], check_sources)
    _each_row(opened.cells, lambda config: check_resources(config, opened.run.resources))


def check_against_data(opened: Opened) -> None:
    """What a cell would find out on a worker, found before any is begun. Raises UsageError."""

    def whole(config: RunConfig) -> None:
        check_batch(config, opened.run.resources)
        check_data(config, build_objective(config).open(opened.run.root))

    _each_row(opened.cells, whole)


def _each_row(cells: Iterable[Cell], look: Callable[[RunConfig], None]) -> None:
    for row, config in {cell.row: cell.config for cell in cells}.items():
        try:
            look(config)
        except UsageError as error:
            raise UsageError(f"row {row!r}: {error}") from None


Prepare = Callable[[RunConfig], Data]


def named(opened: Opened, prepare: Prepare | None = None) -> Opened:
    """Names for the cells asked for, by ``prepare``, and for all whose data are there."""
    at_hand = _naming(opened.run, lambda config: build_objective(config).open(opened.run.root))
    chosen = _naming(opened.run, prepare) if prepare else at_hand
    return replace(opened, cells=_with_names(opened.cells, chosen), whole=_with_names(opened.whole, at_hand))


def _naming(run: StudyRun, prepare: Prepare) -> Callable[[RunConfig], str]:
    """Names of cells, the data of equal configs prepared (or opened) once."""
    known: dict[str, Data] = {}

    def name(config: RunConfig) -> str:
        key = digest([config.data.model_dump(mode="json"), config.objective.model_dump(mode="json")])
        if key not in known:
            known[key] = prepare(config)
        return run_name(config, known[key].fingerprint, run.resources)

    return name


def _with_names(cells: Iterable[Cell], name: Callable[[RunConfig], str]) -> tuple[Cell, ...]:
    from titans_platform.data import NotPrepared

    named = []
    for cell in cells:
        with suppress(NotPrepared):
            cell = replace(cell, name=name(cell.config))
        named.append(cell)
    return tuple(named)
