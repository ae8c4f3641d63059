"""A report as CSV, LaTeX, Markdown, lines for a terminal; a table as JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from titans_platform import text
from titans_platform.report import render
from titans_platform.report.report import DAGGERS, Section, StudyReport
from titans_platform.report.table import SIZES, Entry, Table
from titans_platform.text import NONE, count, plural

if TYPE_CHECKING:
    from pandas import DataFrame

SIGNS = str.maketrans({
    "↑": r"$\uparrow$", "↓": r"$\downarrow$", "±": r"$\pm$", "·": r"$\cdot$", NONE: "--", "<": "$<$",
    ">": "$>$", "³": "$^3$",
    **dict(zip(DAGGERS, (r"$\dagger$", r"$\ddagger$", r"\S{}", r"\P{}"), strict=True)),
})  # fmt: skip
"""Signs that a LaTeX font may lack."""
Keys = Sequence[str] | None
"""Some of the table's columns; None: all."""
SHORTEST = 12
"""Minimum width of a row's name in a terminal, where longer ones are wrapped."""
CELL = (
    "cell", "seed", "commit", "mlflow_run_id", "finished", "train_seconds", "eval_seconds", "tokens",
)  # fmt: skip


def tables(report: StudyReport) -> dict[str, str]:
    """CSV files by name, in the columns' units.

    ``table.csv``: a line for each row and column: mean, sd, seeds done, the paper's number. ``cells.csv``: a
    line for each finished cell. ``verdict.csv``: a line for each row and column against the first row.
    """
    from pandas import DataFrame

    columns, chance, floors = report.table.columns, report.table.chance, report.table.floors
    summary, cells, verdict = [], [], []
    for row in report.table.rows:
        for key, e in row.entries.items():
            numbers = {"mean": e.mean, "sd": e.sd, "seeds": len(e.values), "chance": chance.get(key)}
            numbers["floor"] = floors.get(key)
            summary.append({"row": row.row.name, "column": key, **numbers, "paper": e.paper, **row.sizes})
        for result in row.results:
            # the cell's own row, where a row of the table joins several
            line = {"row": result.row or row.row.name, "lr": result.config.get("optim", {}).get("lr")}
            line |= {name: getattr(result, name) for name in CELL}
            for key, column in columns.items():
                value = result.columns.get(key)
                line[column.titled(key)] = None if value is None else column.factor * value
            cells.append(line)
    for each in report.comparisons:
        ours, (low, high) = each.ours, each.ours.interval or (None, None)
        verdict.append({
            "row": each.row, "column": each.column, "baseline": each.baseline, "difference": ours.mean,
            "low": low, "high": high, "pairs": len(ours.pairs), "p": ours.p, "p_holm": each.p,
            "paper difference": each.paper, "verdict": each.outcome,
            "expected because": each.expected.because if each.expected else None,
        })  # fmt: skip
    named = {"table.csv": summary, "cells.csv": cells, "verdict.csv": verdict}
    # objects, so that a whole number beside a missing one stays whole
    return {name: DataFrame(lines, dtype=object).to_csv(index=False) for name, lines in named.items()}


def as_record(table: Table) -> dict[str, Any]:
    """Return the table as a JSON value: means, spreads, the paper's numbers, cells."""
    rows = []
    for row in table.rows:
        columns = {}
        for key, e in row.entries.items():
            columns[key] = {"mean": e.mean, "sd": e.sd, "seeds": len(e.values), "paper": e.paper}
        listed = {"cells": [c.name for c in row.cells], "failures": [c.reason for c in row.failures]}
        rows.append({"row": row.row.name, "columns": columns, **row.sizes, **listed})
    return {
        "study": table.study, "scale": table.scale, "comparable": table.comparable, "rows": rows,
        "chance": table.chance, "floors": table.floors, "missing": table.missing,
    }  # fmt: skip


def body(
    report: StudyReport,
    keys: Keys = None,
    ours: Callable[[Entry, bool], str] = lambda entry, best: str(entry),
) -> list[list[str]]:
    """Return the lines of the table: name, ours and the paper's of each column, the columns of SIZES.

    ``ours`` takes an entry, and whether it is the best of its column.
    """
    lines = []
    for name, row in zip(report.names(), report.table.rows, strict=True):
        texts = [
            row.entries[key].paper_text if paper else ours(row.entries[key], row.row.name in report.best[key])
            for key, paper in report.fields(keys)
        ]
        lines.append([name, *texts, *map(count, row.sizes.values())])
    return lines


def _levels(report: StudyReport, keys: Keys = None) -> list[list[str]]:
    """Return chance and floor of each column, laid out as lines of the body."""
    fields = report.fields(keys)
    return [
        [name, *("" if paper else level[key] for key, paper in fields), *[""] * len(SIZES)]
        for name, level in report.levels.items()
    ]


def latex(report: StudyReport) -> str:
    """Render the table and the further tables with booktabs: mean and sd, a column's best in bold."""
    from pandas import DataFrame, MultiIndex

    columns = report.table.columns
    heads = [(columns[key].heading, "paper" if paper else "ours") for key, paper in report.fields()]
    index = MultiIndex.from_tuples([("", ""), *heads, *((head, "") for head in SIZES.values())])
    frame = DataFrame([*body(report, ours=_tex_number), *_levels(report)], columns=index)
    caption = " ".join([f"{report.title}.", report.bold_note, *report.footnotes])
    tables = [(frame, caption), *((DataFrame(s.lines, columns=s.heads), s.text) for s in report.sections)]
    label = f"tab:{report.table.study}-{report.table.scale}"
    texts = [_tex(frame, text, f"{label}-{i}" if i else label) for i, (frame, text) in enumerate(tables)]
    return "\n".join([r"% \usepackage{booktabs}", *texts])


def _tex_number(entry: Entry, best: bool) -> str:
    if not entry.values:
        return entry.mean_text
    mean = rf"\mathbf{{{entry.mean_text}}}" if best else entry.mean_text
    spread = rf"_{{\pm {entry.sd_text}}}" if entry.sd_text else ""
    return f"${mean}{spread}$" if entry.above_floor else f"$({mean}{spread})$"


def _tex(frame: DataFrame, caption: str, label: str) -> str:
    style: Any = frame.style.hide(axis="index").format(escape="latex-math")
    options: dict[str, Any] = {"position": "t", "position_float": "centering", "multicol_align": "c"}
    options |= {"caption": re.sub(r"([&%$#_{}])", r"\\\1", caption), "label": label, "hrules": True}
    options["column_format"] = "l" + "r" * (frame.shape[1] - 1)
    return style.format_index(escape="latex", axis=1).to_latex(**options).translate(SIGNS)


def markdown(report: StudyReport, figures: str = "") -> str:
    """Render the table as Markdown with its notes, and the cell and run of each number.

    ``figures`` is the folder of the report's figures; empty: without them.
    """
    heads = ["paper" if paper else report.table.columns[key].heading for key, paper in report.fields()]
    values = {"body": body(report), "levels": _levels(report), "figures": figures}
    return render("table.md", report=report, heads=["", *heads, *SIZES.values()], **values)


def terminal(report: StudyReport, width: int = 80) -> RenderableType:
    """Lay out the table and the further tables for a terminal; no number is cut at 80 columns.

    Columns that do not fit beside each other are split into several tables.
    """
    grids = _fitting(report, width)
    notes = [Text(note, style="dim") for note in report.footnotes]
    return Group(report.title, *grids, *map(_section, report.sections), "", *notes)


def so_far(report: StudyReport, seeds: int, width: int = 80) -> RenderableType:
    """Lay out the table of a study that still runs, of which so many seeds are finished in every row."""
    grids = _fitting(report, width)
    says = "one seed has no spread, so that no difference is resolved" if seeds == 1 else "paired by seed"
    finished = f"{report.table.study}, {seeds} of {plural(len(report.table.seeds), 'seed')} finished: {says}"
    return Group("", finished, *grids)


def _section(section: Section) -> RenderableType:
    compact = {"padding": (0, 1, 0, 0), "show_edge": False}
    grid = text.table(*section.heads, left=len(section.heads), vertical="bottom", **compact)
    for line in section.lines:
        # without intervals, which 80 columns do not hold
        grid.add_row(*(re.sub(r" \[.*?\]", "", each) for each in line))
    return Group("", section.title, grid, Text(section.text, style="dim"))


def _fitting(report: StudyReport, width: int) -> list[RichTable]:
    """Return one table; or the columns in one or several, and the sizes of the models in another."""
    keys = list(report.table.columns)
    whole = _grid(report, keys, width, sizes=True)
    return [whole] if _fits(whole, width) else [*_split(report, keys, width), _grid(report, [], width, True)]


def _fits(grid: RichTable, width: int) -> bool:
    return Console(width=1000).measure(grid).minimum <= width


def _split(report: StudyReport, keys: list[str], width: int) -> list[RichTable]:
    grid, half = _grid(report, keys, width, sizes=False), (len(keys) + 1) // 2
    if len(keys) < 2 or _fits(grid, width):
        return [grid]
    return _split(report, keys[:half], width) + _split(report, keys[half:], width)


def _grid(report: StudyReport, keys: Sequence[str], width: int, sizes: bool) -> RichTable:
    """Lay out a table of these columns; only the names of rows are wrapped."""
    columns = report.table.columns
    grid = RichTable(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1) if width >= 100 else 0, show_edge=False)
    longest = max(map(len, report.names()), default=0)
    grid.add_column("", vertical="bottom", min_width=min(SHORTEST, longest))
    heads = []
    for column, paper in ((columns[key], paper) for key, paper in report.fields(keys)):
        # a word a line, to fit 80 columns
        stacked = "\n".join([*column.title.split(), f"{column.unit} {column.arrow}".strip()])
        heads.append(("paper", "dim") if paper else (stacked, ""))
    if sizes:
        heads += [(head.replace("param", "para-\nm").replace(" ", "\n"), "") for head in SIZES.values()]
    for head, style in heads:
        grid.add_column(head, justify="right", style=style, no_wrap=True, vertical="bottom")
    kept = None if sizes else -len(SIZES)
    for row, line in zip(report.table.rows, body(report, keys), strict=True):
        grid.add_row(*line[:kept], style="dim" if row.row.reference else "")
    grid.add_section()
    for line in _levels(report, keys) if keys else ():
        grid.add_row(*line[:kept], style="italic dim")
    return grid
