"""The report of a study as an HTML page, CSV, LaTeX, Markdown and lines for a terminal, written and logged.

Also the page of all the paper's tables, and `html` for other pages of the same style; a table as JSON.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from markupsafe import Markup
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from titans_platform import text
from titans_platform.errors import UsageError
from titans_platform.files import read_json, write_text
from titans_platform.report import TEMPLATES
from titans_platform.report.picture import DARK, LIGHT, Picture, save, svg
from titans_platform.report.report import DAGGERS, Links, Section, StudyReport, build_report
from titans_platform.report.table import SIZES, Entry, Table, build_table
from titans_platform.runs.folder import RunFolder
from titans_platform.runs.reporter import curve
from titans_platform.study.grid import RECORD
from titans_platform.study.plan import open_study
from titans_platform.study.spec import read_paper
from titans_platform.study.status import PaperItem
from titans_platform.text import NONE, count, plain_console, plural, render

if TYPE_CHECKING:
    from pandas import DataFrame

    from titans_platform.study.grid import StudyRun
    from titans_platform.tracking import TrackingStore


CROWDED = 4
"""With more columns the paper's numbers are below ours, not beside them."""
WIDTH = 5.7
"""Width of a figure on the page, in rem per inch."""


def html(template: str, **values: Any) -> str:
    """Render a page of ``templates/`` with ``values``, the palettes and the time."""
    written = time.strftime("%-d %B %Y, %H:%M UTC", time.gmtime())
    return render(TEMPLATES / template, light=LIGHT, dark=DARK, written=written, **values)


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
    page = html(
        "results_table.html", report=report, table=table, columns=columns, links=report.links,
        heading=heading, sizes=SIZES.values(), place=re.sub(r"\W+", "-", heading.lower()),
        caption=caption, crowded=crowded,
        paired={key: key in report.paper_columns and not crowded for key in columns},
        widths={key: 2 + spread if spread else 0 for key, spread in spreads.items()},
    )  # fmt: skip
    return Markup(page)


def figure(picture: Picture, number: int | None = None) -> Markup:
    """Render a figure as SVG with its caption and its number on the page."""
    width = round(WIDTH * picture.width, 1)
    drawn = Markup(svg(picture))
    page = render(TEMPLATES / "figure.html", picture=picture, drawn=drawn, width=width, number=number)
    return Markup(page)


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
    console.print(terminal(report, console.width))
    console.print(f"report {folder / PAGE}", soft_wrap=True)
    console.print(f"also in {folder}/: {others}, {FIGURES}/", soft_wrap=True, style="dim")
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
    texts = {PAGE: report_page(report), "table.md": markdown(report, FIGURES), "table.tex": latex(report)}
    texts |= tables(report)
    for name, content in texts.items():
        write_text(folder / name, content)
    files = [path for picture in report.pictures for path in save(picture, folder / FIGURES)]
    return {name: folder / name for name in texts} | {f"{FIGURES}/{path.name}": path for path in files}


def log_report(store: TrackingStore, report: StudyReport, paths: dict[str, Path]) -> str:
    """Log the files and the table to the study's parent run; returns the run's id."""
    table = report.table
    # same tag names as on the runs of the cells
    named = {"data fingerprint": "data", "version of the evaluation": "eval_version"}
    tags = {f"titans.{named.get(name, name)}": value for name, value in report.facts.items()}
    run_id = store.study_run(table.run.label, tags)
    log = store.run(run_id)
    for name, path in paths.items():
        log.artifact(path, FIGURES if name.startswith(FIGURES) else None)
    log.tags({"mlflow.note.content": markdown(report)})  # MLflow shows it at the top of the run
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
        "report": report, "table": results_table(report, f"{name}, scale {report.table.run.scale_name}"),
        "figures": list(map(figure, report.pictures)) if report.table.results else [],
    } for report in reports]  # fmt: skip
    return {
        "name": name, "item": item, "reports": reports, "views": views,
        "numbers": [] if reports else [printed for printed in item.printed if printed.columns],
        "finished": sum(done for done, _ in item.ran.values()),
    }  # fmt: skip


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
    line for each finished cell, with the standard error over items of a column that is one task.
    ``verdict.csv``: a line for each row and column against the first row.
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
                match [task.stderr for name, task in result.tasks.items() if name.startswith(f"{key}/")]:
                    case [float(stderr)]:  # a column of one task
                        line[column.titled(f"{key} stderr")] = column.factor * stderr
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
        "study": table.run.study.name, "scale": table.run.scale_name, "rows": rows,
        "comparable": table.run.scale.comparable,
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
    label = f"tab:{report.table.run.study.name}-{report.table.run.scale_name}"
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
    return render(TEMPLATES / "table.md", report=report, heads=["", *heads, *SIZES.values()], **values)


def terminal(report: StudyReport, width: int = 80) -> RenderableType:
    """Lay out the table and the further tables for a terminal; no number is cut at 80 columns.

    Columns that do not fit beside each other are split into several tables.
    """
    grids = _fitting(report, list(report.table.columns), width)
    notes = [Text(note, style="dim") for note in report.footnotes]
    return Group(report.title, *grids, *map(_further, report.sections), "", *notes)


def so_far(report: StudyReport, seeds: int, width: int = 80) -> RenderableType:
    """Lay out the table of a running study, with the ``seeds`` seeds that are finished in every row."""
    grids = _fitting(report, list(report.table.columns), width)
    note = "one seed has no spread, so that no difference is resolved" if seeds == 1 else "paired by seed"
    progress = f"{seeds} of {plural(len(report.table.seeds), 'seed')} finished"
    return Group("", f"{report.table.run.study.name}, {progress}: {note}", *grids)


def _further(section: Section) -> RenderableType:
    compact = {"padding": (0, 1, 0, 0), "show_edge": False}
    grid = text.table(*section.heads, left=len(section.heads), vertical="bottom", **compact)
    for line in section.lines:
        # without intervals, which 80 columns do not hold
        grid.add_row(line[0], *(re.sub(r" \[.*?\]", "", each) for each in line[1:]))
    return Group("", section.title, grid, Text(section.text, style="dim"))


def _fitting(report: StudyReport, keys: Sequence[str], width: int, sizes: bool = True) -> list[RichTable]:
    """Return one table; or the columns in one or several, and the sizes of the models in another."""
    grid, half = _grid(report, keys, width, sizes), (len(keys) + 1) // 2
    if plain_console(width=1000).measure(grid).minimum <= width:
        return [grid]
    if sizes:
        return [*_fitting(report, keys, width, sizes=False), _grid(report, [], width, sizes=True)]
    if len(keys) < 2:
        return [grid]
    return [each for part in (keys[:half], keys[half:]) for each in _fitting(report, part, width, False)]


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
