"""Publish the report of a study: render it as one HTML page, write it to its folder, log it to MLflow.

Also the page of all the paper's tables, and `html` for other pages of the same style.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from markupsafe import Markup
from rich.console import Console

from titans_platform.errors import UsageError
from titans_platform.files import read_json, write_text
from titans_platform.report import export, render
from titans_platform.report.picture import DARK, LIGHT, Picture, save, svg
from titans_platform.report.report import Links, StudyReport, build_report
from titans_platform.report.table import SIZES, Table, build_table
from titans_platform.runs.folder import RunFolder
from titans_platform.runs.reporter import curve
from titans_platform.study.grid import RECORD
from titans_platform.study.plan import open_study
from titans_platform.study.spec import read_paper
from titans_platform.study.status import PaperItem
from titans_platform.text import plural

if TYPE_CHECKING:
    from titans_platform.study.grid import StudyRun
    from titans_platform.tracking import TrackingStore


CROWDED = 4
"""With more columns the paper's numbers are below ours, not beside them."""
WIDTH = 5.7
"""Width of a figure on the page, in rem per inch."""


def html(template: str, **values: Any) -> str:
    """Render a page of ``templates/`` with ``values``, the palettes and the time."""
    written = time.strftime("%-d %B %Y, %H:%M UTC", time.gmtime())
    return render(template, light=LIGHT, dark=DARK, written=written, **values)


def report_page(report: StudyReport) -> str:
    """Render the page of one study."""
    return html(
        "report.html", report=report, table=report.table, columns=report.table.columns,
        results_table=results_table(report), links=report.links,
        seeds=plural(len(report.table.seeds), "seed").partition(" ")[2],
        figures=[figure(picture, i + 1) for i, picture in enumerate(report.pictures)],
    )  # fmt: skip


def results_table(report: StudyReport, heading: str = "Table 1") -> Markup:
    """Render a study's table, with the paper's numbers beside or below ours."""
    table, columns, seeds = report.table, report.table.columns, len(report.table.seeds)
    crowded = len(columns) > CROWDED
    caption = f"Mean ± standard deviation over {seeds} seeds" if seeds > 1 else "One seed"
    if report.paper_columns:
        caption += f"; the paper's numbers {'below' if crowded else 'beside'} ours"
    caption += f". {report.bold_note}" + " A number links to its runs." * bool(report.links)
    # characters of the widest sd of a column, to align its means
    spreads = {key: max((len(row.entries[key].sd_text) for row in table.rows), default=0) for key in columns}
    text = html(
        "results_table.html", report=report, table=table, columns=columns, links=report.links,
        heading=heading, sizes=SIZES.values(), place=re.sub(r"\W+", "-", heading.lower()),
        caption=caption, crowded=crowded,
        paired={key: key in report.paper_columns and not crowded for key in columns},
        widths={key: 2 + spread if spread else 0 for key, spread in spreads.items()},
    )  # fmt: skip
    return Markup(text)


def figure(picture: Picture, number: int | None = None) -> Markup:
    """Render a figure as SVG with its caption and its number on the page."""
    width = round(WIDTH * picture.width, 1)
    return Markup(
        render("figure.html", picture=picture, drawn=Markup(svg(picture)), width=width, number=number)
    )


PAGE, PAPER_PAGE, FIGURES = "report.html", "paper.html", "figures"
UI = "http://127.0.0.1:5000"
"""Default address of `titans ui`."""


def make(run: StudyRun, console: Console, link: bool = True, address: str | None = None) -> Table:
    """Write the report of a study, print its table, and return it.

    Args:
        run: The study; what of it has no result yet is missing in the report.
        console: Where the table is printed.
        link: Whether the report is logged to the study's MLflow run too.
        address: MLflow server that the page links to. By default the tracking server, or where `titans ui`
            listens.

    Raises:
        UsageError: nothing has run.
    """
    if not any(cell.name for cell in run.whole):
        raise UsageError(f"{run.label}: nothing has run under {run.root}; start with titans sweep run")
    table, path, links = build_table(run), run.path, None
    if store := _open_store(run) if link or table.results else None:
        server = address or store.server
        links = Links((server or UI).rstrip("/"), store.experiment, local=not server)
    curves = {result.cell: curve(RunFolder(run.root, result.cell).path) for result in table.results}
    report = build_report(table, curves, read_json(path / "search.json"), links)
    paths = write_report(report, path)
    if link and store:
        log_report(store, report, paths)
    folder = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    others = ", ".join(name for name in paths if "/" not in name and name != PAGE)
    console.print(export.terminal(report, console.width))
    console.print(f"report {folder / PAGE}", highlight=False, soft_wrap=True)
    console.print(f"also in {folder}/: {others}, {FIGURES}/", highlight=False, soft_wrap=True, style="dim")
    return table


def _open_store(run: StudyRun) -> TrackingStore | None:
    """Open the tracking store of the study's runs; None, with a warning, if it cannot be opened from here.

    A job on a cluster logs to a server that a report made elsewhere may not reach, and a copied root
    must not write to the original's store.
    """
    from titans_platform.tracking import STORE, open_store

    kept = (read_json(run.path / RECORD) or {}).get("mlflow")
    try:
        return open_store(run.root if not kept or os.environ.get(STORE) else str(kept))
    except UsageError as error:
        click.echo(f"without links to MLflow: {error}", err=True)
        return None


def write_report(report: StudyReport, folder: Path) -> dict[str, Path]:
    """Write the page, the tables and the figures into ``folder``; returns their paths by name."""
    texts = {
        PAGE: report_page(report),
        "table.md": export.markdown(report, FIGURES),
        "table.tex": export.latex(report),
        **export.tables(report),
    }
    for name, content in texts.items():
        write_text(folder / name, content)
    files = [path for picture in report.pictures for path in save(picture, folder / FIGURES)]
    named = {f"{FIGURES}/{path.name}": path for path in files}
    return {name: folder / name for name in texts} | named


def log_report(store: TrackingStore, report: StudyReport, paths: dict[str, Path]) -> str:
    """Log the files and the table to the study's parent run; returns the run's id."""
    table = report.table
    # same tag names as on the runs of the cells
    named = {"data fingerprint": "data", "version of the evaluation": "eval_version"}
    tags = {f"titans.{named.get(name, name)}": value for name, value in report.facts.items()}
    run_id = store.study_run(table.label, tags)
    log = store.run(run_id)
    for name, path in paths.items():
        log.artifact(path, FIGURES if name.startswith(FIGURES) else None)
    log.note(export.markdown(report))
    log.close("FINISHED" if not table.missing else "FAILED")
    return run_id


def paper_page(items: Sequence[PaperItem], root: Path) -> str:
    """Render the page of all the paper's tables and figures, with ours that have been run under ``root``."""
    return html("paper.html", source=read_paper().source, sections=[_section(item, root) for item in items])


def _section(item: PaperItem, root: Path) -> dict[str, Any]:
    """Collect the printed numbers of a table or figure, and its reports at the paper's and all run scales.

    `smoke` is left out if another scale has been run.
    """
    ran = {scale for scale in item.ran if scale != "smoke"} or set(item.ran)
    reports = []
    if item.study:
        chosen = [scale for scale in item.study.scales if scale in ran or scale in item.sizes]
        reports = [build_report(build_table(open_study(item.study.name, scale, root))) for scale in chosen]
    name = " and ".join(item.names)
    reports.sort(key=lambda report: -len(report.table.results))
    views = [{
        "report": report, "table": results_table(report, f"{name}, scale {report.table.scale}"),
        "figures": list(map(figure, report.pictures)) if report.table.results else [],
    } for report in reports]  # fmt: skip
    return {
        "name": name, "item": item, "reports": reports, "views": views,
        "numbers": [] if reports else [printed for printed in item.printed if printed.columns],
        "finished": sum(done for done, _ in item.ran.values()),
    }  # fmt: skip
