"""A study read from its file, checked whole before anything runs, and the runs it is made of."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from titans_platform.config import RunConfig
from titans_platform.errors import UsageError
from titans_platform.loading import (
    apply_override,
    complete,
    file_at,
    known_files,
    nearest,
    overlay,
    read_yaml,
    validate,
)
from titans_platform.runs.folder import RunFolder
from titans_platform.study.paper import read_paper
from titans_platform.study.spec import Column, Row, Study, pick

UNNAMED = ".unnamed"


@dataclass(frozen=True)
class Cell:
    """One run of the grid; ``name`` is None until its data are prepared."""

    row: str
    seed: int
    config: RunConfig
    name: str | None = None

    def folder(self, root: Path) -> RunFolder:
        """Where the cell lives under a storage root; before it has a name, a folder that is never there."""
        return RunFolder(root, self.name or UNNAMED)


def find_study(name: str) -> Path:
    """The file of a study given by name or by path."""
    if path := file_at(name, "study"):
        return path
    found = known_studies()
    return found[pick(name, found, "study", "sweeps")]


def known_studies() -> dict[str, Path]:
    """Every study that can be given by name, and its file."""
    return known_files("sweeps")


def load_study(name: str) -> Study:
    """Read a study by name or path; UsageError, one line, for anything wrong in it."""
    path = find_study(name)
    study = validate(Study, _read(path), path.name)
    for table in study.paper:
        pick(table, read_paper().tables, "table of the paper", path.name)
    for scale_name, scale in study.scales.items():
        for axis in scale.axes:
            pick(axis, study.axes, f"axis (scale {scale_name})", path.name)
        for row in scale.rows:
            pick(row, (row.name for row in study.rows), f"row (scale {scale_name}, rows)", path.name)
        study.search_at(scale_name)
        _check_rows(study.columns_at(scale_name), study.rows_at(scale_name), path.name)
        if study.search:
            columns = study.columns_at(scale_name)
            pick(study.search.metric, columns, "column (search.metric)", path.name)
    return study


def _read(path: Path, *readers: Path) -> dict[str, Any]:
    """A study file as it is written, or laid over the study it is ``like``."""
    if path in readers:
        raise UsageError(f"{path.name}: like: {readers[0].name} is what this study is made from")
    study = read_yaml(path)
    if "like" not in study:
        return study
    if not isinstance(other := study.pop("like"), str):
        raise UsageError(f"{path.name}: like: should be the name of a study, found {other!r}")
    study = overlay(_read(find_study(other), *readers, path), study)
    scales = study.get("scales")
    if isinstance(scales, dict):  # a scale that the other study has and this one has not is null here
        study["scales"] = {name: scale for name, scale in scales.items() if scale is not None}
    return study


def _check_rows(known: Mapping[str, Column], rows: Sequence[Row], where: str) -> None:
    names = [row.name for row in rows]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"{where}: rows: {twice[0]!r} is there twice; give each row its own name")
    for row in rows:
        for part, columns in (("paper", row.paper), ("expected", row.expected)):
            for column in columns:
                pick(column, known, f"column (row {row.name!r}, {part})", where)


def expand(
    study: Study,
    scale_name: str,
    *,
    rows: Sequence[str] = (),
    seeds: Sequence[int] = (),
    overrides: Sequence[str] = (),
) -> list[Cell]:
    """The cells of a scale, seed by seed so that a whole table of one seed is there first.

    Every row is checked, also those that ``rows`` (see `chosen_rows`) leaves out. ``seeds`` replaces
    the scale's own; ``overrides`` are ``a.b=c`` and come last.
    """
    scale_name = study.scale_name(scale_name)
    scale = study.scales[scale_name]
    listed = study.rows_at(scale_name)
    configs = {row.name: resolve(study, scale_name, row, overrides) for row in listed}
    _check_columns(study, scale_name, [(row, configs[row.name]) for row in listed])
    chosen = chosen_rows(rows, listed, study.name) or set(configs)
    ordered = [row for row in configs if row in chosen]
    return [
        Cell(row, seed, configs[row].model_copy(update={"seed": seed}))
        for seed in dict.fromkeys(seeds or scale.seeds)
        for row in ordered
    ]


def _check_columns(study: Study, scale_name: str, configs: Iterable[tuple[Row, RunConfig]]) -> None:
    """Every line of the table measures every column, in one run or in several."""
    measured: dict[str, set[str]] = {}
    for row, config in configs:
        measured.setdefault(row.as_line().name, set()).update(config.eval.columns)
    for line, columns in measured.items():
        for column in study.columns_at(scale_name):
            if column not in columns:
                where = f"{study.name}, row {line!r}"
                raise UsageError(f"{where}: eval.columns.{column}: the table has this column; list its tasks")


def chosen_rows(asked: Iterable[str], rows: Sequence[Row], where: str) -> set[str]:
    """The rows that are asked for: by name, by the name of their line, or by a pattern with ``*``.

    One text may have several with commas between them; a name may hold commas itself, and capitals do not
    count. Raises UsageError where one means no row.
    """
    named: dict[str, set[str]] = {}
    for row in rows:
        for name in (row.name, row.as_line().name):
            named.setdefault(name, set()).add(row.name)
    names = [name for text in asked for name in _names(text, {name.casefold() for name in named})]
    return {row for name in names for known in _matching(name, list(named), where) for row in named[known]}


def _names(text: str, known: Collection[str]) -> Iterator[str]:
    """The parts between commas, as many of them together as make a known name."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    while parts:
        sizes = range(len(parts), 1, -1)
        size = next((n for n in sizes if ", ".join(parts[:n]).casefold() in known), 1)
        yield ", ".join(parts[:size])
        parts = parts[size:]


def _matching(name: str, known: list[str], where: str) -> list[str]:
    if not any(sign in name for sign in "*?["):
        return [pick(name, known, "row", where)]
    found = [row for row in known if fnmatchcase(row.casefold(), name.casefold())]
    if not found:
        raise UsageError(f"{where}: no row matches {name!r}; {nearest(name.strip('*'), known)}")
    return found


def resolve(study: Study, scale_name: str, row: Row, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of a row at a scale, every key and shape checked. Raises UsageError."""
    where = f"{study.name}, scale {scale_name}, row {row.name!r}"
    fragment: dict[str, Any] = {}
    try:
        for layer in (study.base, study.scales[scale_name].fragment(), row.set):
            fragment = _lay(fragment, layer)
        for override in overrides:
            apply_override(fragment, override)
        config = validate(RunConfig, complete(fragment))
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    return config


def _lay(below: dict[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """One more layer; a ``model.preset`` in it replaces the whole model below."""
    layer = overlay({}, layer)
    model = layer.get("model")
    if isinstance(model, dict) and "preset" in model:
        below = {key: value for key, value in below.items() if key != "model"}
    return overlay(below, layer)
