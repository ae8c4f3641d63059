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
from titans_platform.provenance import commands
from titans_platform.report import content, export
from titans_platform.report.origin import Links, facts
from titans_platform.report.table import Table, build_table
from titans_platform.report.terminal import terminal
from titans_platform.study.columns import shown
from titans_platform.study.opened import Opened
from titans_platform.study.schedule import MANIFEST, SEARCH

if TYPE_CHECKING:
    from titans_platform.report.series import Curve
    from titans_platform.study.opened import Opened
    from titans_platform.tracking import Store

PAGE, FIGURES = "report.html", "figures"
UI = "http://127.0.0.1:5000"
"""Where `titans ui` listens unless it is told otherwise."""


def make(opened: Opened, console: Console, link: bool = True, address: str | None = None) -> Table:
    """Draw the views of a study from what is there, print the table, and return it.

    ``link`` puts the views on the study's MLflow run too; ``address`` is where the page's links go. Raises
    UsageError where nothing has run.
    """
    run = opened.run
    if not any(cell.name for cell in opened.whole):
        raise UsageError(f"{run.label}: nothing has run under {run.root}; start with titans sweep run")
    table = build_table(run.study, run.scale_name, opened.whole, run.root, run.commit)
    asked = tuple(cell.name for cell in opened.cells)
    table = replace(table, overrides=tuple(run.overrides), asked=asked)
    paths = make_report(table, run.folder, run.root, run.label if link else None, address)
    console.print(terminal(table, console.width))
    console.print(f"report {_near(paths[PAGE])}", highlight=False, soft_wrap=True)
    others = ", ".join(name for name in paths if "/" not in name and name != PAGE)
    console.print(
        f"also in {_near(run.folder)}/: {others}, {FIGURES}/", highlight=False, soft_wrap=True, style="dim"
    )
    return table


def _near(path: Path) -> str:
    """The path as one would type it here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def make_report(
    table: Table, folder: Path, root: Path, label: str | None = None, address: str | None = None
) -> dict[str, Path]:
    """Write the views of a table; with ``label`` put them on that study's MLflow run too. Their paths."""
    measured = label or table.results
    store = _store_of(folder, root) if measured else None
    paths = write_views(table, folder, store, address)
    if label and store:
        log_views(store, table, label, paths)
    return paths


def _store_of(folder: Path, root: Path) -> Store | None:
    """Where the study's runs are; None, with a warning, where it cannot be opened from here.

    A job on a cluster logs to a server that a report made elsewhere may not reach, and the store of a
    copied root is not written to.
    """
    from titans_platform.tracking import STORE, open_store

    kept = (read_json(folder / MANIFEST) or {}).get("mlflow")
    try:
        return open_store(root if not kept or os.environ.get(STORE) else str(kept))
    except UsageError as error:
        click.echo(f"without learning curves and links: {error}", err=True)
        return None


def write_views(
    table: Table, folder: Path, store: Store | None = None, address: str | None = None
) -> dict[str, Path]:
    """Write the page, the tables and the figures; their paths by name.

    ``store`` is asked for learning curves, and links go to its runs: at ``address``, at the store's own
    where it is a server, or where `titans ui` listens.
    """
    # half a second of imports that `sweep run --help` need not wait for
    from titans_platform.report.figure import pictures
    from titans_platform.report.page import Extras, html
    from titans_platform.report.picture import save
    from titans_platform.report.series import sheet

    search = read_json(folder / SEARCH)
    drawn = pictures(sheet(table, _curves(table, store), search))
    server = store.server if store else None
    links = Links((address or server or UI).rstrip("/"), store.experiment, folder.name) if store else None
    local = address is None and server is None
    texts = {
        PAGE: html(table, Extras(drawn, links, local, commands(folder), _search_notes(search))),
        "table.md": export.markdown(table, [(each.title, f"{FIGURES}/{each.key}.png") for each in drawn]),
        "table.tex": export.latex(table),
        "table.csv": export.summary_csv(table),
        "cells.csv": export.cells_csv(table),
    }
    for name, text in texts.items():
        write_text(folder / name, text)
    files = [path for picture in drawn for path in save(picture, folder / FIGURES)]
    return {name: folder / name for name in texts} | {f"{FIGURES}/{path.name}": path for path in files}


def _search_notes(search: Mapping[str, Any] | None) -> list[str]:
    """How the study's search went, and what it found as options of the command line."""
    if not search:
        return []
    return [str(search.get("line", "")), *([f"Found: {search['set']}"] if search.get("set") else [])]


def _curves(table: Table, store: Store | None) -> Mapping[str, Curve]:
    return store.curves(_runs(table)) if store else {}


def _runs(table: Table) -> dict[str, dict[str, Any]]:
    """The results that have a run in MLflow, by its id."""
    return {str(run): result for result in table.results if (run := result.get("mlflow_run_id"))}


def log_views(store: Store, table: Table, label: str, paths: dict[str, Path]) -> str:
    """Put the views and the links to the cells on the study's parent run; the run's id."""
    # what the cells say of how they were made, as the cells' own runs say it
    named = {"data fingerprint": "data", "version of the evaluation": "eval_version"}
    tags = {f"titans.{named.get(name, name)}": value for name, value in facts(table).items()}
    run_id = store.study_run(label, tags)
    log = store.run(run_id)
    log.table(list(_records(table)), "table.json")
    for name, path in paths.items():
        log.artifact(path, FIGURES if name.startswith(FIGURES) else None)
    log.note(f"{export.markdown(table)}\n{_links(store, table)}\n")
    log.summary(_numbers(table))
    for run, result in _runs(table).items():
        store.amend(run, _in_units(table, result))
    # the study's cells with the columns to compare them by, the best of the first on top
    key, column = next(iter(table.study.columns.items()))
    columns = shown((row.row for row in table.rows), table.study.columns)
    store.save_view(label, run_id, columns, f"metrics.`{key}`", not column.higher_is_better)
    log.close("FINISHED" if not table.missing else "FAILED")
    return run_id


def _in_units(table: Table, result: Mapping[str, Any]) -> dict[str, float]:
    """A cell's measures in the units of the table's columns, and the tasks of each column too."""
    columns, found = table.study.columns, dict(result["columns"])
    # @ is not allowed in a metric's name
    found |= {key.replace("@", "/"): task["value"] for key, task in result.get("tasks", {}).items()}
    owners = {name: columns.get(name.partition("/")[0]) for name in found}
    return {
        name: column.factor * found[name]
        for name, column in owners.items()
        if column and column.factor != 1 and found[name] is not None
    }


def _records(table: Table) -> list[dict[str, Any]]:
    names = ["row"]
    for key in table.study.columns:
        names += [key, f"{key}, paper"] if content.has_paper(table, key) else [key]
    names += ["parameters", "state bytes"]
    return [
        dict(zip(names, line, strict=True)) | {"cells": " ".join(result["cell"] for result in row.results)}
        for row, line in zip(table.rows, content.body(table), strict=True)
    ]


def _links(store: Store, table: Table) -> str:
    lines = ["**Cells**", ""]
    for row in table.rows:
        runs = {result["seed"]: result.get("mlflow_run_id") for result in row.results}
        links = ", ".join(f"[seed {seed}]({store.url(run)})" for seed, run in runs.items() if run)
        lines += [f"- {row.row.name}: {links}"] if links else []
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
