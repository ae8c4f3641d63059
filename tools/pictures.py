"""Pictures of docs/ that show a study; `CHROMIUM=chromium python -m tools.pictures` makes them again.

Each is drawn from a study's committed cells, and holds the hash of the numbers and verdicts that it shows
(`fingerprint`), which a test compares with today's. Without CHROMIUM, a headless browser, the pictures of the
report's page stay as they were.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from titans_platform.config import TaskConfig, digest
from titans_platform.files import write_json
from titans_platform.report import picture as plot
from titans_platform.report.publish import report_page
from titans_platform.report.report import StudyReport, build_report
from titans_platform.report.table import build_table
from titans_platform.runs.check import sizes
from titans_platform.runs.folder import RESULT, Result
from titans_platform.study.grid import StudyRun, expand, load_study
from titans_platform.tasks import build_generated, row_length

TOP = Path(__file__).parents[1]
DOCS, KEY, PAGE = TOP / "docs", "titans-input", "ablation-workstation"
STUDIES = {PAGE: ("ablation", "workstation"), "babilong": ("babilong", "laptop"),
           "throughput": ("throughput", "laptop")}  # fmt: skip
"""Study and scale of each picture, by its stem and the stem of its cells in experiments/paper/."""
SCREENS = {"report-dark.png": (1280, 900, 1, True), "report-phone.png": (500, 1080, 2, False)}
"""Width, height, pixels of the picture per pixel of the page, and whether dark."""


def built(name: str, root: Path) -> StudyReport:
    """Build the report of committed cells, whose results are written below ``root``."""
    study, scale = load_study(STUDIES[name][0]), STUDIES[name][1]
    with (TOP / "experiments" / "paper" / f"{name}.csv").open(encoding="utf-8") as file:
        lines = {(line["row"], int(line["seed"])): line for line in csv.DictReader(file)}
    heads = {key: column.titled(key) for key, column in study.columns_at(scale).items()}
    factors = {key: column.factor for key, column in study.columns_at(scale).items()}
    cells = []
    for cell in expand(study, scale, seeds=sorted({seed for _, seed in lines})):
        line, size, cfg = lines[cell.row, cell.seed], sizes(cell.config), cell.config
        result = Result(
            cell=line["cell"], row=cell.row, seed=cell.seed, commit=line["commit"],
            columns={key: float(line[head]) / factors[key] for key, head in heads.items()},
            chance={key: chance(tasks) for key, tasks in cfg.eval.columns.items()} if name == PAGE else {},
            config=cfg.model_dump(mode="json"), tokens=int(line["tokens"]), parameters=size["parameters"],
            state_bytes=size["state_bytes"], train_seconds=float(line["train_seconds"]),
            eval_seconds=float(line["eval_seconds"]),
        )  # fmt: skip
        write_json(root / "cells" / result.cell / RESULT, result.record())
        cells.append(replace(cell, name=result.cell))
    commit = lines[cells[0].row, cells[0].seed]["commit"]
    run = StudyRun(study, scale, root, commit, cells=tuple(cells), whole=tuple(cells))
    return build_report(build_table(run))


def chance(tasks: Sequence[TaskConfig]) -> float:
    """Return the score of guessing, of perplexity the number of ids of the byte tokenizer."""
    return fmean(260 if task.task == "perplexity" else build_generated(task).chance for task in tasks)


def picture_of(name: str, report: StudyReport) -> plot.Picture:
    """Return the columns of the page's report side by side; of another, its columns against their lengths."""
    if name == PAGE:
        return next(picture for picture in report.pictures if picture.key == "columns")
    cfg = next(cell.config for cell in expand(load_study(STUDIES[name][0]), STUDIES[name][1]))
    length = {key: float(row_length(tasks[0].lengths[0], cfg.data.sequence_length))
              for key, tasks in cfg.eval.columns.items()}  # fmt: skip
    lines = [
        plot.Line(row.row.name, {length[key]: tuple(entry.values) for key, entry in row.entries.items()})
        for row in report.table.rows
    ]
    if len(lines) <= plot.MANY:
        panels = [("", shown := plot.coloured(lines)[0], ())]
    else:
        panels, shown = (
            [(line.label, [line], [other for other in lines if other is not line]) for line in lines],
            (),
        )
    drawn = [plot.panel(title, plot.lines, "tokens", shown=panel_shown, grey=grey, logarithmic=True)
             for title, panel_shown, grey in panels]  # fmt: skip
    return plot.Picture(name, name, "", drawn, (4.2, 3.0) if shown else plot.NARROW, shown)


def fingerprint(report: StudyReport) -> str:
    """Return the hash of the numbers and verdicts, as they are printed."""
    rows = [[row.row.name, *map(str, row.entries.values())] for row in report.table.rows]
    return digest([rows, *(section.lines for section in report.sections)])


def sign(path: Path, report: StudyReport) -> None:
    """Put the fingerprint of what a picture shows into it, and its colours into a palette."""
    about = PngInfo()
    about.add_text(KEY, fingerprint(report))
    with Image.open(path) as image:
        image.convert("RGB").quantize(128).save(path, pnginfo=about, optimize=True)


def main() -> None:
    """Draw the figures and, with a browser, the pictures of the page."""
    with TemporaryDirectory() as folder:
        reports = {name: built(name, Path(folder) / name) for name in STUDIES}
        for name, report in reports.items():
            figure, *_ = plot.save(picture_of(name, report), Path(folder))
            figure.replace(DOCS / f"{name}.png")
            sign(DOCS / f"{name}.png", report)
        if not (browser := os.environ.get("CHROMIUM")):
            sys.exit("CHROMIUM: not set; the pictures of the page are as they were")
        for name, (width, height, pixels, dark) in SCREENS.items():
            text = report_page(reports[PAGE])
            text = text.replace("(prefers-color-scheme: dark)", "(min-width: 1px)") if dark else text
            page = Path(folder) / "report.html"
            page.write_text(text, encoding="utf-8")
            flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
            flags += [f"--window-size={width},{height}", f"--force-device-scale-factor={pixels}"]
            subprocess.run([browser, *flags, f"--screenshot={DOCS / name}", page.as_uri()], check=True)
            sign(DOCS / name, reports[PAGE])


if __name__ == "__main__":
    main()
