"""What every view of a table shows: headings, numbers as text, notes, and where the numbers come from."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from titans_platform.report.table import Discrimination, Table, TableRow, best_rows, discriminate
from titans_platform.text import NONE, commit, count, flatten, number, plural

DAGGERS = "†‡§¶"
SIZES = ("parameters", "state_bytes")


@dataclass(frozen=True)
class Shown:
    """One number of the table as text: the mean over seeds and what stands beside it."""

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


def shown(table: Table, row: TableRow, key: str) -> Shown:
    """A row's number in a column."""
    entry, decimals = row.entries[key], table.columns[key].decimals
    missing = "failed" if row.failures else NONE
    return Shown(
        missing if entry.mean is None else number(entry.mean, decimals),
        "" if entry.sd is None else number(entry.sd, decimals),
        f"{len(entry.values)}/{entry.wanted}" if len(entry.values) < entry.wanted else "",
        number(entry.paper, max(2, decimals)),
        row.row.name in best_rows(table, key),
    )


def has_paper(table: Table, key: str) -> bool:
    """Whether the paper has a number in this column."""
    return any(row.entries[key].paper is not None for row in table.rows)


def fields(table: Table, keys: Sequence[str] | None = None) -> list[tuple[str, bool]]:
    """The fields of a line between name and sizes: a column's key, and whether it is the paper's number."""
    return [
        (key, printed)
        for key in keys or table.columns
        for printed in (False, True)[: 1 + has_paper(table, key)]
    ]


def body(
    table: Table, keys: Sequence[str] | None = None, ours: Callable[[Shown], str] = str
) -> list[list[str]]:
    """The lines of the table: name, ours and the paper's for each column, parameters, state bytes."""
    lines = []
    for row in table.rows:
        numbers = [(shown(table, row, key), printed) for key, printed in fields(table, keys)]
        sizes = [count(row.figure_of(size)) for size in SIZES]
        texts = [found.paper if printed else ours(found) for found, printed in numbers]
        lines.append([row.row.name + marks_of(table, row), *texts, *sizes])
    return lines


def chance_line(table: Table, keys: Sequence[str] | None = None) -> list[str]:
    """What guessing measures in each column, laid out as a line of the body."""
    columns = table.columns
    levels = [
        "" if printed else number(table.chance.get(key), columns[key].decimals)
        for key, printed in fields(table, keys)
    ]
    return ["chance", *levels, "", ""]


def marks_of(table: Table, row: TableRow) -> str:
    """The marks of the commits, other than the present one, that made some of the row's cells."""
    marks = footmarks(table)
    return "".join(sorted({marks[made] for made in row.stale if made in marks}))


def footmarks(table: Table) -> dict[str, str]:
    """A mark for every other commit that made some of the table's cells; none where one made all."""
    if only_commit(table):
        return {}
    commits = sorted({made for row in table.rows for made in row.stale})
    return {made: DAGGERS[min(i, len(DAGGERS) - 1)] for i, made in enumerate(commits)}


def only_commit(table: Table) -> str:
    """The one commit that made every cell; empty where there are several."""
    made = {str(result["commit"]) for result in table.results}
    return made.pop() if len(made) == 1 else ""


def title(table: Table) -> str:
    """The table's one-line title."""
    seeds = max((len({cell.seed for cell in row.cells}) for row in table.rows), default=0)
    return f"{table.run.study.name} at scale {table.run.scale_name}: mean ± sd over {plural(seeds, 'seed')}"


def bold_note(table: Table) -> str:
    """What bold means, and which rows it leaves out."""
    apart = ", ".join(row.row.name for row in table.rows if row.row.reference)
    note = "Bold: the best row of a column, where it is better than chance"
    return f"{note}; {apart} left out, for reference only." if apart else f"{note}."


def footnotes(table: Table, failures: bool = True) -> list[str]:
    """What must be said beside the numbers: comparability, notes, errors, other commits, failures, gaps."""
    lines = []
    if not table.scale.comparable:
        lines.append(
            "The columns at this scale are small substitutes: only the order of rows, never a number, "
            "can be held against the paper's."
        )
    if table.scale.note:
        lines.append(" ".join(table.scale.note.split()))
    for row in table.rows:
        for key, expected in row.row.expected.items():
            way = "better" if expected.better else "worse"
            because = " ".join(expected.because.split())
            lines.append(f"Expected: {row.row.name}, {table.columns[key].title}: {way}. {because}")
    if any(found.above_chance is not None for found in discriminate(table)):
        lines.append(
            "Standard errors: the larger of what seeds and what items give; of items, half of Wilson's "
            "interval at one standard error, which is not 0 where all are right or all are wrong."
        )
    if table.side_by_side and table.timed:
        timed = ", ".join(table.columns[key].title for key in table.timed)
        lines.append(f"{timed}: timed while other cells ran on the same machine.")
    for made, mark in footmarks(table).items():
        lines.append(f"{mark} some cells were made by commit {commit(made)}; --rerun-stale redoes them.")
    if (made := only_commit(table)) not in ("", table.run.commit):
        here = commit(table.run.commit)
        lines.append(f"All cells were made by commit {commit(made)}; the code here is {here}.")
    for row in table.rows if failures else ():
        lines += [f"{row.row.name}: failed: {reason}" for reason in row.failures]
    if table.missing:
        has = "has" if table.missing == 1 else "have"
        cells = plural(table.missing, "cell")
        lines.append(f"{cells} {has} no result yet; the same sweep run makes only what is missing.")
    return lines


def summaries(table: Table) -> list[list[str]]:
    """How far each column tells the rows apart, in clauses that a line should not break."""
    return [_clauses(table, found) for found in discriminate(table)]


def _clauses(table: Table, found: Discrimination) -> list[str]:
    column = table.columns[found.column].title
    if found.best == found.worst:
        return [f"{column}: all rows are equal"]
    parts = [f"{column}: best {found.best}, worst {found.worst}"]
    if found.gap is not None:
        own = f"({number(found.pair_gap, 1)} by these two rows' own sd)"
        parts.append(f"{number(found.gap, 1)} pooled sd apart {own}")
    if found.above_chance is not None:
        side = "above" if found.above_chance >= 0 else "below"
        parts.append(f"{found.first} {number(abs(found.above_chance), 1)} standard errors {side} chance")
    return parts


@dataclass(frozen=True)
class Links:
    """Where runs can be looked at: the address of a running MLflow, and our experiment in it."""

    address: str
    experiment: str

    @property
    def cells(self) -> str:
        """The experiment's list of runs."""
        return f"{self.address}/#/experiments/{self.experiment}/runs"

    def run(self, run_id: str) -> str:
        """The page of one run."""
        return f"{self.address}/#/experiments/{self.experiment}/runs/{run_id}"

    def compare(self, run_ids: Sequence[str]) -> str:
        """One run's page, or several runs side by side."""
        if len(run_ids) == 1:
            return self.run(run_ids[0])
        runs, experiments = json.dumps(run_ids, separators=(",", ":")), json.dumps([self.experiment])
        return f"{self.address}/#/compare-runs?runs={runs}&experiments={experiments}"


def again(table: Table) -> str:
    """The command that makes the whole table from nothing."""
    changed = "".join(f" --set {shlex.quote(override)}" for override in table.run.overrides)
    seeds = ",".join(map(str, table.seeds))
    return f"titans sweep run {table.run.study.name} --scale {table.run.scale_name} --seeds {seeds}{changed}"


def facts(table: Table) -> dict[str, str]:
    """What the cells say of how they were made; where they differ, how many say what."""
    results = table.results
    named = {
        "commit": "commit",
        "data fingerprint": "data_fingerprint",
        "version of the evaluation": "eval_version",
    }
    found = {name: _counted(result.get(key) for result in results) for name, key in named.items()}
    made = [result.get("environment") or {} for result in results]
    found |= {name: _counted(each.get(name) for each in made) for each in made for name in each}
    trained, measured, tokens = (
        sum(float(result.get(key) or 0) for result in results)
        for key in ("train_seconds", "eval_seconds", "tokens")
    )
    return found | {
        "cells": f"{len(results)} of {len(results) + table.missing} done",
        "training": f"{tokens:,.0f} tokens in {trained / 3600:.2f} hours, summed over the cells",
        "measuring": f"{measured / 3600:.2f} hours",
    }


def _counted(values: Iterable[Any]) -> str:
    counts = Counter(str(value) for value in values if value is not None)
    if len(counts) <= 1:
        return next(iter(counts), "not recorded")
    return ", ".join(f"{value} ({count} cells)" for value, count in counts.most_common())


def configs(table: Table) -> dict[str, dict[str, str]]:
    """The fields that all rows share, and for each row those that differ between rows."""
    fields: dict[str, dict[str, str]] = {}
    for row in table.rows:
        leaves = flatten(row.cells[0].config.model_dump(mode="json", exclude={"seed"}))
        fields[row.row.name] = {k: v if isinstance(v, str) else json.dumps(v) for k, v in leaves.items()}
    named = dict.fromkeys(key for each in fields.values() for key in each)
    values = {key: {each.get(key, NONE) for each in fields.values()} for key in named}
    common = {key: next(iter(found)) for key, found in values.items() if len(found) == 1}
    own = {
        name: {key: each[key] for key in named if key in each and key not in common}
        for name, each in fields.items()
    }
    return {"all rows": common} | own
