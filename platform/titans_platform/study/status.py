"""What has been run, from the files under a root alone, whether or not a driver is alive.

The state of a study and of its cells, where their time went, and how much of the paper's tables has been run.
`read_request`: what `sweep run` printed of a complete study is printed again while nothing behind it has
changed, since running nothing takes seconds of imports, most of them torch. Here none of them is needed.
"""

from __future__ import annotations

import glob
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from titans_kernels.registry import source_file
from titans_platform.config import RunConfig, digest
from titans_platform.errors import UsageError
from titans_platform.files import file_times, read_json, write_json
from titans_platform.loading import validate
from titans_platform.provenance import code_times, commit
from titans_platform.runs.folder import RESULT, RunFolder
from titans_platform.study.folder import StudyFolder, StudyRecord
from titans_platform.study.grid import Cell, StudyRun, known_studies, load_study
from titans_platform.study.spec import Printed, Study, read_paper
from titans_platform.text import texts

TRAINING_SHARE = 0.9
"""Assumed fraction of a cell's time spent in training; the rest is evaluation."""


@dataclass(frozen=True)
class CellStatus:
    """The state of one cell."""

    cell: Cell
    state: str
    """done, running, failed, interrupted or missing: see `RunFolder.state`."""
    progress: dict[str, Any]
    """The run's progress.json, with its ``age`` in seconds; empty for a cell that does not train."""
    reason: str = ""
    """Why the cell failed."""

    @property
    def fraction(self) -> float:
        """How much of the cell is finished, 0 to 1."""
        if self.state in ("done", "failed"):
            return 1.0
        steps = self.progress.get("steps") or 0
        return TRAINING_SHARE * float(self.progress.get("step", 0)) / steps if steps else 0.0


def cell_statuses(cells: Sequence[Cell], root: Path) -> list[CellStatus]:
    """Read the state of every cell."""
    statuses = []
    for cell in cells:
        folder = cell.folder(root)
        state = folder.state()
        failure = folder.failure() if state == "failed" else None
        progress = folder.progress() if state in ("running", "interrupted") else None
        statuses.append(CellStatus(cell, state, progress or {}, str((failure or {}).get("reason", ""))))
    return statuses


def counts(statuses: Sequence[CellStatus]) -> dict[str, int]:
    """Number of cells by state."""
    found = Counter(item.state for item in statuses)
    return {state: found[state] for state in ("done", "running", "failed", "interrupted", "missing")}


def counted(counts: Mapping[str, int]) -> str:
    """Number of cells by state, as text."""
    return ", ".join(f"{n} {state}" for state, n in counts.items() if n or state == "done")


@dataclass(frozen=True)
class StudyStatus:
    """The state of a study."""

    folder: StudyFolder
    host: str
    """The machine of its last driver."""
    running: bool
    """Whether a driver works on it."""
    cells: list[CellStatus]
    search: dict[str, Any] | None
    timings: dict[str, Any] | None

    def record(self) -> dict[str, Any]:
        """The status as a JSON value."""
        return {
            "study": self.folder.label,
            "running": self.running,
            "host": self.host,
            "counts": counts(self.cells),
            "overhead": self.timings,
            "search": self.search,
            "cells": [
                {
                    "cell": item.cell.name,
                    "row": item.cell.row,
                    "seed": item.cell.seed,
                    "state": item.state,
                    "reason": item.reason or None,
                    "progress": item.progress or None,
                }
                for item in self.cells
            ],
        }


def read_status(study: str, scale: str, root: Path) -> StudyStatus:
    """The status of a study by name and scale; the study's own file is only needed if it has not run.

    Raises UsageError.
    """
    known = {folder.label.casefold(): folder for folder in StudyFolder.all(root)}
    if (folder := known.get(f"{study}-{scale}".casefold())) is None:
        file = load_study(study)
        folder = StudyFolder(root, f"{file.name}-{file.scale_name(scale)}")
    return status_of(folder)


def status_of(folder: StudyFolder) -> StudyStatus:
    """The status of the study in a folder. Raises UsageError."""
    if (record := folder.record()) is None:
        raise UsageError(f"{folder.label}: nothing has run under {folder.root}; start with titans sweep run")
    cells = [Cell(each.row, each.seed, validate(RunConfig, each.config), each.cell) for each in record.cells]
    statuses = cell_statuses(cells, folder.root)
    # locks may not be visible across machines; the files that cells write are
    running = folder.is_locked() or (record.host != platform.node() and counts(statuses)["running"] > 0)
    return StudyStatus(folder, record.host, running, statuses, _search(folder, record), folder.timings())


def _search(folder: StudyFolder, record: StudyRecord) -> dict[str, Any] | None:
    """The record of the study's search, with the current state of its trials."""
    if (file := folder.study_file()) is None:
        return None
    study = validate(Study, file, str(folder.path / "study.json"))
    search = StudyRun(study, record.scale, folder.root, record.commit, record.set).with_search().search
    return search.record() if search else None


def timings(began: float, cells: Sequence[Cell], root: Path, slots: int) -> dict[str, Any]:
    """Where the time of a command went that ``began`` then and ran ``cells``, ``slots`` at once.

    Times are slot-seconds, so the total is wall time x slots. Everything except training and evaluation is
    overhead; it has a part for each phase of a cell, one for the start of a cell's process, and one for the
    time in which a slot ran no cell.
    """
    recorded = (cell.folder(root).attempt() for cell in cells)
    spans = [span for span in recorded if span and span["began"] >= began]
    phases: Counter[str] = Counter()
    for span in spans:
        phases.update(span["seconds"])
    own = sum(phases.pop(name, 0.0) for name in ("train", "evaluate"))
    busy = sum(span["ended"] - span["began"] for span in spans)
    wall, count = time.time() - began, len(spans)
    start, overhead = max(0.0, busy - own - sum(phases.values())), wall * slots - own
    parts = {**phases, "start of a cell": start, "outside of cells": wall * slots - busy}
    return {
        "cells": count,
        "slots": slots,
        "wall_seconds": wall,
        "own_seconds": own,
        "overhead_seconds_a_cell": overhead / count if count else None,
        "wall_over_own": wall * slots / own if own else None,
        "parts_seconds_a_cell": {name: seconds / count for name, seconds in parts.items()} if count else {},
    }


def timings_line(record: dict[str, Any]) -> str:
    """One-sentence summary, largest parts first."""
    if not record["cells"]:
        return "Overhead: no cell ended in this run."
    parts = sorted(record["parts_seconds_a_cell"].items(), key=lambda part: -part[1])
    listed = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts if seconds >= 0.005)
    # None if every cell failed
    ratio = record["wall_over_own"]
    wall = "" if ratio is None else f"; wall time {ratio:.2f} times the cells' own"
    return (
        f"Overhead: {record['overhead_seconds_a_cell']:.1f} s a cell ({record['cells']} cells, "
        f"{record['slots']} at once{wall}): {listed}."
    )


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper, or several of the same study."""

    names: tuple[str, ...]
    printed: tuple[Printed, ...]
    study: Study | None
    """None if the project has no such study yet."""
    ran: dict[str, tuple[int, int]]
    """Finished and requested cells of each scale that has been run."""

    @property
    def title(self) -> str:
        """Its caption in the paper."""
        return "; ".join(dict.fromkeys(each.title for each in self.printed))

    @property
    def sizes(self) -> list[str]:
        """The scales of the study that the paper's numbers belong to."""
        sizes = [size for each in self.printed for size in each.by_size()]
        return [size for size in sizes if self.study and size in self.study.scales]

    def record(self) -> dict[str, Any]:
        """The state of its study as a JSON value."""
        ran = {scale: {"done": done, "cells": cells} for scale, (done, cells) in self.ran.items()}
        return {"paper": self.names, "ran": ran}

    def lines(self) -> list[str]:
        """Lines for a terminal: the title, then the state of its study."""
        head = f"{' and '.join(self.names)}: {self.title}"
        if self.study is None:
            return [head, f"  study {self.printed[0].study} does not exist yet"]
        ran = {name: f"{name} ({done} of {of} cells done)" for name, (done, of) in self.ran.items() if of}
        scales = ", ".join(ran.get(name, name) for name in self.study.scales)
        return [head, f"  study {self.study.name}; scales {scales}"]


def overview(root: Path, studies: Mapping[str, Study]) -> list[Item]:
    """All tables and figures in the paper's order; those of one study are together.

    ``studies`` are the available ones, by name.
    """
    by_study: dict[str, list[tuple[str, Printed]]] = {}
    for name, each in read_paper().items.items():
        by_study.setdefault(each.study, []).append((name, each))
    items = []
    for name, found in by_study.items():
        names, printed = zip(*found, strict=True)
        study, ran = studies.get(name), {}
        for scale in study.scales if study else ():
            if record := StudyFolder(root, f"{name}-{scale}").record():
                states = [RunFolder(root, cell.cell).state() for cell in record.cells if cell.cell]
                ran[scale] = states.count("done"), len(record.cells)
        items.append(Item(names, printed, study, ran))
    return items


def studies_of_the_paper() -> dict[str, Study]:
    """The studies that reproduce a table or figure, by name. Raises UsageError for an invalid file."""
    wanted = {each.study for each in read_paper().items.values()}
    return {name: load_study(name) for name in known_studies() if name in wanted}


SHOWN = "shown.json"


@dataclass(frozen=True)
class Request:
    """What a command was asked for."""

    path: Path
    """The file in the study's folder that keeps what was printed."""
    key: str
    """Hash of everything that decides what is printed, files under the root and inputs of the runs apart."""

    def shown(self) -> dict[str, Any] | None:
        """What was printed for the same request, if no file behind it has changed since; else None."""
        kept = read_json(self.path)
        if not kept or kept["key"] != self.key or kept["files"] != file_times(kept["files"]):
            return None
        return kept["shown"]

    def keep(self, run: StudyRun, shown: dict[str, Any]) -> None:
        """Keep what was printed of a complete study, with the times and sizes of the files behind it."""
        if (files := _files(run)) is not None:
            write_json(self.path, {"key": self.key, "files": file_times(map(str, files)), "shown": shown})


def read_request(
    console: Console, study: str, scale: str, root: Path, overrides: tuple[str, ...], **options: Any
) -> Request | None:
    """The request that the options of `sweep run` make; None for a study that searches. Raises UsageError."""
    file, root = load_study(study), root.resolve()
    if file.search_at(scale := file.scale_name(scale)):
        return None
    code = [commit(), sys.version, code_times()]
    terminal = [console.width, console.color_system, os.getcwd()]
    asked = [file.model_dump(mode="json"), scale, str(root), overrides, options]
    folder = StudyRun(file, scale, root, commit(), overrides).folder
    return Request(folder.path / SHOWN, digest([code, terminal, asked]))


def _files(run: StudyRun) -> list[Path] | None:
    """The report, and the files that it depends on: results, and inputs of the runs.

    None if the inputs may change elsewhere: a bucket, or another run's checkpoint to start from.
    """
    configs = {cell.row: cell.config for cell in run.whole}.values()
    found = {text for config in configs for text in texts(config.model_dump(mode="json"))}
    if any("://" in text for text in found) or any(config.start_from for config in configs):
        return None
    folder = run.folder.path
    return [
        *(cell.folder(run.root).path / RESULT for cell in run.whole),
        *(path for path in folder.iterdir() if path.suffix in (".html", ".md", ".tex", ".csv")),
        *(folder / "cells.json", *(folder / "figures").glob("*")),
        *filter(None, map(source_file, found)),
        *(path for text in found for path in _at(text)),
    ]


def _at(text: str) -> Iterator[Path]:
    """Files and folders at a path or pattern; a folder's time changes with the files in it."""
    for name in glob.glob(os.path.expanduser(text)):
        yield Path(name)
        yield from Path(name).rglob("*")
