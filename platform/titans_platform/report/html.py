"""A report as one HTML page that needs no other file, and the page of all the paper's tables."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from titans_platform.report.export import cells_csv, latex, summary_csv
from titans_platform.report.figures.picture import DARK, LIGHT, Line, Picture, svg
from titans_platform.report.report import Report
from titans_platform.text import NONE, commit, count, number, plural

CROWDED = 4
"""With more columns the paper's numbers are below ours, not beside them."""
WIDTH = 5.7
"""Width of a figure on the page, in rem per inch."""
MARKS = {
    "o": '<circle cx="12" cy="5" r="2.6"/>',
    "s": '<rect x="9.6" y="2.6" width="4.8" height="4.8"/>',
    "^": '<path d="M12 1.8 15 7.6H9z"/>',
    "D": '<path d="M12 1.6 15.4 5 12 8.4 8.6 5z"/>',
    "v": '<path d="M12 8.2 9 2.4h6z"/>',
    "P": '<path d="M10.8 2h2.4v1.8H15v2.4h-1.8V8h-2.4V6.2H9V3.8h1.8z"/>',
}


def render(template: str, **values: Any) -> str:
    """Render a template of this folder with ``values``, the palettes and the time."""
    written = time.strftime("%-d %B %Y, %H:%M UTC", time.gmtime())
    return _templates().get_template(template).render(light=LIGHT, dark=DARK, written=written, **values)


@cache
def _templates() -> Environment:
    loader = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(number=number, count=count, commit=commit)
    environment.globals.update(none_sign=NONE)
    return environment


def report_page(report: Report) -> str:
    """The page of one study."""
    return render(
        "report.html",
        report=report,
        table=report.table,
        columns=report.table.columns,
        results_table=results_table(report),
        links=report.links,
        seeds=plural(len(report.table.seeds), "seed").partition(" ")[2],
        figures=list(map(figure, report.pictures)),
        sources={
            "LaTeX (booktabs)": latex(report),
            "CSV, a line a row and column": summary_csv(report),
            "CSV, a line a cell": cells_csv(report),
        },
    )


def paper_page(source: str, sections: Sequence[Mapping[str, Any]]) -> str:
    """The page of all the paper's tables: of each section its name, item, reports, and printed numbers."""
    drawn = [
        {
            **section,
            "views": [
                {
                    "report": report,
                    "table": results_table(report, f"{section['name']}, scale {report.table.scale}"),
                    "figures": list(map(figure, report.pictures)) if report.table.results else [],
                }
                for report in section["reports"]
            ],
        }
        for section in sections
    ]
    return render("paper.html", source=source, sections=drawn)


def results_table(report: Report, heading: str = "Table 1") -> Markup:
    """A study's table, with the paper's numbers beside or below ours."""
    columns = report.table.columns
    crowded = len(columns) > CROWDED
    spreads = {key: max((len(row.numbers[key].sd) for row in report.rows), default=0) for key in columns}
    text = render(
        "results_table.html",
        report=report,
        table=report.table,
        columns=columns,
        links=report.links,
        heading=heading,
        place=re.sub(r"\W+", "-", heading.lower()),
        caption=_caption(report, crowded),
        crowded=crowded,
        paired={key: key in report.paper_columns and not crowded for key in columns},
        # characters of the widest sd of a column, to align its means
        widths={key: 2 + spread if spread else 0 for key, spread in spreads.items()},
    )
    return Markup(text)


def _caption(report: Report, crowded: bool) -> str:
    seeds = len(report.table.seeds)
    spread = f"Mean ± standard deviation over {seeds} seeds" if seeds > 1 else "One seed"
    paper = f"; the paper's numbers {'below' if crowded else 'beside'} ours" if report.paper_columns else ""
    linked = " A number links to its runs." if report.links else ""
    return f"{spread}{paper}. {report.bold_note}{linked}"


def figure(picture: Picture) -> dict[str, Any]:
    """Template values of a figure: its panels as SVG, and the legend."""
    drawn = [svg(panel, picture.size, f"{picture.key}-{i}") for i, panel in enumerate(picture.panels)]
    return {
        "picture": picture,
        "width": round(WIDTH * picture.size[0], 1),
        "kind": "small" if picture.size[0] < 3 and len(picture.panels) > 1 else "",
        "panels": list(map(Markup, drawn)),
        "legend": [(_mark(line), line.label) for line in picture.legend],
    }


def _mark(line: Line) -> Markup:
    """A line with its marker, as in the figure."""
    stroke = f'<path d="M0 5H24" stroke="var(--{line.colour})" stroke-width="1.6"/>'
    mark = f'<g fill="var(--{line.colour})">{stroke}{MARKS.get(line.marker, "")}</g>'
    return Markup(f'<svg viewBox="0 0 24 10" aria-hidden="true">{mark}</svg>')
