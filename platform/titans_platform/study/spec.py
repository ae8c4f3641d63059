"""The schema of a study file: a grid of runs; and the paper's numbers. `study.grid` expands a file to cells.

The config of a run is ``base``, overridden by the scale, then by the row's ``set``, then by ``--set``. A
study that is ``like`` another overrides that study's file: mappings key by key, lists whole. Rows are listed
(``rows``), or the product of ``axes``, or both: every listed row at every point of the axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, JsonValue, model_validator

from titans_core.config import Frozen, PositiveInt
from titans_platform.config import RunConfig
from titans_platform.errors import UsageError
from titans_platform.loading import nearest, overlay, read_yaml, validate
from titans_platform.runs.spec import Machine, Resources

Fragment = dict[str, JsonValue]
ONE_LINE = BeforeValidator(lambda text: " ".join(text.split()) if isinstance(text, str) else text)
"""A text is folded to one line."""
MAX_CORNERS = 512
"""Corners of a search space that are all checked."""


class Axis(Frozen):
    """One axis of a grid: a field and its values, or named points, each with all fields that it sets."""

    title: str = ""
    field: str = ""
    """The field that takes ``values``, e.g. model.memory.depth."""
    values: tuple[JsonValue, ...] = ()
    points: dict[str, Fragment] = Field(default_factory=dict)
    """Instead of field and values: names, and the fields that each sets."""
    label: str = "{}"
    """Format of a value in a row's name: `depth {}`."""
    across: bool = False
    """The values share one line of the table: each is a run of its own that measures its own columns."""

    @model_validator(mode="after")
    def _one_way(self) -> Axis:
        if bool(self.field) != bool(self.values) or bool(self.field) == bool(self.points):
            raise ValueError("field: give either a field with values, or points")
        if "{}" not in self.label:
            raise ValueError(f"label: {self.label!r} needs {{}} for the value")
        return self

    def steps(self) -> list[tuple[JsonValue, Fragment]]:
        """Return each value with the fields it sets; a point named by a number has that number as value."""
        if self.points:
            whole = {name: name.removeprefix("-").isdecimal() for name in self.points}
            return [(int(name) if whole[name] else name, fields) for name, fields in self.points.items()]
        return [(value, {self.field: value}) for value in self.values]


class Parameter(Frozen):
    """The range of a searched field: from low to high, or one of several choices."""

    low: float | None = None
    high: float | None = None
    log: bool = False
    """Log-uniform in place of uniform."""
    choices: tuple[bool | int | float | str | None, ...] = ()

    @model_validator(mode="after")
    def _one_way(self) -> Parameter:
        if self.choices:
            if self.low is not None or self.high is not None:
                raise ValueError("choices: give either choices, or low and high")
            return self
        if self.low is None or self.high is None:
            raise ValueError("low: a parameter needs low and high, or choices")
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError(f"low: {self.low:g} should be below high: {self.high:g}, and above 0 with log")
        return self

    def ends(self) -> tuple[Any, ...]:
        """Return the values that a check of the search space needs."""
        return self.choices or (self.low, self.high)


class Search(Frozen):
    """A hyperparameter search: Optuna proposes trials, ASHA stops most of them early."""

    metric: str
    """The column to optimise; measured at every rung."""
    trials: PositiveInt = 16
    seed: int = 1000
    """Seed of the sampler and of the trials; different from the seeds of the table's rows."""
    reduction: Annotated[int, Field(ge=2)] = 3
    """ASHA's reduction factor r: one trial in r is promoted, and trained for r times the steps."""
    rungs: PositiveInt = 3
    """Number of rungs, the last step included."""
    space: Annotated[dict[str, Parameter], Field(min_length=1)]

    @model_validator(mode="after")
    def _trainable(self) -> Search:
        fixed = [key for key in self.space if key.partition(".")[0] in ("data", "eval", "seed", "threads")]
        if fixed or "optim.steps" in self.space or "optim.global_batch_size" in self.space:
            key = fixed[0] if fixed else "optim.steps and optim.global_batch_size"
            raise ValueError(f"space: {key} cannot be searched: trials are compared at equal data and tokens")
        return self

    def milestones(self, steps: int) -> list[int]:
        """Return the optimiser steps of the rungs, as ASHA counts them, and the last step."""
        first = max(1, steps // self.reduction ** (self.rungs - 1))
        rungs = [first * self.reduction**i for i in range(self.rungs - 1)]
        return [rung for rung in rungs if rung < steps] + [steps]

    def corners(self) -> Iterator[dict[str, Any]]:
        """Parameters at the corners of the space, of a large one at each boundary alone."""
        ends = {key: parameter.ends() for key, parameter in self.space.items()}
        if math.prod(map(len, ends.values())) <= MAX_CORNERS:
            yield from (dict(zip(ends, point, strict=True)) for point in product(*ends.values()))
            return
        first = {key: values[0] for key, values in ends.items()}
        yield from (first | {key: value} for key, values in ends.items() for value in values)


class Column(Frozen):
    """Display of a column, and its direction: higher or lower is better."""

    title: str
    unit: str = ""
    factor: float = 1.0
    """Multiplies a measured value for display: 100 for percent."""
    higher_is_better: bool = True
    decimals: Annotated[int, Field(ge=0)] = 1
    paper: tuple[str, ...] = ()
    """Columns of the paper's tables whose mean is shown beside it; empty: the column of the same name."""

    def titled(self, name: str = "") -> str:
        """Return the title, or ``name``, with the unit."""
        return f"{name or self.title} ({self.unit})" if self.unit else name or self.title

    @property
    def arrow(self) -> str:
        """An arrow in the direction that is better."""
        return "↑" if self.higher_is_better else "↓"

    @property
    def better(self) -> str:
        """The direction that is better, in words."""
        return "higher is better" if self.higher_is_better else "lower is better"

    @property
    def heading(self) -> str:
        """The title with the unit and the direction that is better."""
        return f"{self.titled()} {self.arrow}"


class Scale(Frozen):
    """One size of the study: a RunConfig fragment, the seeds, the resources."""

    about: Annotated[str, ONE_LINE] = ""
    comparable: bool = False
    """True if the columns measure the same as the paper's; if not, the table says so."""
    note: Annotated[str, ONE_LINE] = ""
    """A description of the columns at this scale, printed below the table."""
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (0,)
    resources: Resources = Resources()
    gpus: str = ""
    """The GPUs that the scale is meant for, e.g. 8xH100: a dry run elsewhere plans for them."""
    model: Fragment = Field(default_factory=dict)
    data: Fragment = Field(default_factory=dict)
    optim: Fragment = Field(default_factory=dict)
    eval: Fragment = Field(default_factory=dict)
    checkpoint: Fragment = Field(default_factory=dict)
    objective: Fragment = Field(default_factory=dict)
    threads: PositiveInt = 1
    draws_data: bool = False
    """True: a seed draws training and held-out documents and the tasks' items too, so data are prepared for
    each; False: it draws the model and the order of rows."""
    tuned: str = ""
    """The study that chose each row's learning rate, on other seeds; rows at different rates are compared."""
    paper: str = ""
    """The size in the paper's tables to compare with; empty: the one named like the scale."""
    columns: dict[str, Column] = Field(default_factory=dict)
    """The columns at this scale, if they differ from the study's."""
    rows: dict[str, Fragment | None] = Field(default_factory=dict)
    """Further settings of rows at this scale, by name; a row that is null is left out."""
    axes: dict[str, Axis] = Field(default_factory=dict)
    """Axes that differ from the study's at this scale."""
    search: Fragment = Field(default_factory=dict)
    """Overrides of the study's search at this scale; its space is merged parameter by parameter."""

    @property
    def machine(self) -> Machine | None:
        """The cluster that the scale is meant for; without ``gpus`` None. Raises UsageError."""
        return Machine.described(self.gpus, "gpus") if self.gpus else None

    def fragment(self) -> dict[str, Any]:
        """Return the fields of a RunConfig that this scale overrides."""
        names = {"model", "data", "optim", "eval", "objective", "checkpoint", "threads"}
        return {key: value for key, value in self.model_dump(include=names).items() if value}

    def seeded(self, config: RunConfig, seed: int) -> RunConfig:
        """Return the config of one seed."""
        drawn = ("data", "eval") if self.draws_data else ()
        parts = {key: getattr(config, key).model_copy(update={"seed": seed}) for key in drawn}
        return config.model_copy(update={"seed": seed, **parts})


class Expectation(Frozen):
    """Expected direction of a row against the first one, stated before it is run."""

    better: bool
    because: Annotated[str, Field(min_length=1), ONE_LINE]
    """A derivation, or the source of the claim."""


class Row(Frozen):
    """One row of the table: a name, the fields it changes, the paper's numbers."""

    name: str
    set: Fragment = Field(default_factory=dict)
    paper: dict[str, float | None] = Field(default_factory=dict)
    expected: dict[str, Expectation] = Field(default_factory=dict)
    """By column, for columns without a number in the paper."""
    reference: bool = False
    """A row that the paper's table does not have: never the best; compared where a direction is expected."""
    axes: dict[str, JsonValue] = Field(default_factory=dict)
    """Its value on each axis; set from the study's axes."""
    line: str = ""
    """The line of the table that it shares with the rows at other values of an ``across`` axis."""
    listed: str = ""
    """Its name in the study's file, without its values on the axes; set from the study's rows."""

    def as_line(self) -> Row:
        """Return the row as a line of the table; a line of several rows sets nothing of its own."""
        return self.model_copy(update={"name": self.line, "set": {}}) if self.line else self


class Study(Frozen):
    """A study file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
    """Letters, digits, `-` and `_`: it names a folder and a run in MLflow."""
    description: Annotated[str, ONE_LINE] = ""
    paper: tuple[str, ...] = ()
    """Tables of the paper, by their key in ``paper.yaml``; their rows are matched by name."""
    columns: Annotated[dict[str, Column], Field(min_length=1)]
    base: Fragment = Field(default_factory=dict)
    scales: Annotated[dict[str, Scale], Field(min_length=1)]
    rows: tuple[Row, ...] = ()
    axes: dict[str, Axis] = Field(default_factory=dict)
    """Axes of a grid; each listed row runs at all points. Without listed rows, all points are the rows."""
    search: Search | None = None
    """A search; its best trial becomes the last row."""

    @model_validator(mode="after")
    def _has_rows(self) -> Study:
        if not self.rows and not self.axes:
            raise ValueError("rows: a study needs rows or axes")
        if self.search and (drawn := [name for name, scale in self.scales.items() if scale.draws_data]):
            raise ValueError(f"scales.{drawn[0]}.draws_data: remove it or search: trials share their data")
        return self

    def rows_at(self, scale_name: str) -> tuple[Row, ...]:
        """Return the rows of the table at a scale: the listed ones at every point of the axes."""
        axes, rows = self.axes_at(scale_name), self.rows_of(scale_name) or [Row(name="")]
        grid = list(product(*(axis.steps() for axis in axes.values())))
        return tuple(_at_point(row, axes, point) for row in rows for point in grid)

    def rows_of(self, scale_name: str) -> list[Row]:
        """Return the listed rows of a scale, with the scale's overrides and the paper's numbers."""
        size, changes = self.scale(scale_name).paper or scale_name, self.scale(scale_name).rows
        columns = {key: column.paper or (key,) for key, column in self.columns_at(scale_name).items()}
        rows = []
        for row in self.rows:
            if (change := changes.get(row.name, {})) is not None:
                numbers = printed(self.paper, size, row.name, columns) | row.paper
                rows.append(row.model_copy(update={"set": overlay(row.set, change), "paper": numbers}))
        return rows

    def columns_at(self, scale_name: str) -> dict[str, Column]:
        """Return the columns of the table at a scale."""
        return self.scale(scale_name).columns or self.columns

    def axes_at(self, scale_name: str) -> dict[str, Axis]:
        """Return the axes of the grid at a scale."""
        return self.axes | self.scale(scale_name).axes

    def search_at(self, scale_name: str) -> Search | None:
        """Return the search at a scale. Raises UsageError."""
        if self.search is None:
            return None
        below, above = self.search.model_dump(mode="json"), self.scales[scale_name].search
        merged = {**below, **above}
        if isinstance(space := above.get("space"), dict):
            merged["space"] = {**below["space"], **space}
        return validate(Search, merged, f"{self.name}, scale {scale_name}, search")

    def scale_name(self, name: str = "") -> str:
        """Return the name as spelled in the file; without one the only scale, or laptop of several.

        Raises UsageError with the nearest name.
        """
        default = next(iter(self.scales)) if len(self.scales) == 1 else "laptop"
        return pick(name or default, self.scales, "scale", self.name)

    def scale(self, name: str) -> Scale:
        """Return a scale by name. Raises UsageError with the nearest name."""
        return self.scales[self.scale_name(name)]


def _at_point(row: Row, axes: Mapping[str, Axis], point: Sequence[tuple[JsonValue, Fragment]]) -> Row:
    """Place a row at one point of the grid, with a name that joins the two."""
    words, change, at = [row.name] * bool(row.name), overlay({}, row.set), dict(row.axes)
    line = list(words)
    for (key, axis), (value, sets) in zip(axes.items(), point, strict=True):
        words.append(word := axis.label.format(value))
        change = overlay(change, sets)
        if not axis.across:
            line.append(word)
            at[key] = value
    changed = {"name": " ".join(words), "set": change, "axes": at, "listed": row.name}
    return row.model_copy(update=changed | ({"line": " ".join(line)} if line != words else {}))


def pick(name: str, known: Iterable[str], kind: str, where: str) -> str:
    """Return the known name that equals ``name`` but for case. Raises UsageError with the nearest one."""
    folded = {item.casefold(): item for item in known}
    if name.casefold() not in folded:
        raise UsageError(f"{where}: no {kind} {name!r}; {nearest(name, folded.values())}")
    return folded[name.casefold()]


PAPER = Path(__file__).with_name("paper.yaml")
Numbers = tuple[float | None, ...]


class Printed(Frozen):
    """A table or figure of the paper."""

    title: str
    study: str
    """The study that reproduces it, which may not exist yet."""
    columns: tuple[str, ...] = ()
    sizes: dict[str, dict[str, Numbers]] = Field(default_factory=dict)
    """Its rows by the scale of the study that they correspond to."""
    references: dict[str, str] = Field(default_factory=dict)
    """Rows that no study runs: why they are listed, and the source of their numbers."""

    def numbers(self, row: str, size: str) -> dict[str, float | None]:
        """Return the numbers of a row by column, at ``size`` of a table with several; empty without any."""
        rows = self.sizes.get(size, {}) if len(self.sizes) > 1 else next(iter(self.sizes.values()), {})
        return dict(zip(self.columns, rows[row], strict=True)) if row in rows else {}


class Paper(Frozen):
    """All tables and figures of the paper."""

    source: str
    tables: dict[str, Printed]
    figures: dict[str, Printed]

    @property
    def items(self) -> dict[str, Printed]:
        """Tables, then figures, by display name: ``Table 1``."""
        both = self.tables | self.figures
        return {key.replace("_", " ").capitalize(): item for key, item in both.items()}


@cache
def read_paper() -> Paper:
    """Read ``paper.yaml``."""
    return validate(Paper, read_yaml(PAPER), PAPER.name)


def printed(
    tables: Sequence[str], size: str, row: str, columns: Mapping[str, Sequence[str]]
) -> dict[str, float | None]:
    """Return the paper's numbers of a row by column; columns without one are left out.

    Args:
        tables: keys of `Paper.tables`, e.g. ``table_1``.
        size: the model size, for a table with several.
        row: a row's name in the paper.
        columns: for each column the paper's columns to average.
    """
    numbers: dict[str, float | None] = {}
    for table in tables:
        numbers |= read_paper().tables[table].numbers(row, size)
    averages: dict[str, float | None] = {}
    for key, names in columns.items():
        if values := [value for name in names if (value := numbers.get(name)) is not None]:
            averages[key] = round(fmean(values), 3) if len(values) == len(names) else None
    return averages
