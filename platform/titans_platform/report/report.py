"""`StudyReport`: everything that a study's report says, built once and passed to every renderer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titans_platform.report.figures import pictures
from titans_platform.report.picture import Curve, Picture, figure_data
from titans_platform.report.table import Comparison, Table, best_rows, cell, compare, method, tally
from titans_platform.study.search import search_lines
from titans_platform.text import commit, number, plural

DAGGERS = "†‡§¶"


@dataclass(frozen=True)
class Section:
    """A further table of the report as text, the same in every format."""

    title: str
    text: str
    heads: list[str]
    lines: list[list[str]]


@dataclass(frozen=True)
class Links:
    """Addresses of the runs in a running MLflow server."""

    address: str
    experiment: str
    local: bool = True
    """True if `titans ui` listens at the address, False for a permanent server."""

    @property
    def cells(self) -> str:
        """The experiment's list of runs."""
        return f"{self.address}/#/experiments/{self.experiment}/runs"

    def compare(self, run_ids: Iterable[str]) -> str:
        """Return the address of one run's page, or of several runs side by side."""
        first, *others = run_ids
        if not others:
            return f"{self.cells}/{first}"
        runs, experiments = json.dumps([first, *others], separators=(",", ":")), json.dumps([self.experiment])
        return f"{self.address}/#/compare-runs?runs={runs}&experiments={experiments}"


@dataclass(frozen=True)
class StudyReport:
    """A study's report. Renderers take this and read nothing else."""

    table: Table
    title: str
    paper_columns: frozenset[str]
    """Columns that the paper has numbers for."""
    best: Mapping[str, set[str]]
    """The best rows of each column."""
    levels: Mapping[str, Mapping[str, str]]
    """`chance` and, where it is another, `floor`: the text of each column."""
    bold_note: str
    notes: tuple[str, ...]
    marks: Mapping[str, str]
    """Signs of the commits, other than the present one, that made some of the cells."""
    comparisons: tuple[Comparison, ...]
    sections: tuple[Section, ...]
    """The verdict, if there is one."""
    pictures: tuple[Picture, ...]
    facts: Mapping[str, str]
    links: Links | None

    @property
    def footnotes(self) -> list[str]:
        """The notes and, where a view has no place of its own for them, the failed cells."""
        failures = [cell for row in self.table.rows for cell in row.failures]
        return [*self.notes, *(f"{c.row}, seed {c.seed}: failed: {c.reason}" for c in failures)]

    def names(self) -> list[str]:
        """Return the names of the rows, with the signs of the commits that made them."""
        marks = ((row, {self.marks.get(commit, "") for commit in row.stale}) for row in self.table.rows)
        return [row.row.name + "".join(sorted(signs)) for row, signs in marks]

    def fields(self, keys: Sequence[str] | None = None) -> list[tuple[str, bool]]:
        """Return the fields of a line between name and sizes: (column, True if it is the paper's number)."""
        columns = self.table.columns if keys is None else keys
        both = ((key, paper) for key in columns for paper in (False, True))
        return [(key, paper) for key, paper in both if not paper or key in self.paper_columns]


def build_report(
    table: Table, curves: Mapping[str, Curve] | None = None, search: Mapping[str, Any] | None = None,
    links: Links | None = None,
) -> StudyReport:  # fmt: skip
    """Build the report of a table.

    Args:
        table: The study's numbers.
        curves: Training loss by step, by cell.
        search: Record of the study's search: its trials, and what it found.
        links: Addresses of the runs; None if the tracking store could not be read.
    """
    seeds = plural(max((len({cell.seed for cell in row.cells}) for row in table.rows), default=0), "seed")
    commits = {result.commit for result in table.results}
    only = commits.pop() if len(commits) == 1 else ""
    stale = sorted({commit for row in table.rows for commit in row.stale})
    marks = {} if only else {each: DAGGERS[min(i, len(DAGGERS) - 1)] for i, each in enumerate(stale)}
    comparisons, entries = compare(table), [item for row in table.rows for item in row.entries.items()]
    references = ", ".join(row.row.name for row in table.rows if row.row.reference)
    left_out = f"; {references} left out, for reference only" if references else ""
    levels = {
        name: {key: number(level.get(key), c.decimals) for key, c in table.columns.items()}
        for name, level in (("chance", table.chance), ("floor", table.floors))
        if level and (name == "chance" or level != table.chance)
    }  # fmt: skip
    return StudyReport(
        table=table, title=f"{table.run.study.name} at scale {table.run.scale_name}: mean ± sd over {seeds}",
        paper_columns=frozenset(key for key, entry in entries if entry.paper is not None),
        best={key: best_rows(table, key) for key in table.columns},
        levels=levels,
        bold_note=f"Bold: the best row of a column, where it is better than its floor{left_out}.",
        notes=(*_notes(table, marks, only), *search_lines(search)), marks=marks,
        comparisons=tuple(comparisons),
        sections=tuple(filter(None, [verdict(comparisons, table)])),
        facts=_facts(table), links=links,
        pictures=tuple(pictures(figure_data(table, curves, search))) if table.rows else (),
    )  # fmt: skip


def verdict(comparisons: Sequence[Comparison], table: Table) -> Section | None:
    """Tabulate the comparisons; None if nothing has an expected direction, or no row has two seeds."""
    directed = [each for each in comparisons if each.better is not None]
    if not any(len(each.ours.pairs) > 1 for each in directed):
        return None
    base, by_place = directed[0].baseline, {(each.row, each.column): each for each in directed}
    columns = {key: c for key, c in table.columns.items() if any(each.column == key for each in directed)}
    lines = [
        [row, *(cell(by_place.get((row, key)), c.decimals) for key, c in columns.items())]
        for row in dict.fromkeys(each.row for each in directed)
    ]
    heads = [f"minus {base}, better is +", *(column.titled() for column in columns.values())]
    whose = "the paper's" if any(each.paper for each in directed) else "the study file's"
    text = f"Against {base}, beside {whose} direction: {tally(directed)}. {method(directed)}"
    return Section("The paper's directions, here", text, heads, lines)


def _notes(table: Table, marks: Mapping[str, str], only: str) -> list[str]:
    """List notes: comparability, the scale's note, expectations, timing, other commits, gaps."""
    scale = table.run.scale
    lines = [scale.note] if scale.note else []
    if table.run.study.paper and not scale.comparable:
        substitutes = "The columns at this scale are small substitutes"
        order = "only the order of rows, never a number, can be compared with the paper's"
        lines.insert(0, f"{substitutes}: {order}.")
    for row in table.rows:
        for key, expected in row.row.expected.items():
            direction = "better" if expected.better else "worse"
            # a scale may have fewer columns than the study
            if column := table.columns.get(key):
                lines.append(f"Expected: {row.row.name}, {column.title}: {direction}. {expected.because}")
    if table.floors != table.chance:
        note = "Floor: n-grams of the text trained on, the best heuristic of a generated task, or chance."
        lines.append(f"{note} In parentheses: not better than the floor; such a number counts in no verdict.")
    if table.side_by_side and table.timed:
        timed = ", ".join(table.columns[key].title for key in table.timed)
        lines.append(f"{timed}: timed while other cells ran on the same machine.")
    slow = {row.row.name: form for row in table.rows for r in row.results for form in r.plain_forms}
    for form in sorted(set(slow.values())):
        rows = ", ".join(name for name, its in slow.items() if its == form)
        lines.append(f"{rows}: the memory ran on a GPU without kernels ({form}); do not compare times.")
    if table.other_seeds:
        lines.append(f"Seeds that are not the scale's are counted: {', '.join(map(str, table.other_seeds))}.")
    for stale, mark in marks.items():
        lines.append(f"{mark} some cells were made by commit {commit(stale)}; --rerun-stale runs them again.")
    if only not in ("", table.run.commit):
        current = commit(table.run.commit)
        lines.append(f"All cells were made by commit {commit(only)}; the code here is {current}.")
    if table.missing:
        has = "has" if table.missing == 1 else "have"
        cells = plural(table.missing, "cell")
        lines.append(f"{cells} {has} no result yet; the same sweep run makes only what is missing.")
    return lines


def _facts(table: Table) -> dict[str, str]:
    """Describe the settings and versions of the cells; if they differ, with the number of cells of each."""
    results = table.results
    facts = {
        "commit": _counted(result.commit for result in results),
        "data fingerprint": _counted(result.data_fingerprint for result in results),
        "version of the evaluation": _counted(result.eval_version for result in results),
        "operators": _counted(", ".join(result.forms) for result in results),
    }
    environments = [result.environment for result in results]
    names = dict.fromkeys(name for each in environments for name in each)
    facts |= {name: _counted(each.get(name) for each in environments) for name in names}
    tokens = sum(result.tokens for result in results)
    trained, measured = (sum(getattr(r, key) for r in results) for key in ("train_seconds", "eval_seconds"))
    return facts | {
        "cells": f"{len(results)} of {len(results) + table.missing} done",
        "training": f"{tokens:,.0f} tokens in {trained / 3600:.2f} hours, summed over the cells",
        "measuring": f"{measured / 3600:.2f} hours",
    }


def _counted(values: Iterable[Any]) -> str:
    counts = Counter(str(value) for value in values if value not in (None, ""))
    if len(counts) <= 1:
        return next(iter(counts), "not recorded")
    return ", ".join(f"{value} ({count} cells)" for value, count in counts.most_common())
