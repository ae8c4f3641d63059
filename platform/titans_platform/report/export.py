"""A report as CSV, LaTeX, Markdown, lines for a terminal; a table as JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from titans_platform import text
from titans_platform.report import render
from titans_platform.report.report import DAGGERS, SIZES, Number, Report
from titans_platform.report.table import Table
from titans_platform.text import NONE, count

ESCAPES = str.maketrans({
    **{sign: f"\\{sign}" for sign in "&%$#_{}"}, "\\": r"\textbackslash{}", "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "±": r"$\pm$", "·": r"$\cdot$",
    NONE: "--", "<": "$<$", ">": "$>$", "³": "$^3$",
    **dict(zip(DAGGERS, (r"$\dagger$", r"$\ddagger$", r"\S{}", r"\P{}"), strict=True)),
})  # fmt: skip
COMPACT: dict[str, Any] = {"vertical": "bottom", "padding": (0, 1, 0, 0), "show_edge": False}
Keys = Sequence[str] | None
"""Some of the table's columns; None: all."""
SHORTEST = 12
"""Minimum width of a row's name in a terminal, where longer ones are wrapped."""


def summary_csv(report: Report) -> str:
    """A line for each row and column, in the column's unit: mean, sd, seeds done, the paper's number."""
    lines: list[list[Any]] = [["row", "column", "mean", "sd", "seeds", "chance", "paper", *SIZES]]
    for row in report.rows:
        for key, entry in ((key, number.entry) for key, number in row.numbers.items()):
            numbers = [entry.mean, entry.sd, len(entry.values), report.table.chance.get(key), entry.paper]
            lines.append([row.name, key, *numbers, *row.sizes.values()])
    return _csv(lines)


def cells_csv(report: Report) -> str:
    """A line for each finished cell: its folder and what it measured, in the columns' units."""
    columns = report.table.columns
    names = ["cell", "seed", "commit", "mlflow_run_id", "train_seconds", "eval_seconds", "tokens"]
    lines: list[list[Any]] = [["row", *names, *(column.titled(key) for key, column in columns.items())]]
    for row in report.rows:
        for result in row.results:
            values = ((column.factor, result.columns.get(key)) for key, column in columns.items())
            numbers = [value if value is None else factor * value for factor, value in values]
            # the cell's own row, where a row of the table joins several
            lines.append([result.row or row.name, *(getattr(result, name) for name in names), *numbers])
    return _csv(lines)


def verdict_csv(report: Report) -> str:
    """A line for each row and column against the first row, in the column's unit."""
    heads = ["row", "column", "baseline", "difference", "low", "high", "pairs", "p", "p_holm"]
    lines: list[list[Any]] = [[*heads, "paper difference", "verdict", "expected because"]]
    for each in report.comparisons:
        ours, because = each.ours, each.expected.because if each.expected else None
        numbers = [ours.mean, *(ours.interval or (None, None)), len(ours.pairs), ours.p, each.p, each.paper]
        lines.append([each.row, each.column, each.baseline, *numbers, each.outcome, because])
    return _csv(lines)


def pathways_csv(report: Report) -> str:
    """A line for each row and part that was switched off: the mean of each column, in its unit."""
    found = report.pathways
    heads, lines = (found.heads, found.lines) if found else ((), ())
    return _csv([["row", "part", *heads], *([row, part, *values] for row, part, values in lines)])


def _csv(lines: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    # None is written as an empty field
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue()


def as_record(table: Table) -> dict[str, Any]:
    """The table as a JSON value: means, spreads, the paper's numbers, cells."""
    rows = []
    for row in table.rows:
        columns = {}
        for key, e in row.entries.items():
            columns[key] = {"mean": e.mean, "sd": e.sd, "seeds": len(e.values), "paper": e.paper}
        sizes = {key: row.size_of(key) for key in SIZES}
        cells = {"cells": [cell.name for cell in row.cells], "failures": list(row.failures)}
        rows.append({"row": row.row.name, "columns": columns, **sizes, **cells})
    return {
        "study": table.study, "scale": table.scale, "comparable": table.comparable, "rows": rows,
        "chance": table.chance, "missing": table.missing,
    }  # fmt: skip


def body(report: Report, keys: Keys = None, ours: Callable[[Number], str] = str) -> list[list[str]]:
    """The lines of the table: name, ours and the paper's number of each column, parameters, state bytes."""
    lines = []
    for row in report.rows:
        numbers = [(row.numbers[key], paper) for key, paper in report.fields(keys)]
        texts = [number.paper if paper else ours(number) for number, paper in numbers]
        lines.append([row.name + row.marks, *texts, *map(count, row.sizes.values())])
    return lines


def _chance(report: Report, keys: Keys = None) -> list[str]:
    """The chance level of each column, laid out as a line of the body."""
    return ["chance", *("" if paper else report.chance[key] for key, paper in report.fields(keys)), "", ""]


def latex(report: Report) -> str:
    """The table with booktabs: mean and sd, the best of a column in bold, the paper's; the verdict."""
    found, lines = report.verdict, body(report, ours=_tex_number)
    return render(
        "table.tex", report=report,
        body=[[each if each.startswith("$") else tex(each) for each in line] for line in lines],
        chance=[tex(each) for each in _chance(report)[1:]],
        verdict=[[tex(each) for each in line] for line in (found.heads, *found.body)] if found else [],
        tex=tex,
    )  # fmt: skip


def tex(plain: str) -> str:
    """Text with LaTeX's special characters escaped."""
    return plain.translate(ESCAPES)


def _tex_number(found: Number) -> str:
    if not found.mean[-1].isdigit():
        return found.mean
    mean = f"\\mathbf{{{found.mean}}}" if found.best else found.mean
    spread = f"_{{\\pm {found.sd}}}" if found.sd else ""
    return f"${mean}{spread}$"


def markdown(report: Report, figures: str = "") -> str:
    """The table as Markdown with its notes, and the cell and run of each number.

    ``figures`` is the folder of the report's figures; empty: without them.
    """
    heads = ["paper" if paper else report.table.columns[key].heading for key, paper in report.fields()]
    values = {"body": body(report), "chance": _chance(report), "figures": figures}
    return render("table.md", report=report, heads=["", *heads, "parameters", "state bytes"], **values)


def terminal(report: Report, width: int = 80) -> RenderableType:
    """The table and verdict for a terminal; no number is cut at 80 columns.

    Columns that do not fit beside each other are split into several tables.
    """
    grids = _fitting(report, list(report.table.columns), width)
    notes = [Text(note, style="dim") for note in report.footnotes]
    return Group(report.title, *grids, *_verdict(report), *_pathways(report), "", *notes)


def _pathways(report: Report) -> list[RenderableType]:
    if (found := report.pathways) is None:
        return []
    grid, before = text.table("", "", *found.heads, left=2, **COMPACT), ""
    for row, part, values in found.lines:
        grid.add_row("" if row == before else row, part, *values)
        before = row
    return ["", "Which part the answers came from", grid, Text(found.explained, style="dim")]


def _verdict(report: Report) -> list[RenderableType]:
    if (found := report.verdict) is None:
        return []
    grid = text.table(*found.heads, left=len(found.heads), **COMPACT)
    for row, cells in found.rows:
        # without the interval, which 80 columns do not hold
        shown = [" ".join(filter(None, (each.difference, each.p, each.outcome))) for each in cells]
        grid.add_row(row, *shown)
    return ["", found.sentence, grid, Text(found.method, style="dim")]


def _fitting(report: Report, keys: list[str], width: int) -> list[RichTable]:
    """One table, or several of fewer columns; the last has the sizes of the models."""
    grid = _grid(report, keys, width)
    if len(keys) < 2 or Console(width=1000).measure(grid).minimum <= width:
        return [grid]
    half = (len(keys) + 1) // 2
    return _fitting(report, keys[:half], width) + _fitting(report, keys[half:], width)


def _grid(report: Report, keys: Sequence[str], width: int) -> RichTable:
    """A table of these columns; only the names of rows are wrapped."""
    columns = report.table.columns
    grid = RichTable(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1) if width >= 100 else 0, show_edge=False)
    longest = max((len(row.name + row.marks) for row in report.rows), default=0)
    grid.add_column("", vertical="bottom", min_width=min(SHORTEST, longest))
    heads = []
    for column, paper in ((columns[key], paper) for key, paper in report.fields(keys)):
        # a word a line, to fit 80 columns
        stacked = "\n".join([*column.title.split(), f"{column.unit} {column.arrow}".strip()])
        heads.append(("paper", "dim") if paper else (stacked, ""))
    last = keys[-1] == list(columns)[-1]
    heads += [("para-\nmeters", ""), ("state\nbytes", "")] if last else []
    for head, style in heads:
        grid.add_column(head, justify="right", style=style, no_wrap=True, vertical="bottom")
    kept = None if last else -2
    for row, line in zip(report.rows, body(report, keys), strict=True):
        grid.add_row(*line[:kept], style="dim" if row.reference else "")
    grid.add_section()
    grid.add_row(*_chance(report, keys)[:kept], style="italic dim")
    return grid
