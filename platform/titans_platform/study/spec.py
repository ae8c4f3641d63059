"""What a study file holds: a grid of runs as data. `study.grid` reads it and makes its cells.

A run is ``base``, then the scale's fragment, then the row's ``set``, then ``--set`` of the command line,
each laid over the one before. A study that is ``like`` another says only what differs: it is laid over that
study's file, mappings key by key, lists whole. Rows are listed one by one (``rows``), or are the product of
``axes``, or both: every listed row at every point of the axes. A run's name comes later, when the data are
prepared and have a fingerprint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Annotated, Any

from pydantic import Field, JsonValue, StringConstraints, model_validator

from titans_core.config import Frozen, PositiveInt
from titans_platform.errors import UsageError
from titans_platform.loading import (
    nearest,
    overlay,
    validate,
)
from titans_platform.runs.spec import Resources
from titans_platform.study.paper import printed

Fragment = dict[str, JsonValue]
MAX_CORNERS = 512
"""Corners of a space that are checked; of a larger one each parameter's ends, one at a time."""


class Axis(Frozen):
    """One direction of a grid: a field and its values, or points by name, each with all that it sets."""

    title: str = ""
    field: str = ""
    """The field that ``values`` are given to, e.g. model.memory.depth."""
    values: tuple[JsonValue, ...] = ()
    points: dict[str, Fragment] = Field(default_factory=dict)
    """In place of field and values: a name, and the fields it sets."""
    label: str = "{}"
    """How a value stands in a row's name: `depth {}`."""
    across: bool = False
    """A line of the table has the rows of all its values, and each of them measures columns of its own."""

    @model_validator(mode="after")
    def _one_way(self) -> Axis:
        if bool(self.field) != bool(self.values) or bool(self.field) == bool(self.points):
            raise ValueError("field: an axis has either a field with its values, or points")
        if "{}" not in self.label:
            raise ValueError(f"label: {self.label!r} should hold {{}}, where the value stands")
        return self

    def steps(self) -> list[tuple[JsonValue, Fragment]]:
        """Each value and what it sets; a point named by a number is that number."""
        if self.points:
            return [(_number(name), change) for name, change in self.points.items()]
        return [(value, {self.field: value}) for value in self.values]


def _number(name: str) -> JsonValue:
    try:
        return int(name)
    except ValueError:
        return name


class Parameter(Frozen):
    """What a field may be: a number between two, or one of several values."""

    low: float | None = None
    high: float | None = None
    log: bool = False
    """Drawn evenly in its logarithm."""
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
        """The values that a check of the whole space needs to see."""
        return self.choices or (self.low, self.high)


class Search(Frozen):
    """Trials that a sampler proposes, most of them stopped early by how they do at the rungs."""

    metric: str
    """The column that is made better; measured at every rung."""
    trials: PositiveInt = 16
    seed: int = 1000
    """Seed of the sampler and of the trials; none of those that the table's rows are run with."""
    reduction: Annotated[int, Field(ge=2)] = 3
    """Of the trials that reach a rung, one in so many goes on; the next rung has so many times the tokens."""
    rungs: PositiveInt = 3
    """Rungs, the end of the training included."""
    space: Annotated[dict[str, Parameter], Field(min_length=1)]

    @model_validator(mode="after")
    def _trainable(self) -> Search:
        fixed = [key for key in self.space if key.partition(".")[0] in ("data", "eval", "seed", "threads")]
        if fixed or "optim.steps" in self.space or "optim.global_batch_size" in self.space:
            key = fixed[0] if fixed else "optim.steps and optim.global_batch_size"
            raise ValueError(f"space: {key} cannot be searched: trials are compared at equal data and tokens")
        return self

    def milestones(self, steps: int) -> list[int]:
        """The optimiser steps that are rungs, as ASHA counts them, and the end."""
        first = max(1, steps // self.reduction ** (self.rungs - 1))
        rungs = [first * self.reduction**i for i in range(self.rungs - 1)]
        return [rung for rung in rungs if rung < steps] + [steps]

    def corners(self) -> Iterator[dict[str, Any]]:
        """Settings that together see every value at the edge of the space."""
        ends = {key: parameter.ends() for key, parameter in self.space.items()}
        count = 1
        for values in ends.values():
            count *= len(values)
        if count <= MAX_CORNERS:
            yield from (dict(zip(ends, point, strict=True)) for point in product(*ends.values()))
            return
        first = {key: values[0] for key, values in ends.items()}
        yield from (first | {key: value} for key, values in ends.items() for value in values)


class Column(Frozen):
    """How a column is shown, and which way is better."""

    title: str
    unit: str = ""
    factor: float = 1.0
    """What a measured value is multiplied by to be shown: 100 for a share in percent."""
    higher_is_better: bool = True
    decimals: Annotated[int, Field(ge=0)] = 1
    paper: tuple[str, ...] = ()
    """Columns of the paper's tables whose mean stands beside it; of its own name where empty."""

    def titled(self, name: str = "") -> str:
        """The title, or another name, with the unit."""
        return f"{name or self.title} ({self.unit})" if self.unit else name or self.title

    @property
    def arrow(self) -> str:
        """The way that is better, as a sign."""
        return "↑" if self.higher_is_better else "↓"

    @property
    def better(self) -> str:
        """The way that is better, in words."""
        return "higher is better" if self.higher_is_better else "lower is better"

    @property
    def heading(self) -> str:
        """The title with the unit and the way that is better."""
        return f"{self.titled()} {self.arrow}"


class Scale(Frozen):
    """One size of the study: a RunConfig fragment, the seeds, the resources."""

    about: str = ""
    comparable: bool = False
    """Whether the columns measure what the paper's do; where not, the table says so."""
    note: str = ""
    """What the columns are at this scale, printed under the table."""
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (0,)
    resources: Resources = Resources()
    model: Fragment = Field(default_factory=dict)
    data: Fragment = Field(default_factory=dict)
    optim: Fragment = Field(default_factory=dict)
    eval: Fragment = Field(default_factory=dict)
    checkpoint: Fragment = Field(default_factory=dict)
    objective: Fragment = Field(default_factory=dict)
    threads: PositiveInt = 1
    paper: str = ""
    """Which size of the paper's tables stands beside its numbers; its own name where empty."""
    columns: dict[str, Column] = Field(default_factory=dict)
    """The columns of the table at this scale, where they are not the study's."""
    rows: dict[str, Fragment | None] = Field(default_factory=dict)
    """What rows of the study set at this scale, by name, over what they set at every scale; a row that is
    null is left out."""
    axes: dict[str, Axis] = Field(default_factory=dict)
    """Axes of the study that are others at this scale."""
    search: Fragment = Field(default_factory=dict)
    """What of the study's search is another at this scale; of its space, parameter by parameter."""

    def fragment(self) -> dict[str, Any]:
        """The part of a RunConfig this scale lays over the base."""
        names = ("model", "data", "optim", "eval", "objective", "checkpoint")
        parts = {name: getattr(self, name) for name in names}
        return {**{key: value for key, value in parts.items() if value}, "threads": self.threads}


class Expectation(Frozen):
    """Which way a row should go from the first one, said before it is run."""

    better: bool
    because: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
    """A derivation, or whose result it is."""


class Row(Frozen):
    """One row of the table: a name, what it changes, what the paper printed for it."""

    name: str
    set: Fragment = Field(default_factory=dict)
    paper: dict[str, float | None] = Field(default_factory=dict)
    expected: dict[str, Expectation] = Field(default_factory=dict)
    """By column, where the paper has no number."""
    reference: bool = False
    """A row shown for comparison that the paper's table does not have: left out of best and worst."""
    axes: dict[str, JsonValue] = Field(default_factory=dict)
    """Where the row stands in the grid: its value on each axis. The study's axes give it."""
    line: str = ""
    """The line of the table it is a part of, with the rows at other values of an axis that is across."""

    def as_line(self) -> Row:
        """The row as its line of the table has it: what it sets is that of one row of several."""
        return self.model_copy(update={"name": self.line, "set": {}}) if self.line else self


class Study(Frozen):
    """A study file, whole."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
    """A word of letters, digits, `-` and `_`: it names a folder and a run in MLflow."""
    description: str = ""
    paper: tuple[str, ...] = ()
    """The paper's tables, as `study.paper` names them, whose numbers stand beside rows of the same name."""
    columns: Annotated[dict[str, Column], Field(min_length=1)]
    base: Fragment = Field(default_factory=dict)
    scales: Annotated[dict[str, Scale], Field(min_length=1)]
    rows: tuple[Row, ...] = ()
    axes: dict[str, Axis] = Field(default_factory=dict)
    """Directions of a grid; each listed row (one without a name where none is) is run at all their points."""
    search: Search | None = None
    """A search whose best configuration becomes a row below the listed ones."""

    @model_validator(mode="after")
    def _has_rows(self) -> Study:
        if not self.rows and not self.axes:
            raise ValueError("rows: a study needs rows, or axes whose product they are")
        return self

    def rows_at(self, scale_name: str) -> tuple[Row, ...]:
        """The rows of the table at a scale: those listed, at every point of the axes."""
        axes, rows = self.axes_at(scale_name), self.rows_of(scale_name) or [Row(name="")]
        grid = list(product(*(axis.steps() for axis in axes.values())))
        return tuple(_at_point(row, axes, point) for row in rows for point in grid)

    def rows_of(self, scale_name: str) -> list[Row]:
        """The listed rows, but those a scale leaves out: with what they set there and the paper's numbers."""
        size, given = self.scale(scale_name).paper or scale_name, self.scale(scale_name).rows
        columns = {key: column.paper or (key,) for key, column in self.columns_at(scale_name).items()}
        rows = []
        for row in self.rows:
            if (change := given.get(row.name, {})) is not None:
                numbers = printed(self.paper, size, row.name, columns) | row.paper
                rows.append(row.model_copy(update={"set": overlay(row.set, change), "paper": numbers}))
        return rows

    def columns_at(self, scale_name: str) -> dict[str, Column]:
        """The columns of the table at a scale."""
        return self.scale(scale_name).columns or self.columns

    def axes_at(self, scale_name: str) -> dict[str, Axis]:
        """The axes of the grid at a scale."""
        return self.axes | self.scale(scale_name).axes

    def search_at(self, scale_name: str) -> Search | None:
        """The search at a scale. Raises UsageError."""
        if self.search is None:
            return None
        below, above = self.search.model_dump(mode="json"), self.scales[scale_name].search
        merged = {**below, **above}
        if isinstance(given := above.get("space"), dict):
            merged["space"] = {**below["space"], **given}
        return validate(Search, merged, f"{self.name}, scale {scale_name}, search")

    def scale_name(self, name: str) -> str:
        """The name as the file spells it; UsageError with the nearest name where there is none."""
        return pick(name, self.scales, "scale", self.name)

    def scale(self, name: str) -> Scale:
        """A scale by name; UsageError with the nearest name where there is none."""
        return self.scales[self.scale_name(name)]


def _at_point(row: Row, axes: Mapping[str, Axis], point: Sequence[tuple[JsonValue, Fragment]]) -> Row:
    """The row at one point of the grid, named by both."""
    words, change, at = [row.name] * bool(row.name), overlay({}, row.set), dict(row.axes)
    line = list(words)
    for (key, axis), (value, sets) in zip(axes.items(), point, strict=True):
        words.append(word := axis.label.format(value))
        change = overlay(change, sets)
        if not axis.across:
            line.append(word)
            at[key] = value
    if not point:
        return row
    changed = {"name": " ".join(words), "set": change, "axes": at}
    return row.model_copy(update=changed | ({"line": " ".join(line)} if line != words else {}))


def pick(name: str, known: Iterable[str], what: str, where: str) -> str:
    """``name`` if it is known, in any capitals; else a UsageError that names the nearest one."""
    folded = {item.casefold(): item for item in known}
    if name.casefold() not in folded:
        raise UsageError(f"{where}: no {what} {name!r}; {nearest(name, folded.values())}")
    return folded[name.casefold()]
