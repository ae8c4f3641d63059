"""`titans paper`: all of the paper's tables and figures on one page, ours beside the paper's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titans_platform.report import content, figure
from titans_platform.report.figure_data import figure_data
from titans_platform.report.pages import render
from titans_platform.report.publish import drawn_figure, results_table
from titans_platform.report.table import build_table
from titans_platform.study.cells import open_study
from titans_platform.study.overview import Item
from titans_platform.study.paper import Printed, read_paper

PAGE = "paper.html"


def paper_page(items: Sequence[Item], root: Path) -> str:
    """One HTML page that needs nothing beside it; what has not been run under ``root`` is missing on it."""
    return render(PAGE, source=read_paper().source, sections=[_section(item, root) for item in items])


def _section(item: Item, root: Path) -> dict[str, Any]:
    """The scales of a study that have been run, and those that the paper's numbers belong to.

    Of a study that has been run at another scale, what only shows that it works is left out.
    """
    name = " and ".join(item.names)
    scales = item.study.scales if item.study else ()
    ran = {scale for scale in item.ran if scale != "smoke"} or set(item.ran)
    chosen = [scale for scale in scales if scale in ran or scale in item.sizes]
    views = [_view(item, scale, name, root) for scale in chosen]
    numbers = [] if chosen else [_numbers(each) for each in item.printed if each.columns]
    return {"name": name, "item": item, "views": views, "numbers": numbers}


def _view(item: Item, scale: str, name: str, root: Path) -> dict[str, Any]:
    assert item.study is not None
    table = build_table(open_study(item.study.name, scale, root))
    drawn = figure.pictures(figure_data(table)) if table.results else []
    return {
        "scale": scale,
        "done": f"{len(table.results)} of {len(table.results) + table.missing} cells done",
        "table": results_table(table, heading=f"{name}, scale {scale}"),
        "notes": content.footnotes(table),
        "figures": list(map(drawn_figure, drawn)),
        "command": content.again(table),
    }


def _numbers(printed: Printed) -> dict[str, Any]:
    """A table that nothing runs here: the paper's numbers, and why they stand here."""
    rows = {name: row for rows in printed.by_size().values() for name, row in rows.items()}
    return {"columns": printed.columns, "rows": rows, "references": printed.references}
