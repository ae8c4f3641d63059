"""The report as one HTML page that needs nothing beside it: table, figures, where the numbers come from."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from titans_platform.report import origin
from titans_platform.report.export import cells_csv, latex, summary_csv
from titans_platform.report.origin import Links
from titans_platform.report.palette import DARK, LIGHT
from titans_platform.report.picture import Picture
from titans_platform.report.plot import Line
from titans_platform.report.render import (
    count,
    footmarks,
    footnotes,
    has_paper,
    number,
    only_commit,
    short,
    summary_lines,
)
from titans_platform.report.svg import svg
from titans_platform.report.table import Entry, Table, TableRow, Unfinished, best_rows

CROWDED = 4
"""Columns from which the paper's numbers stand below ours, not beside them."""
WIDTH = 5.7
"""Letters of the page (rem) to an inch of a figure: its small print is a little smaller than the text."""
TEMPLATES = Path(__file__).parent / "templates"
MARKS = {
    "o": '<circle cx="12" cy="5" r="2.6"/>',
    "s": '<rect x="9.6" y="2.6" width="4.8" height="4.8"/>',
    "^": '<path d="M12 1.8 15 7.6H9z"/>',
    "D": '<path d="M12 1.6 15.4 5 12 8.4 8.6 5z"/>',
    "v": '<path d="M12 8.2 9 2.4h6z"/>',
    "P": '<path d="M10.8 2h2.4v1.8H15v2.4h-1.8V8h-2.4V6.2H9V3.8h1.8z"/>',
}


@dataclass(frozen=True)
class Extras:
    """What a page shows beside the table: figures, links, the commands that were called."""

    pictures: Sequence[Picture] = ()
    links: Links | None = None
    local: bool = True
    """Whether the links lead to where `titans ui` listens, not to a server that is always there."""
    commands: Sequence[str] = field(default_factory=tuple)
    notes: Sequence[str] = field(default_factory=tuple)
    """What is to be said below the table besides its own notes."""


def html(table: Table, extras: Extras) -> str:
    """The whole page."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals.update(fields=_fields, changes=_changes)
    return environment.get_template("report.html").render(
        **_head(table),
        **_results(table, extras),
        **_made(table, extras),
        figures=_figures(extras.pictures),
    )


def _head(table: Table) -> dict[str, Any]:
    done = sum(len(row.results) for row in table.rows)
    seeds = sorted({cell.seed for row in table.rows for cell in row.cells})
    plural = "s" if len(seeds) != 1 else ""
    written = time.strftime("%-d %B %Y, %H:%M UTC", time.gmtime())
    return {
        "title": f"{table.study.name} at scale {table.scale_name}",
        "name": table.study.name.replace("_", " ").capitalize(),
        "scale": table.scale_name,
        "about": " ".join(table.study.description.split()),
        "meta": [
            f"{done} of {done + table.missing} cells",
            f"{len(table.rows)} rows",
            f"seed{plural} {', '.join(map(str, seeds))}",
            written,
        ],
        "caption": _caption(table, len(seeds)),
        "light": LIGHT,
        "dark": DARK,
        "css": Markup(_template("report.css")),
        "script": Markup(_template("report.js")),
        "footer": f"Written by titans sweep report on {written}. Nothing here is loaded from elsewhere.",
    }


def _template(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _caption(table: Table, seeds: int) -> str:
    spread = f"Mean ± standard deviation over {seeds} seeds" if seeds > 1 else "One seed"
    where = "below" if len(table.study.columns) > CROWDED else "beside"
    paper = (
        f"; the paper's numbers {where} ours"
        if any(has_paper(table, key) for key in table.study.columns)
        else ""
    )
    return f"{spread}{paper}. Bold: the best of the column. A number leads to its runs."


def _paired(table: Table) -> dict[str, bool]:
    """Which columns have a second one with the paper's numbers."""
    crowded = len(table.study.columns) > CROWDED
    return {key: has_paper(table, key) and not crowded for key in table.study.columns}


def _results(table: Table, extras: Extras) -> dict[str, Any]:
    columns, links = table.study.columns, extras.links
    paired = _paired(table)
    best = {key: best_rows(table, key) for key in columns}
    marks = footmarks(table)
    return {
        "heads": [
            {
                "text": f"{column.title} ({column.unit})" if column.unit else column.title,
                "arrow": "↑" if column.higher_is_better else "↓",
                "better": "higher is better" if column.higher_is_better else "lower is better",
                "span": 1 + paired[key],
            }
            for key, column in columns.items()
        ],
        "rows": [
            {
                "name": row.row.name,
                "marks": sorted({marks[commit] for commit in row.stale if commit in marks}),
                "reference": row.row.reference,
                "cells": [_number(table, row, key, paired[key], best[key], links) for key in columns],
                **_sizes(row),
            }
            for row in table.rows
        ],
        "chance": _chance(table, paired),
        "dense": len(columns) > CROWDED,
        "doubled": any(paired.values()),
        "notes": [*footnotes(table, failures=False), *extras.notes],
        "failures": [
            {"row": cell.cell.row, "seed": cell.cell.seed, "reason": cell.reason}
            for row in table.rows
            for cell in row.unfinished
            if cell.reason
        ],
        "findings": summary_lines(table),
    }


def _number(
    table: Table, row: TableRow, key: str, paired: bool, best: Iterable[str], links: Links | None
) -> dict[str, Any]:
    entry, column = row.entries[key], table.study.columns[key]
    runs = [str(result["mlflow_run_id"]) for result in row.results if result.get("mlflow_run_id")]
    return {
        "mean": _mean(entry, row, column.decimals),
        "sd": None if entry.sd is None else number(entry.sd, column.decimals),
        "wide": _spread_width(table, key),
        "seeds": f"{len(entry.values)}/{entry.wanted}" if len(entry.values) < entry.wanted else "",
        "hint": "seeds: " + ", ".join(number(value, column.decimals) for value in entry.values),
        "value": "" if entry.mean is None else entry.mean,
        "best": row.row.name in best,
        "gap": entry.mean is None,
        "link": links.compare(runs) if links and runs and entry.mean is not None else None,
        "paired": paired,
        "paper": number(entry.paper, 2),
        "below": "" if paired or entry.paper is None else number(entry.paper, column.decimals),
        "printed": "" if entry.paper is None else entry.paper,
    }


def _spread_width(table: Table, key: str) -> int:
    """Letters of a column's widest spread, so that its means stand below each other."""
    decimals = table.study.columns[key].decimals
    entries = (row.entries[key] for row in table.rows)
    spreads = [len(number(entry.sd, decimals)) for entry in entries if entry.sd is not None]
    return 2 + max(spreads) if spreads else 0


def _mean(entry: Entry, row: TableRow, decimals: int) -> str:
    if entry.mean is not None:
        return number(entry.mean, decimals)
    return "failed" if row.failures else "missing"


def _sizes(row: TableRow) -> dict[str, Any]:
    parameters, state = row.figure_of("parameters"), row.figure_of("state_bytes")
    return {
        "parameters": count(parameters),
        "state": count(state),
        "size": parameters or "",
        "bytes": state or "",
    }


def _chance(table: Table, paired: Mapping[str, bool]) -> list[dict[str, Any]]:
    if not table.chance:
        return []
    return [
        {
            "text": number(table.chance.get(key), column.decimals),
            "paired": paired[key],
            "wide": _spread_width(table, key),
        }
        for key, column in table.study.columns.items()
    ]


def _figures(pictures: Iterable[Picture]) -> list[dict[str, Any]]:
    return [
        {
            "key": picture.key,
            "title": picture.title,
            "caption": picture.caption,
            "width": round(WIDTH * picture.size[0], 1),
            "kind": "small" if picture.size[0] < 3 and len(picture.panels) > 1 else "",
            "panels": [
                Markup(svg(panel, picture.size, f"{picture.key}-{i}"))
                for i, panel in enumerate(picture.panels)
            ],
            "legend": [{"label": line.label, "mark": _mark(line)} for line in picture.legend],
        }
        for picture in pictures
    ]


def _mark(line: Line) -> Markup:
    """A line and its marker, as in the figure."""
    stroke = f'<path d="M0 5H24" stroke="var(--{line.colour})" stroke-width="1.6"/>'
    return Markup(
        f'<svg viewBox="0 0 24 10" aria-hidden="true"><g fill="var(--{line.colour})">{stroke}'
        f"{MARKS.get(line.marker, '')}</g></svg>"
    )


def _made(table: Table, extras: Extras) -> dict[str, Any]:
    common, own = origin.configs(table)
    return {
        "again": origin.again(table),
        "commands": extras.commands,
        "commit": short(only_commit(table)),
        "facts": origin.facts(table),
        "common": common,
        "configs": own,
        "address": extras.links.address if extras.links else "",
        "listed": extras.links.cells if extras.links else "",
        "local": extras.local,
        "runs": [run for row in table.rows for run in _runs(table, row, extras.links)],
        "sources": {
            "LaTeX (booktabs)": latex(table),
            "CSV, a line a row and column": summary_csv(table),
            "CSV, a line a cell": cells_csv(table),
        },
    }


def _runs(table: Table, row: TableRow, links: Links | None) -> list[dict[str, Any]]:
    """Every cell of a row in the order of seeds, with what became of it."""
    results = {str(result["cell"]): result for result in row.results}
    unfinished = {cell.cell.name: cell for cell in row.unfinished}
    return [
        _done(table, row, results[str(cell.name)], links)
        if str(cell.name) in results
        else _gap(row, unfinished[cell.name])
        for cell in row.cells
    ]


def _done(table: Table, row: TableRow, result: Mapping[str, Any], links: Links | None) -> dict[str, Any]:
    run, seconds = result.get("mlflow_run_id"), float(result.get("train_seconds") or 0)
    values = [
        (column, result["columns"].get(key)) for key, column in table.study.columns.items()
    ]  # fmt: skip
    return {
        "row": row.row.name,
        "seed": result["seed"],
        "numbers": [
            {
                "value": "" if value is None else value,
                "text": number(value and column.factor * value, column.decimals),
            }
            for column, value in values
        ],
        "seconds": seconds,
        "time": f"{seconds:.0f} s",
        "cell": result["cell"],
        "id": run or "—",
        "link": links.run(str(run)) if links and run else None,
        "commit": short(str(result["commit"])),
    }


def _gap(row: TableRow, cell: Unfinished) -> dict[str, Any]:
    return {
        "row": row.row.name,
        "seed": cell.cell.seed,
        "state": cell.state,
        "reason": cell.reason,
        "cell": cell.cell.name,
        "id": "—",
        "commit": "—",
    }


def _fields(values: Mapping[str, str]) -> Markup:
    pairs = "".join(
        f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in values.items()
    )
    return Markup(f'<dl class="fields">{pairs}</dl>')


def _changes(values: Mapping[str, str]) -> str:
    shown = [f"{key.rpartition('.')[2]} {value}" for key, value in values.items()][:6]
    return ", ".join(shown) + (", …" if len(values) > 6 else "")
