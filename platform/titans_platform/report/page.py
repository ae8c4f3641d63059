"""The report as one HTML page that needs nothing beside it: table, figures, where the numbers come from."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from titans_platform.report import content, headings, origin
from titans_platform.report.export import cells_csv, latex, summary_csv
from titans_platform.report.origin import Links
from titans_platform.report.palette import DARK, LIGHT
from titans_platform.report.picture import Line, Picture, svg
from titans_platform.report.table import Table, TableRow
from titans_platform.text import NONE, commit, count, number, plural

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
    """Whether the links go to where `titans ui` listens, not to a server that is always there."""
    commands: Sequence[str] = ()
    notes: Sequence[str] = ()
    """Notes below the table besides its own."""


def html(table: Table, extras: Extras) -> str:
    """The whole page."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(number=number, count=count, commit=commit)
    environment.globals.update({name: getattr(headings, name) for name in ("titled", "arrow", "better")})
    crowded, columns = len(table.study.columns) > CROWDED, table.study.columns
    common, own = origin.configs(table)
    return environment.get_template("report.html").render(
        table=table,
        columns=columns,
        extras=extras,
        links=extras.links,
        light=LIGHT,
        dark=DARK,
        css=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
        script=Markup((TEMPLATES / "report.js").read_text(encoding="utf-8")),
        written=time.strftime("%-d %B %Y, %H:%M UTC", time.gmtime()),
        seeds=plural(len(table.seeds), "seed").partition(" ")[2],
        caption=_caption(table, crowded),
        crowded=crowded,
        paired={key: content.has_paper(table, key) and not crowded for key in columns},
        shown=partial(content.shown, table),
        widths={key: _spread_width(table, key) for key in columns},
        marks=partial(content.marks_of, table),
        runs_of=_runs_of,
        notes=[*content.footnotes(table, failures=False), *extras.notes],
        findings=list(map("; ".join, content.summaries(table))),
        failures=[gap for row in table.rows for gap in row.unfinished if gap.reason],
        results={result["cell"]: result for result in table.results},
        gaps={(row.row.name, gap.cell.seed): gap for row in table.rows for gap in row.unfinished},
        figures=list(map(_figure, extras.pictures)),
        again=origin.again(table),
        made=content.only_commit(table),
        facts=origin.facts(table),
        configs={"all rows": common, **own},
        sources={
            "LaTeX (booktabs)": latex(table),
            "CSV, a line a row and column": summary_csv(table),
            "CSV, a line a cell": cells_csv(table),
        },
        none_sign=NONE,
    )


def _caption(table: Table, crowded: bool) -> str:
    seeds = len(table.seeds)
    spread = f"Mean ± standard deviation over {seeds} seeds" if seeds > 1 else "One seed"
    paper = f"; the paper's numbers {'below' if crowded else 'beside'} ours"
    printed = any(content.has_paper(table, key) for key in table.study.columns)
    return f"{spread}{paper if printed else ''}. {content.bold_note(table)} A number links to its runs."


def _spread_width(table: Table, key: str) -> int:
    """Letters of a column's widest spread, so that its means stand below each other."""
    spreads = [len(content.shown(table, row, key).sd) for row in table.rows]
    return 2 + max(spreads) if any(spreads) else 0


def _runs_of(row: TableRow) -> list[str]:
    """The MLflow runs of a row's cells."""
    return [str(result["mlflow_run_id"]) for result in row.results if result.get("mlflow_run_id")]


def _figure(picture: Picture) -> dict[str, Any]:
    drawn = [svg(panel, picture.size, f"{picture.key}-{i}") for i, panel in enumerate(picture.panels)]
    return {
        "picture": picture,
        "width": round(WIDTH * picture.size[0], 1),
        "kind": "small" if picture.size[0] < 3 and len(picture.panels) > 1 else "",
        "panels": list(map(Markup, drawn)),
        "legend": list(_legend(picture.legend)),
    }


def _legend(lines: Iterable[Line]) -> Iterable[tuple[Markup, str]]:
    """Each line with its marker, as in the figure, and its name."""
    for line in lines:
        stroke = f'<path d="M0 5H24" stroke="var(--{line.colour})" stroke-width="1.6"/>'
        mark = f'<g fill="var(--{line.colour})">{stroke}{MARKS.get(line.marker, "")}</g>'
        yield Markup(f'<svg viewBox="0 0 24 10" aria-hidden="true">{mark}</svg>'), line.label
