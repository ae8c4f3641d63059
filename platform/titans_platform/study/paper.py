"""The paper's numbers: its tables and figures, and which study reproduces each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean

from pydantic import Field, model_validator

from titans_core.config import Frozen
from titans_platform.loading import read_yaml, validate

FILE = Path(__file__).with_suffix(".yaml")
Numbers = tuple[float | None, ...]


class Printed(Frozen):
    """A table or figure of the paper."""

    title: str
    study: str
    """The study that reproduces it, which may not exist yet."""
    columns: tuple[str, ...] = ()
    size: str = ""
    """The scale of the study that corresponds to the numbers."""
    rows: dict[str, Numbers] = Field(default_factory=dict)
    sizes: dict[str, dict[str, Numbers]] = Field(default_factory=dict)
    """Instead of size and rows: the rows by size, for a table with several model sizes."""
    references: dict[str, str] = Field(default_factory=dict)
    """Rows that no study runs: why they are listed, and the source of their numbers."""

    @model_validator(mode="after")
    def _whole(self) -> Printed:
        for name, row in ((name, row) for rows in self.by_size().values() for name, row in rows.items()):
            if len(row) != len(self.columns):
                raise ValueError(f"rows: {name} has {len(row)} numbers for {len(self.columns)} columns")
        return self

    def by_size(self) -> dict[str, dict[str, Numbers]]:
        """Its rows by model size."""
        return self.sizes or {self.size: self.rows}

    def numbers(self, row: str, size: str) -> dict[str, float | None]:
        """The numbers of a row by column, of a table with several sizes at ``size``; empty without them."""
        rows = self.sizes.get(size, {}) if self.sizes else self.rows
        return dict(zip(self.columns, rows[row], strict=True)) if row in rows else {}


class Paper(Frozen):
    """All tables and figures of the paper."""

    source: str
    tables: dict[str, Printed]
    figures: dict[str, Printed]

    @property
    def items(self) -> dict[str, Printed]:
        """Tables, then figures, by display name: ``Table 1``."""
        return {spoken(key): item for key, item in (self.tables | self.figures).items()}


def spoken(key: str) -> str:
    """The display name of a key: ``table_1`` is ``Table 1``."""
    return key.replace("_", " ").capitalize()


@cache
def read_paper() -> Paper:
    """Read ``paper.yaml``."""
    return validate(Paper, read_yaml(FILE), FILE.name)


def printed(
    tables: Sequence[str], size: str, row: str, columns: Mapping[str, Sequence[str]]
) -> dict[str, float | None]:
    """The paper's numbers of a row by column; columns without one are left out.

    Args:
        tables: keys of `Paper.tables`, e.g. ``table_1``.
        size: the model size, for a table with several.
        row: a row's name in the paper.
        columns: for each column the paper's columns to average.
    """
    found: dict[str, float | None] = {}
    for table in tables:
        found |= read_paper().tables[table].numbers(row, size)
    taken = {key: [found.get(name) for name in names] for key, names in columns.items()}
    return {key: _mean(values) for key, values in taken.items() if any(v is not None for v in values)}


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return round(fmean(numbers), 3) if len(numbers) == len(values) else None
