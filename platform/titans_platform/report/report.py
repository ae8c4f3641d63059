"""`Report`: everything a study's report says, built once from its numbers and passed to every renderer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from titans_platform.report.figure_data import Curve, figure_data
from titans_platform.report.figures import pictures
from titans_platform.report.picture import Picture
from titans_platform.report.table import (
    Comparison,
    Entry,
    Table,
    TableRow,
    VerdictTable,
    best_rows,
    compare,
    verdict_table,
)
from titans_platform.runs.folder import PATHWAY_TITLES, PATHWAYS_EXPLAINED, Result
from titans_platform.text import NONE, commit, flatten, number, plural

DAGGERS = "†‡§¶"
SIZES = ("parameters", "state_bytes")


@dataclass(frozen=True)
class Number:
    """One number of the table as text: the mean over seeds and what is printed beside it."""

    entry: Entry
    mean: str
    """The mean; `failed` or a dash where there is none."""
    sd: str
    seeds: str
    """`2/3` where seeds are missing."""
    paper: str
    best: bool

    def __str__(self) -> str:
        spread = f"±{self.sd}" if self.sd else ""
        return f"{self.mean}{spread} {self.seeds}".rstrip()


@dataclass(frozen=True)
class PathwayTable:
    """Which part of a model its answers came from, as text."""

    heads: tuple[str, ...]
    lines: tuple[tuple[str, str, tuple[str, ...]], ...]
    """A row's name, the part that is off, or `all on`, and the value of each column."""
    explained: str = PATHWAYS_EXPLAINED


class CellLine(NamedTuple):
    """One cell of the study: its result, or its state and the reason why it has none."""

    name: str | None
    row: str
    seed: int
    result: Result | None
    state: str = ""
    reason: str = ""


@dataclass(frozen=True)
class ReportRow:
    """A row of the table as text."""

    name: str
    marks: str
    """Of the commits, other than the present one, that made some of its cells."""
    reference: bool
    numbers: Mapping[str, Number]
    sizes: Mapping[str, int | None]
    """`parameters` and `state_bytes` of the row's model."""
    cells: tuple[CellLine, ...]

    @property
    def results(self) -> list[Result]:
        """The results of the finished cells."""
        return [cell.result for cell in self.cells if cell.result]

    @property
    def runs(self) -> dict[int, str]:
        """MLflow run ids by seed."""
        return {result.seed: result.mlflow_run_id for result in self.results if result.mlflow_run_id}


@dataclass(frozen=True)
class Links:
    """Addresses of the runs in a running MLflow server."""

    address: str
    experiment: str
    local: bool = True
    """Whether the address is where `titans ui` listens, and not a server that is always there."""

    @property
    def cells(self) -> str:
        """The experiment's list of runs."""
        return f"{self.address}/#/experiments/{self.experiment}/runs"

    def run(self, run_id: str) -> str:
        """The page of one run."""
        return f"{self.cells}/{run_id}"

    def compare(self, run_ids: Iterable[str]) -> str:
        """The page of one run, or of several runs side by side."""
        first, *others = run_ids
        if not others:
            return self.run(first)
        runs, experiments = json.dumps([first, *others], separators=(",", ":")), json.dumps([self.experiment])
        return f"{self.address}/#/compare-runs?runs={runs}&experiments={experiments}"


@dataclass(frozen=True)
class Report:
    """A study's report. Renderers take this and read nothing else."""

    table: Table
    title: str
    rows: tuple[ReportRow, ...]
    paper_columns: frozenset[str]
    """Columns that the paper has numbers for."""
    chance: Mapping[str, str]
    bold_note: str
    notes: tuple[str, ...]
    failures: tuple[CellLine, ...]
    comparisons: tuple[Comparison, ...]
    verdict: VerdictTable | None
    pathways: PathwayTable | None
    pictures: tuple[Picture, ...]
    commit: str
    """The one commit that made every cell; empty where there are several."""
    commands: tuple[str, ...]
    """Commands that were run on the study."""
    facts: Mapping[str, str]
    configs: Mapping[str, Mapping[str, str]]
    links: Links | None

    @property
    def footnotes(self) -> list[str]:
        """The notes and, where a view has no place of its own for them, the failed cells."""
        return [*self.notes, *(f"{c.row}, seed {c.seed}: failed: {c.reason}" for c in self.failures)]

    def fields(self, keys: Sequence[str] | None = None) -> list[tuple[str, bool]]:
        """The fields of a line between name and sizes: a column's key, and whether it is the paper's."""
        both = ((key, paper) for key in keys or self.table.columns for paper in (False, True))
        return [(key, paper) for key, paper in both if not paper or key in self.paper_columns]


def build_report(
    table: Table, curves: Mapping[str, Curve] | None = None, search: Mapping[str, Any] | None = None,
    commands: Sequence[str] = (), links: Links | None = None,
) -> Report:  # fmt: skip
    """The report of a table.

    Args:
        table: The study's numbers.
        curves: Training loss by step, by MLflow run id.
        search: Record of the study's search: its trials, and what it found.
        commands: Commands that were run on the study.
        links: Addresses of the runs; None where the tracking store could not be read.
    """
    search = search or {}
    seeds = plural(max((len({cell.seed for cell in row.cells}) for row in table.rows), default=0), "seed")
    found = [search.get("line"), f"Found: {search['set']}" if search.get("set") else None]
    made = {result.commit for result in table.results}
    only = made.pop() if len(made) == 1 else ""
    stale = sorted({commit for row in table.rows for commit in row.stale})
    marks = {} if only else {each: DAGGERS[min(i, len(DAGGERS) - 1)] for i, each in enumerate(stale)}
    comparisons = compare(table)
    best = {key: best_rows(table, key) for key in table.columns}
    rows = tuple(_row(table, row, best, marks) for row in table.rows)
    entries = [(key, entry) for row in table.rows for key, entry in row.entries.items()]
    references = ", ".join(row.row.name for row in table.rows if row.row.reference)
    left_out = f"; {references} left out, for reference only" if references else ""
    return Report(
        table=table, rows=rows, title=f"{table.study} at scale {table.scale}: mean ± sd over {seeds}",
        paper_columns=frozenset(key for key, entry in entries if entry.paper is not None),
        chance={key: number(table.chance.get(key), c.decimals) for key, c in table.columns.items()},
        bold_note=f"Bold: the best row of a column, where it is better than chance{left_out}.",
        notes=(*_notes(table, marks, only), *filter(None, found)),
        failures=tuple(cell for row in rows for cell in row.cells if cell.reason),
        comparisons=tuple(comparisons), verdict=verdict_table(comparisons, table.columns),
        pathways=_pathways(table), commit=only, commands=tuple(commands), facts=_facts(table),
        pictures=tuple(pictures(figure_data(table, curves, search))) if table.rows else (),
        configs=_configs(table), links=links,
    )  # fmt: skip


def _row(table: Table, row: TableRow, best: Mapping[str, set[str]], marks: Mapping[str, str]) -> ReportRow:
    results = {result.cell: result for result in row.results}
    gaps = {(gap.row, gap.seed): gap for gap in row.unfinished}
    cells = []
    for cell in row.cells:
        line = CellLine(cell.name, cell.row, cell.seed, results.get(cell.name or ""))
        gap = gaps.get((cell.row, cell.seed))
        cells.append(line._replace(result=None, state=gap.state, reason=gap.reason) if gap else line)
    numbers = {}
    for key, entry in row.entries.items():
        decimals, missing = table.columns[key].decimals, "failed" if row.failures else NONE
        numbers[key] = Number(
            entry,
            mean=missing if entry.mean is None else number(entry.mean, decimals),
            sd="" if entry.sd is None else number(entry.sd, decimals),
            seeds=f"{len(entry.values)}/{entry.wanted}" if len(entry.values) < entry.wanted else "",
            paper=number(entry.paper, max(2, decimals)),
            best=row.row.name in best[key],
        )
    made = "".join(sorted({marks[commit] for commit in row.stale if commit in marks}))
    sizes = {size: row.size_of(size) for size in SIZES}
    return ReportRow(row.row.name, made, row.row.reference, numbers, sizes, tuple(cells))


def _pathways(table: Table) -> PathwayTable | None:
    """Means over the seeds that measured pathways; None where no cell did."""
    measured = [(row.row.name, r) for row in table.rows for r in row.results if r.pathways]
    found = [part for _, result in measured for part in result.pathways.values()]
    columns = {key: column for key, column in table.columns.items() if any(key in part for part in found)}
    lines = []
    for name in dict.fromkeys(name for name, _ in measured):
        results = [result for row, result in measured if row == name]
        parts = {"all on": [result.columns for result in results]}
        for part, title in PATHWAY_TITLES.items():
            parts[title] = [result.pathways[part] for result in results if part in result.pathways]
        for part, cells in parts.items():
            shown = []
            for key, column in columns.items():
                values = [cell[key] for cell in cells if key in cell]
                shown.append(number(column.factor * fmean(values) if values else None, column.decimals))
            if cells:
                lines.append((name, part, tuple(shown)))
    heads = tuple(column.titled() for column in columns.values())
    return PathwayTable(heads, tuple(lines)) if lines else None


def _notes(table: Table, marks: Mapping[str, str], only: str) -> list[str]:
    """Comparability, the scale's note, expectations, timing, other commits, gaps."""
    lines = [table.note] if table.note else []
    if not table.comparable:
        substitutes = "The columns at this scale are small substitutes"
        order = "only the order of rows, never a number, can be compared with the paper's"
        lines.insert(0, f"{substitutes}: {order}.")
    for row in table.rows:
        for key, expected in row.row.expected.items():
            way, because = "better" if expected.better else "worse", " ".join(expected.because.split())
            # a scale may have fewer columns than the study
            if key in table.columns:
                lines.append(f"Expected: {row.row.name}, {table.columns[key].title}: {way}. {because}")
    if table.side_by_side and table.timed:
        timed = ", ".join(table.columns[key].title for key in table.timed)
        lines.append(f"{timed}: timed while other cells ran on the same machine.")
    if table.other_seeds:
        lines.append(f"Seeds that are not the scale's are counted: {', '.join(map(str, table.other_seeds))}.")
    for made, mark in marks.items():
        lines.append(f"{mark} some cells were made by commit {commit(made)}; --rerun-stale runs them again.")
    if only not in ("", table.commit):
        here = commit(table.commit)
        lines.append(f"All cells were made by commit {commit(only)}; the code here is {here}.")
    if table.missing:
        has = "has" if table.missing == 1 else "have"
        cells = plural(table.missing, "cell")
        lines.append(f"{cells} {has} no result yet; the same sweep run makes only what is missing.")
    return lines


def _facts(table: Table) -> dict[str, str]:
    """How the cells were made; where they differ, how many cells have which value."""
    results = table.results
    found = {
        "commit": _counted(result.commit for result in results),
        "data fingerprint": _counted(result.data_fingerprint for result in results),
        "version of the evaluation": _counted(result.eval_version for result in results),
    }
    made = [result.environment for result in results]
    found |= {name: _counted(each.get(name) for each in made) for each in made for name in each}
    tokens = sum(result.tokens for result in results)
    trained, measured = (sum(getattr(r, key) for r in results) for key in ("train_seconds", "eval_seconds"))
    return found | {
        "cells": f"{len(results)} of {len(results) + table.missing} done",
        "training": f"{tokens:,.0f} tokens in {trained / 3600:.2f} hours, summed over the cells",
        "measuring": f"{measured / 3600:.2f} hours",
    }


def _counted(values: Iterable[Any]) -> str:
    counts = Counter(str(value) for value in values if value not in (None, ""))
    if len(counts) <= 1:
        return next(iter(counts), "not recorded")
    return ", ".join(f"{value} ({count} cells)" for value, count in counts.most_common())


def _configs(table: Table) -> dict[str, dict[str, str]]:
    """The fields that all rows share, and for each row those that differ between rows."""
    fields: dict[str, dict[str, str]] = {}
    for row in table.rows:
        leaves = flatten(row.cells[0].config.model_dump(mode="json", exclude={"seed"}))
        fields[row.row.name] = {key: _leaf(value) for key, value in leaves.items()}
    named = dict.fromkeys(key for each in fields.values() for key in each)
    values = {key: {each.get(key, NONE) for each in fields.values()} for key in named}
    common = {key: next(iter(found)) for key, found in values.items() if len(found) == 1}
    differing = [key for key in named if key not in common]
    own = {name: {key: each[key] for key in differing if key in each} for name, each in fields.items()}
    return {"all rows": common} | own


def _leaf(value: Any) -> str:
    """A field of a config; a long fraction in five digits."""
    text = value if isinstance(value, str) else json.dumps(value)
    return f"{value:.5g}" if isinstance(value, float) and len(text) > 8 else text
