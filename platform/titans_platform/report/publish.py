"""The views of a study: in its folder, and on its MLflow parent run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from titans_platform.errors import UsageError
from titans_platform.files import read_json, write_text
from titans_platform.report import export, render
from titans_platform.report.origin import Links, commands, facts
from titans_platform.report.table import Table, build_table
from titans_platform.study.columns import shown
from titans_platform.study.opened import Opened
from titans_platform.study.schedule import MANIFEST

if TYPE_CHECKING:
    from titans_platform.report.series import Curve
    from titans_platform.tracking import Store

PAGE, TABLE, LATEX, SUMMARY, CELLS = "report.html", "table.md", "table.tex", "table.csv", "cells.csv"
FIGURES = "figures"
SEARCH = "search.json"
"""The record of a study's search: its trials, a line on how it went, and what it found."""
UI = "http://127.0.0.1:5000"
"""Where `titans ui` listens if nothing else is said."""


def make_report(
    table: Table, folder: Path, root: Path, label: str | None = None, address: str | None = None
) -> dict[str, Path]:
    """Write the views of a table; with ``label`` put them on that study's MLflow run too. Their paths."""
    if not label and not any(row.results for row in table.rows):
        return write_views(table, folder)
    store = _store_of(folder, root)
    paths = write_views(table, folder, store, address)
    if label and store:
        log_views(store, table, label, paths)
    return paths


def _store_of(folder: Path, root: Path) -> Store | None:
    """Where the study's runs are: a job on a cluster logs to a server, which a report made elsewhere may not
    reach; then None, which is said."""
    from titans_platform.tracking import STORE, open_store

    kept = (read_json(folder / MANIFEST) or {}).get("mlflow")
    if not kept or os.environ.get(STORE):
        return open_store(root)
    try:
        return open_store(str(kept))
    except UsageError as error:
        click.echo(f"without learning curves and links: {error}", err=True)
        return None


def write_views(
    table: Table, folder: Path, store: Store | None = None, address: str | None = None
) -> dict[str, Path]:
    """Write the page, the tables and the figures; their paths by name.

    ``store`` is asked for learning curves, and links lead to its runs: at ``address``, at the store's own
    where it is a server, or where `titans ui` listens.
    """
    # half a second of imports that `sweep run --help` need not wait for
    from titans_platform.report.figure import pictures
    from titans_platform.report.page import Extras, html
    from titans_platform.report.series import sheet
    from titans_platform.report.svg import save

    search = read_json(folder / SEARCH)
    drawn = pictures(sheet(table, _curves(table, store), search))
    server = store.server if store else None
    links = Links((address or server or UI).rstrip("/"), store.experiment, folder.name) if store else None
    local = address is None and server is None
    extras = Extras(drawn, links, local, commands(folder), _said_of_search(search))
    texts = {
        PAGE: html(table, extras),
        TABLE: render.markdown(table, [(picture.title, f"{FIGURES}/{picture.key}.png") for picture in drawn]),
        LATEX: export.latex(table),
        SUMMARY: export.summary_csv(table),
        CELLS: export.cells_csv(table),
    }
    for name, text in texts.items():
        write_text(folder / name, text)
    files = [path for picture in drawn for path in save(picture, folder / FIGURES)]
    return {name: folder / name for name in texts} | {f"{FIGURES}/{path.name}": path for path in files}


def _said_of_search(search: Mapping[str, Any] | None) -> list[str]:
    """How the study's search went, and what it found as options of the command line."""
    if not search:
        return []
    found = [f"Found: {search['set']}"] if search.get("set") else []
    return [str(search.get("line", "")), *found]


def _curves(table: Table, store: Store | None) -> Mapping[str, Curve]:
    if store is None:
        return {}
    return store.curves(
        str(result["mlflow_run_id"])
        for row in table.rows
        for result in row.results
        if result.get("mlflow_run_id")
    )


def log_views(store: Store, table: Table, label: str, paths: dict[str, Path]) -> str:
    """Put the views and the links to the cells on the study's parent run; the run's id."""
    run_id = store.study_run(label, _tags(table))
    log = store.run(run_id)
    log.table(list(_records(table)), "table.json")
    for name, path in paths.items():
        log.artifact(path, FIGURES if name.startswith(FIGURES) else None)
    log.note(f"{render.markdown(table)}\n{_links(store, table)}\n")
    log.summary(_numbers(table))
    _save_view(store, table, run_id, label)
    log.close("FINISHED" if not table.missing else "FAILED")
    return run_id


def _save_view(store: Store, table: Table, run_id: str, label: str) -> None:
    """The study's cells as a saved view in MLflow: the columns to compare, the best of the first on top."""
    key, column = next(iter(table.study.columns.items()))
    columns = shown((row.row for row in table.rows), table.study.columns)
    store.save_view(label, run_id, columns, f"metrics.`{key}`", not column.higher_is_better)


def _tags(table: Table) -> dict[str, str]:
    """What the cells say of how they were made, as the cells' own runs say it."""
    named = {"data fingerprint": "data", "version of the evaluation": "eval_version"}
    return {f"titans.{named.get(name, name)}": value for name, value in facts(table).items()}


def _records(table: Table) -> list[dict[str, Any]]:
    names = ["row"]
    for key in table.study.columns:
        names += [key, f"{key}, paper"] if render.has_paper(table, key) else [key]
    names += ["parameters", "state bytes"]
    return [
        dict(zip(names, line, strict=True)) | {"cells": " ".join(result["cell"] for result in row.results)}
        for row, line in zip(table.rows, render.body(table), strict=True)
    ]


def _links(store: Store, table: Table) -> str:
    lines = ["**Cells**", ""]
    for row in table.rows:
        links = [
            f"[seed {result['seed']}]({store.url(result['mlflow_run_id'])})"
            for result in row.results
            if result.get("mlflow_run_id")
        ]
        if links:
            lines.append(f"- {row.row.name}: {', '.join(links)}")
    return "\n".join(lines)


def _numbers(table: Table) -> dict[str, float]:
    """Mean of each row and column as a metric, so that studies can be plotted against each other."""
    return {
        f"{key}/{_metric_name(row.row.name)}": entry.mean
        for row in table.rows
        for key, entry in row.entries.items()
        if entry.mean is not None
    }


def _metric_name(name: str) -> str:
    """MLflow takes letters, digits, space and a few signs in a metric's name; `+ Attn (MAC)` is Attn MAC."""
    kept = "".join(c if c.isalnum() or c in "_-. " else " " for c in name.replace("/", "-"))
    return " ".join(kept.split())


def report_study(opened: Opened, console: Console, link: bool = True, address: str | None = None) -> Table:
    """Draw the views from what is there; with ``link`` put them on the MLflow run too. Raises UsageError."""
    run = opened.run
    if not any(cell.name for cell in opened.whole):
        raise UsageError(f"{run.label}: nothing has run under {run.root}; start with titans sweep run")
    table = build_table(run.study, run.scale_name, opened.whole, run.root, run.commit)
    asked = tuple(cell.name for cell in opened.cells)
    table = replace(table, overrides=tuple(run.overrides), asked=asked)
    paths = make_report(table, run.folder, run.root, run.label if link else None, address)
    console.print(render.terminal(table, console.width))
    console.print(f"report {_near(paths[PAGE])}", highlight=False, soft_wrap=True)
    others = f"{_near(run.folder)}/: table.md, table.tex, table.csv, cells.csv, figures/"
    console.print(f"also in {others}", highlight=False, soft_wrap=True, style="dim")
    return table


def _near(path: Path) -> str:
    """The path as a person here would type it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
