"""The views of a study: files in its folder, one of them an HTML page, and its MLflow parent run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from markupsafe import Markup
from rich.console import Console

from titans_platform.errors import UsageError
from titans_platform.files import read_json, write_text
from titans_platform.provenance import commands
from titans_platform.report import content, figure, verdict
from titans_platform.report.content import Links
from titans_platform.report.export import cells_csv, latex, markdown, summary_csv, terminal, verdict_csv
from titans_platform.report.figure_data import figure_data
from titans_platform.report.pages import render
from titans_platform.report.picture import Line, Picture, save, svg
from titans_platform.report.table import Table, build_table
from titans_platform.runs.result import Result
from titans_platform.study.schedule import MANIFEST, SEARCH
from titans_platform.text import NONE, plural

if TYPE_CHECKING:
    from titans_platform.study.plan import StudyRun
    from titans_platform.tracking import Store

PAGE, FIGURES = "report.html", "figures"
UI = "http://127.0.0.1:5000"
"""Where `titans ui` listens unless it is told otherwise."""
CROWDED = 4
"""Columns from which the paper's numbers stand below ours on the page, not beside them."""
WIDTH = 5.7
"""Letters of the page (rem) to an inch of a figure: its small print is a little smaller than the text."""
MARKS = {
    "o": '<circle cx="12" cy="5" r="2.6"/>',
    "s": '<rect x="9.6" y="2.6" width="4.8" height="4.8"/>',
    "^": '<path d="M12 1.8 15 7.6H9z"/>',
    "D": '<path d="M12 1.6 15.4 5 12 8.4 8.6 5z"/>',
    "v": '<path d="M12 8.2 9 2.4h6z"/>',
    "P": '<path d="M10.8 2h2.4v1.8H15v2.4h-1.8V8h-2.4V6.2H9V3.8h1.8z"/>',
}


def make(run: StudyRun, console: Console, link: bool = True, address: str | None = None) -> Table:
    """Draw the views of a study from what is there, print the table, and return it.

    ``link`` puts the views on the study's MLflow run too; ``address`` is where the page's links go. Raises
    UsageError where nothing has run.
    """
    if not any(cell.name for cell in run.whole):
        raise UsageError(f"{run.label}: nothing has run under {run.root}; start with titans sweep run")
    table = build_table(run)
    store = _store_of(run) if link or table.results else None
    paths = write_views(table, store, address)
    if link and store:
        log_views(store, table, paths)
    folder = run.folder.relative_to(Path.cwd()) if run.folder.is_relative_to(Path.cwd()) else run.folder
    others = ", ".join(name for name in paths if "/" not in name and name != PAGE)
    console.print(terminal(table, console.width))
    console.print(f"report {folder / PAGE}", highlight=False, soft_wrap=True)
    console.print(f"also in {folder}/: {others}, {FIGURES}/", highlight=False, soft_wrap=True, style="dim")
    return table


def _store_of(run: StudyRun) -> Store | None:
    """Where the study's runs are; None, with a warning, where it cannot be opened from here.

    A job on a cluster logs to a server that a report made elsewhere may not reach, and the store of a
    copied root is not written to.
    """
    from titans_platform.tracking import STORE, open_store

    kept = (read_json(run.folder / MANIFEST) or {}).get("mlflow")
    try:
        return open_store(run.root if not kept or os.environ.get(STORE) else str(kept))
    except UsageError as error:
        click.echo(f"without learning curves and links: {error}", err=True)
        return None


def write_views(table: Table, store: Store | None = None, address: str | None = None) -> dict[str, Path]:
    """Write the page, the tables and the figures into the study's folder; their paths by name.

    ``store`` is asked for learning curves, and links go to its runs: at ``address``, at the store's own
    where it is a server, or where `titans ui` listens.
    """
    folder = table.run.folder
    search = read_json(folder / SEARCH) or {}
    drawn = figure.pictures(figure_data(table, store.curves(_runs(table)) if store else {}, search))
    server = store.server if store else None
    links = Links((address or server or UI).rstrip("/"), store.experiment) if store else None
    notes = [search["line"]] if "line" in search else []
    notes += [f"Found: {search['set']}"] if search.get("set") else []
    local = not (address or server)
    texts = {
        PAGE: html(table, drawn, links, local=local, commands=commands(folder), notes=notes),
        "table.md": markdown(table, [(each.title, f"{FIGURES}/{each.key}.png") for each in drawn]),
        "table.tex": latex(table),
        "table.csv": summary_csv(table),
        "cells.csv": cells_csv(table),
        "verdict.csv": verdict_csv(table),
    }
    for name, text in texts.items():
        write_text(folder / name, text)
    files = [path for picture in drawn for path in save(picture, folder / FIGURES)]
    return {name: folder / name for name in texts} | {f"{FIGURES}/{path.name}": path for path in files}


def html(
    table: Table,
    pictures: Sequence[Picture] = (),
    links: Links | None = None,
    *,
    local: bool = True,
    commands: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> str:
    """The report as one HTML page that needs nothing beside it.

    ``local``: ``links`` go to where `titans ui` listens, not to a server that is always there. ``commands``
    are those that worked on the study, ``notes`` stand below the table besides its own.
    """
    return render(
        PAGE,
        table=table,
        columns=table.columns,
        results_table=results_table(table, links),
        content=content,
        verdict=verdict,
        links=links,
        local=local,
        commands=commands,
        seeds=plural(len(table.seeds), "seed").partition(" ")[2],
        notes=[*content.footnotes(table, failures=False), *notes],
        failures=[gap for row in table.rows for gap in row.unfinished if gap.reason],
        results={result["cell"]: result for result in table.results},
        gaps={(gap.cell.row, gap.cell.seed): gap for row in table.rows for gap in row.unfinished},
        figures=list(map(drawn_figure, pictures)),
        made=content.only_commit(table),
        sources={
            "LaTeX (booktabs)": latex(table),
            "CSV, a line a row and column": summary_csv(table),
            "CSV, a line a cell": cells_csv(table),
        },
        none_sign=NONE,
    )


def results_table(table: Table, links: Links | None = None, heading: str = "Table 1") -> Markup:
    """A study's table for a page, with the paper's numbers beside or below ours."""
    columns = table.columns
    crowded, paper = len(columns) > CROWDED, [key for key in columns if content.has_paper(table, key)]
    text = render(
        "results_table.html",
        table=table,
        columns=columns,
        content=content,
        links=links,
        heading=heading,
        place=re.sub(r"\W+", "-", heading.lower()),
        caption=_caption(table, crowded, bool(paper), links is not None),
        crowded=crowded,
        paired={key: key in paper and not crowded for key in columns},
        shown=partial(content.shown, table),
        widths={key: _spread_width(table, key) for key in columns},
        runs_of=lambda row: [str(run) for result in row.results if (run := result.get("mlflow_run_id"))],
        none_sign=NONE,
    )
    return Markup(text)


def _caption(table: Table, crowded: bool, printed: bool, linked: bool) -> str:
    seeds = len(table.seeds)
    spread = f"Mean ± standard deviation over {seeds} seeds" if seeds > 1 else "One seed"
    paper = f"; the paper's numbers {'below' if crowded else 'beside'} ours" if printed else ""
    return f"{spread}{paper}. {content.bold_note(table)}{' A number links to its runs.' * linked}"


def _spread_width(table: Table, key: str) -> int:
    """Letters of a column's widest spread, so that its means stand below each other."""
    spreads = [len(content.shown(table, row, key).sd) for row in table.rows]
    return 2 + max(spreads) if any(spreads) else 0


def drawn_figure(picture: Picture) -> dict[str, Any]:
    """What a page needs of a picture: its panels as SVG, and the legend."""
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


def _runs(table: Table) -> dict[str, Result]:
    """The results that have a run in MLflow, by its id."""
    return {str(run): result for result in table.results if (run := result.get("mlflow_run_id"))}


def log_views(store: Store, table: Table, paths: dict[str, Path]) -> str:
    """Put the views and the links to the cells on the study's parent run; the run's id."""
    # what the cells say of how they were made, as the cells' own runs say it
    named = {"data fingerprint": "data", "version of the evaluation": "eval_version"}
    tags = {f"titans.{named.get(name, name)}": value for name, value in content.facts(table).items()}
    run_id = store.study_run(table.run.label, tags)
    log = store.run(run_id)
    log.table(_records(table), "table.json")
    for name, path in paths.items():
        log.artifact(path, FIGURES if name.startswith(FIGURES) else None)
    log.note("\n".join([markdown(table), "**Cells**", "", *_links(store, table), ""]))
    # means as metrics, so that studies can be plotted against each other
    means = {
        f"{key}/{_metric_name(row.row.name)}": entry.mean
        for row in table.rows
        for key, entry in row.entries.items()
    }
    log.summary({name: mean for name, mean in means.items() if mean is not None})
    for run, result in _runs(table).items():
        store.amend(run, _in_units(table, result), result["config"]["optim"]["steps"])
    log.close("FINISHED" if not table.missing else "FAILED")
    return run_id


def _in_units(table: Table, result: Result) -> dict[str, float]:
    """A cell's measures in the units of the table's columns, and the tasks of each column too."""
    tasks = {key: task["value"] for key, task in result.get("tasks", {}).items()}
    found = {}
    for name, value in (result["columns"] | tasks).items():
        column = table.columns.get(name.partition("/")[0])
        if column and column.factor != 1 and value is not None:
            found[name] = column.factor * value
    return found


def _records(table: Table) -> list[dict[str, Any]]:
    columns = [f"{key}, paper" if printed else key for key, printed in content.fields(table)]
    names = ["row", *columns, "parameters", "state bytes"]
    return [
        dict(zip(names, line, strict=True)) | {"cells": " ".join(result["cell"] for result in row.results)}
        for row, line in zip(table.rows, content.body(table), strict=True)
    ]


def _links(store: Store, table: Table) -> Iterator[str]:
    for row in table.rows:
        runs = {result["seed"]: result.get("mlflow_run_id") for result in row.results}
        links = ", ".join(f"[seed {seed}]({store.url(run)})" for seed, run in runs.items() if run)
        if links:
            yield f"- {row.row.name}: {links}"


def _metric_name(name: str) -> str:
    """MLflow takes letters, digits, space and a few signs in a metric's name; `+ Attn (MAC)` is Attn MAC."""
    return " ".join(re.sub(r"[^\w. -]", " ", name.replace("/", "-")).split())
