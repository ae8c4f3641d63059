"""The state of a study, from the files of its folder and its cells, whether or not its driver is alive."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titans_platform.config import RunConfig
from titans_platform.errors import UsageError
from titans_platform.loading import validate
from titans_platform.study.folder import StudyFolder, StudyRecord
from titans_platform.study.grid import Cell, StudyRun, load_study
from titans_platform.study.spec import Study

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
    states = ("done", "running", "failed", "interrupted", "missing")
    return {state: sum(item.state == state for item in statuses) for state in states}


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
    folder = known.get(f"{study}-{scale}".casefold())
    if folder is None:
        file = load_study(study)
        folder = StudyFolder(root, f"{file.name}-{file.scale_name(scale)}")
    return status_of(folder)


def status_of(folder: StudyFolder) -> StudyStatus:
    """The status of the study in a folder. Raises UsageError."""
    record = folder.record()
    if record is None:
        raise UsageError(f"{folder.label}: nothing has run under {folder.root}; start with titans sweep run")
    cells = [
        Cell(entry.row, entry.seed, validate(RunConfig, entry.config), entry.cell) for entry in record.cells
    ]
    statuses = cell_statuses(cells, folder.root)
    # locks may not be visible across machines; the files that cells write are
    elsewhere = record.host != platform.node()
    running = folder.is_locked() or (elsewhere and counts(statuses)["running"] > 0)
    return StudyStatus(folder, record.host, running, statuses, _search(folder, record), folder.timings())


def _search(folder: StudyFolder, record: StudyRecord) -> dict[str, Any] | None:
    """The record of the study's search, with the current state of its trials."""
    file = folder.study_file()
    if file is None:
        return None
    study = validate(Study, file, str(folder.path / "study.json"))
    search = StudyRun(study, record.scale, folder.root, record.commit, record.set).with_search().search
    return search.record() if search else None
