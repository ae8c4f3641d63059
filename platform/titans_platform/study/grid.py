"""A study read from its file and checked, and its grid of cells."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from titans_platform.config import NOT_IN_NAMES, RunConfig, digest
from titans_platform.errors import UsageError, within
from titans_platform.files import file_lock, read_json, write_json
from titans_platform.loading import (
    config_from,
    file_at,
    known_files,
    nearest,
    overlay,
    read_yaml,
    validate,
)
from titans_platform.runs.folder import Result, RunFolder
from titans_platform.runs.spec import Machine, Tracking
from titans_platform.study.search import FOUND, TRIALS, SearchState
from titans_platform.study.spec import Column, Row, Scale, Study, pick, read_paper
from titans_platform.text import flatten

STUDIES = "studies"
"""Folder under the root with a folder for each study."""
RECORD, LOCK = "cells.json", "lock"
EXPERIMENT = "study.yaml"
"""The study of an experiment: `experiments/NAME/study.yaml`, whose name is NAME."""
UNNAMED = ".unnamed"
"""Name of a run's folder that never exists."""


@dataclass(frozen=True)
class Cell:
    """One row with one seed; ``name`` is None until its data are prepared."""

    row: str
    seed: int
    config: RunConfig
    name: str | None = None
    data: str = ""
    """Fingerprint of the data that the name was computed from."""

    def folder(self, root: Path) -> RunFolder:
        """Return the run's folder under a storage root; for a cell without a name, one that never exists."""
        return RunFolder(root, self.name or UNNAMED)


@dataclass(frozen=True)
class StudyRun:
    """One study at one scale under one storage root: its cells, and how they are run.

    `plan.open_study` makes it, `plan.place` adds the concurrency. Its folder, ``root/studies/<label>``, holds
    ``cells.json``, ``search.json``, logs and the report.
    """

    study: Study
    scale_name: str
    root: Path
    commit: str
    overrides: tuple[str, ...] = ()
    """``--set``: they change every row, so the study has a folder and a table of its own."""
    cells: tuple[Cell, ...] = ()
    """The requested cells."""
    whole: tuple[Cell, ...] = ()
    """All cells of the table: the scale's, the requested ones, and started ones of other seeds."""
    search: SearchState | None = None
    """The search and its trials when the study was opened; None for a study without one."""
    machine: Machine | None = None
    """The machine of its cells, once they are placed."""
    concurrency: int = 0
    """Concurrent cells; 0 before they are placed."""
    rerun_stale: bool = False
    tracking: Tracking | None = None
    """Its run in MLflow, the parent of the cells' runs, while it is open."""

    @property
    def label(self) -> str:
        """The name of its folder and of its parent run in MLflow."""
        # the checkpoint interval does not affect the numbers
        changes = sorted(change for change in self.overrides if not change.startswith("checkpoint."))
        changed = f"-set-{digest(changes, 6)}" if changes else ""
        return f"{self.study.name}-{self.scale_name}{changed}"

    @property
    def path(self) -> Path:
        """Its folder, which need not exist."""
        return self.root / STUDIES / self.label

    @property
    def scale(self) -> Scale:
        """Its scale in the study's file."""
        return self.study.scales[self.scale_name]

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of its table."""
        return self.study.rows_at(self.scale_name)

    @property
    def columns(self) -> dict[str, Column]:
        """The columns of its table."""
        return self.study.columns_at(self.scale_name)

    @property
    def varied(self) -> tuple[str, ...]:
        """Fields of the config that its rows and trials set."""
        sets = [*(row.set for row in self.rows), self.search.search.space if self.search else {}]
        return tuple(dict.fromkeys(field for fields in sets for field in flatten(fields)))

    @cached_property
    def results(self) -> list[tuple[Cell, Result | None]]:
        """The requested cells with their results, read once."""
        return [(cell, cell.folder(self.root).result()) for cell in self.cells]

    @property
    def stale(self) -> list[Cell]:
        """Finished cells of another commit."""
        return [cell for cell, result in self.results if result and result.commit != self.commit]

    @property
    def todo(self) -> list[Cell]:
        """The cells to run: those without a result, with ``rerun_stale`` also the stale ones."""
        again = self.stale if self.rerun_stale else []
        return [cell for cell, result in self.results if result is None or cell in again]

    @property
    def restarts(self) -> list[str]:
        """A line for each interrupted cell that restarts from step 0 instead of resuming."""
        reasons = ((cell, cell.folder(self.root).why_restarted(self.commit)) for cell in self.todo)
        return [f"{cell.row} seed {cell.seed} {reason}" for cell, reason in reasons if reason]

    @property
    def searching(self) -> bool:
        """True if the search must be run or resumed before the cells."""
        return self.search is not None and not self.search.over

    def config(self, row: Row) -> RunConfig:
        """Return the config of a row, which need not be one of the table's. Raises UsageError."""
        return resolve(self.study, self.scale_name, row, self.overrides)

    def with_search(self) -> StudyRun:
        """Load the state of the study's search, if it has one. Raises UsageError."""
        if (search := self.study.search_at(self.scale_name)) is None:
            return self
        # they import pyarrow
        from titans_platform.data import NotPrepared
        from titans_platform.objectives import build_objective

        config, higher = self.config(self.rows[0]), self.columns[search.metric].higher_is_better
        try:
            data = build_objective(config).open(self.root).fingerprint
        except NotPrepared:
            # its trials are still shown; `prepare` loads the state again
            data = (read_json(self.path / "search.json") or {}).get("data")
        run = config.model_dump(mode="json", exclude_defaults=True, exclude=NOT_IN_NAMES)
        key = digest([run, data, search.model_dump(mode="json", exclude={"trials"})])
        state = SearchState(self.path, search, higher, config.tokens_per_step, config.optim.steps, key, data)
        return replace(self, search=state.read())

    def with_found(self) -> StudyRun:
        """Add the best trial so far as the last row, and its cells with the seeds of the others.

        Without a finished trial, returns the same study. Raises UsageError.
        """
        if self.search is None or (best := self.search.best) is None:
            return self
        row = self.trial_row(best.params)
        rows = [known for known in self.study.rows if known.name != FOUND]
        config, seeds = self.config(row), dict.fromkeys(cell.seed for cell in self.cells)
        new = tuple(Cell(FOUND, seed, self.scale.seeded(config, seed)) for seed in seeds)
        file = self.study.model_copy(update={"rows": (*rows, row)})
        cells, whole = (tuple(c for c in each if c.row != FOUND) + new for each in (self.cells, self.whole))
        return replace(self, study=file, cells=cells, whole=whole)

    def trial_row(self, params: Mapping[str, Any]) -> Row:
        """Return the study's first row, overridden by a trial's parameters."""
        return Row(name=FOUND, set=overlay(self.rows[0].set, params))

    def trial_config(self, params: Mapping[str, Any]) -> RunConfig:
        """Return the config of a trial, with the seed of the search. Raises UsageError."""
        assert self.search
        return self.config(self.trial_row(params)).model_copy(update={"seed": self.search.search.seed})

    def folders(self) -> list[RunFolder]:
        """Return the folders of the recorded cells that have a name, and of the trials."""
        cells = (read_json(self.path / RECORD) or {}).get("cells", [])
        names = [cell["cell"] for cell in cells if cell["cell"]]
        names += [path.stem for path in self.path.glob(f"{TRIALS}/*/*.json")]
        return [RunFolder(self.root, name) for name in names]

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the study's lock, which is released when the process dies. Raises UsageError."""
        # longer than `sweep status` holds it to see whether it is taken
        with file_lock(self.path / LOCK, timeout=2) as got:
            if not got:
                busy = f"another sweep run works on this study under {self.root}"
                raise UsageError(f"{self.label}: {busy}; wait for it, or look at titans sweep status")
            yield

    def write(self) -> None:
        """Write ``cells.json`` and ``search.json`` for status and reports."""
        cells = [
            {"cell": c.name, "row": c.row, "seed": c.seed, "config": c.config.model_dump(mode="json")}
            for c in self.whole
        ]
        record = {
            "study": self.study.model_dump(mode="json"), "scale": self.scale_name, "set": self.overrides,
            "commit": self.commit, "host": platform.node(), "mlflow": os.environ.get("TITANS_MLFLOW"),
            "cells": cells,
        }  # fmt: skip
        write_json(self.path / RECORD, record)
        if self.search:
            write_json(self.path / "search.json", self.search.record())


def find_study(name: str) -> Path:
    """Find the file of a study, by name, path, or the folder of an experiment. Raises UsageError."""
    if (folder := Path(name)).is_dir() and os.sep in name:
        if not (folder / EXPERIMENT).is_file():
            raise UsageError(f"study: {name} is a folder without {EXPERIMENT}")
        return folder / EXPERIMENT
    if path := file_at(name, "study"):
        return path
    studies = known_studies()
    return studies[pick(name, studies, "study", "sweeps")]


def known_studies() -> dict[str, Path]:
    """Files of the studies that can be given by name: of sweeps/, then of the working tree's experiments/."""
    studies = known_files("sweeps")
    own = known_files("experiments", f"*/{EXPERIMENT}")
    return studies | {name: path for name, path in own.items() if name not in studies}


def place_of(study: Path) -> Path:
    """Return the relative path at which a study's file is found by its name."""
    own = study.name == EXPERIMENT
    return Path("experiments", study.parent.name, EXPERIMENT) if own else Path("sweeps", f"{study.stem}.yaml")


def load_study(name: str) -> Study:
    """Read and check a study by name or path. Raises UsageError."""
    path = find_study(name)
    where = f"{path.parent.name}/{path.name}" if path.name == EXPERIMENT else path.name
    study = validate(Study, _read(path), where)
    for table in study.paper:
        _require(table, read_paper().tables, "table of the paper", where)
    for scale_name, scale in study.scales.items():
        for axis in scale.axes:
            _require(axis, study.axes, f"axis (scale {scale_name})", where)
        for row in scale.rows:
            _require(row, [row.name for row in study.rows], f"row (scale {scale_name}, rows)", where)
        with within(f"{where}: scale {scale_name}"):
            _ = scale.machine
        columns = study.columns_at(scale_name)
        _check_rows(columns, study.rows_at(scale_name), where)
        if search := study.search_at(scale_name):
            _require(search.metric, columns, f"column (scale {scale_name}, search.metric)", where)
    return study


def _require(name: str, known: Collection[str], kind: str, where: str) -> None:
    """Check a name in a study file, where case counts. Raises UsageError with the nearest one."""
    if name not in known:
        raise UsageError(f"{where}: no {kind} {name!r}; {nearest(name, known)}")


def _read(path: Path, *readers: Path) -> dict[str, Any]:
    """Read a study file, merged over the study that it is ``like``."""
    if path in readers:
        raise UsageError(f"{path.name}: like: circular reference {' -> '.join(map(str, (*readers, path)))}")
    if "like" not in (study := read_yaml(path)):
        return study
    if not isinstance(other := study.pop("like"), str):
        raise UsageError(f"{path.name}: like: {other!r} should be the name of a study")
    below = _read(find_study(other), *readers, path)
    if isinstance(rows := study.get("rows"), list):  # the other study's scales may set rows that are not here
        names = [row.get("name") for row in rows if isinstance(row, dict)]
        scales = below.get("scales")
        for scale in scales.values() if isinstance(scales, dict) else ():
            if isinstance(scale, dict) and isinstance(given := scale.get("rows"), dict):
                scale["rows"] = {name: fields for name, fields in given.items() if name in names}
    study = overlay(below, study)
    if isinstance(scales := study.get("scales"), dict):  # null removes a scale of the other study
        study["scales"] = {name: scale for name, scale in scales.items() if scale is not None}
    return study


def _check_rows(known: Mapping[str, Column], rows: Sequence[Row], where: str) -> None:
    if twice := sorted(name for name, n in Counter(row.name for row in rows).items() if n > 1):
        raise UsageError(f"{where}: rows: {twice[0]!r} is listed twice; give each row its own name")
    for row in rows:
        for part, columns in (("paper", row.paper), ("expected", row.expected)):
            for column in columns:
                _require(column, known, f"column (row {row.name!r}, {part})", where)


def expand(
    study: Study, scale_name: str, *, rows: Sequence[str] = (), seeds: Sequence[int] = (),
    overrides: Sequence[str] = (),
) -> list[Cell]:  # fmt: skip
    """Return the cells of a scale, seed by seed, so that the table of one seed is complete first.

    Every row is checked, also if ``rows`` (see `chosen_rows`) leaves it out. ``seeds`` replace the
    scale's; ``overrides`` (``a.b=c``) come last. Raises UsageError.
    """
    scale_name = study.scale_name(scale_name)
    scale, listed = study.scales[scale_name], study.rows_at(scale_name)
    configs = {row.name: resolve(study, scale_name, row, overrides) for row in listed}
    _check_columns(study, scale_name, [(row, configs[row.name]) for row in listed])
    return chosen_cells(scale, configs, chosen_rows(rows, listed, study.name), seeds)


def chosen_cells(
    scale: Scale, configs: Mapping[str, RunConfig], rows: Collection[str], seeds: Sequence[int]
) -> list[Cell]:
    """Cells of ``configs`` by row, seed by seed; empty ``rows`` means all, empty ``seeds`` the scale's."""
    return [
        Cell(row, seed, scale.seeded(config, seed))
        for seed in dict.fromkeys(seeds or scale.seeds)
        for row, config in configs.items()
        if not rows or row in rows
    ]


def _check_columns(study: Study, scale_name: str, configs: Iterable[tuple[Row, RunConfig]]) -> None:
    """Check that every line of the table has every column, from one run or several. Raises UsageError."""
    measured: dict[str, set[str]] = {}
    for row, config in configs:
        measured.setdefault(row.as_line().name, set()).update(config.eval.columns)
    for line, columns in measured.items():
        if missing := next((name for name in study.columns_at(scale_name) if name not in columns), None):
            where = f"{study.name}, row {line!r}: eval.columns.{missing}"
            raise UsageError(f"{where}: missing; list the tasks of this column")


def chosen_rows(requested: Iterable[str], rows: Sequence[Row], where: str) -> set[str]:
    """Return the names of the requested rows: by name, by the name of a line or in the file, or by pattern.

    One text may list several, separated by commas; a name may contain commas itself. Case is ignored. Raises
    UsageError for a name or pattern that matches no row.
    """
    full_names = [row.name for row in rows]
    named = {name: {name} for name in full_names}
    for row in rows:
        # a full name selects one row, also if a line has the same name
        for group in sorted({row.line, row.listed} - {"", *full_names}):
            named.setdefault(group, set()).add(row.name)
    asked = [name for text in requested for name in _names(text, {name.casefold() for name in named})]
    return {row for name in asked for key in _matching(name, named, full_names, where) for row in named[key]}


def _names(text: str, known: Collection[str]) -> Iterator[str]:
    """Split at commas, but keep a known name that contains commas together."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    while parts:
        longest_first = range(len(parts), 1, -1)
        size = next((n for n in longest_first if ", ".join(parts[:n]).casefold() in known), 1)
        yield ", ".join(parts[:size])
        parts = parts[size:]


def _matching(name: str, known: Collection[str], rows: Sequence[str], where: str) -> list[str]:
    """Return the known name, or the names in ``rows`` that the pattern matches. Raises UsageError."""
    if not any(sign in name for sign in "*?[") or name.casefold() in map(str.casefold, known):
        return [pick(name, known, "row", where)]
    if not (matching := [row for row in rows if fnmatchcase(row.casefold(), name.casefold())]):
        raise UsageError(f"{where}: no row matches {name!r}; {nearest(name.strip('*'), known)}")
    return matching


def resolve(study: Study, scale_name: str, row: Row, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the config of a row at a scale, validated. Raises UsageError."""
    fragment: dict[str, Any] = {}
    with within(f"{study.name}, scale {scale_name}, row {row.name!r}", sep=": "):
        for layer in (study.base, study.scales[scale_name].fragment(), row.set):
            layer = overlay({}, layer)
            if isinstance(model := layer.get("model"), dict) and "preset" in model:
                # a preset replaces the whole model below
                fragment.pop("model", None)
            fragment = overlay(fragment, layer)
        return config_from(fragment, overrides)
