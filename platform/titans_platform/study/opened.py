"""A study at a scale, read and checked whole, its cells named as far as their data are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from titans_platform.config import RunConfig, check_model
from titans_platform.errors import UsageError, within
from titans_platform.files import read_json
from titans_platform.runs.folder import RunFolder
from titans_platform.study.run import MANIFEST, StudyRun, naming
from titans_platform.study.search import FOUND, Searched, check_space, read_search, trial_row
from titans_platform.study.space import Search
from titans_platform.study.spec import Cell, expand, load_study


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
        check_model(config.model)


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


def check(cells: Sequence[Cell]) -> None:
    """Find a wrong variant, task or option before anything runs."""
    for row, config in {cell.row: cell.config for cell in cells}.items():
        try:
            check_model(config.model)
            _check_tasks(config)
        except UsageError as error:
            raise UsageError(f"row {row!r}: {error}") from None


def _check_tasks(config: RunConfig) -> None:
    from titans_platform.evals import build_generated, build_task

    for column, tasks in config.eval.columns.items():
        for i, task in enumerate(tasks):
            with within(f"eval.columns.{column}.{i}"):
                build_task(task)
    for i, source in enumerate(config.data.sources):
        for j, task in enumerate(source.tasks):
            with within(f"data.sources.{i}.tasks.{j}"):
                build_generated(task)


def named(opened: Opened, prepared: Any = None) -> Opened:
    """Names for the cells asked for, by ``prepared``, and for all whose data are there."""
    from titans_platform.data import open_prepared

    at_hand = naming(lambda data: open_prepared(data, opened.run.root))
    asked = naming(prepared) if prepared else at_hand
    return replace(opened, cells=_with_names(opened.cells, asked), whole=_with_names(opened.whole, at_hand))


def _with_names(cells: Iterable[Cell], name: Callable[[RunConfig], str]) -> tuple[Cell, ...]:
    from titans_platform.data import NotPrepared

    named = []
    for cell in cells:
        with suppress(NotPrepared):
            cell = replace(cell, name=name(cell.config))
        named.append(cell)
    return tuple(named)
