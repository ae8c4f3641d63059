"""The state of what has been run, from the files under a root alone, with or without a live driver.

The state of a study and of its cells, where their time went, and how much of the paper's tables has been run.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from titans_platform.config import RunConfig
from titans_platform.errors import UsageError
from titans_platform.files import is_locked, read_json
from titans_platform.loading import validate
from titans_platform.runs.folder import RunFolder
from titans_platform.study.grid import LOCK, RECORD, STUDIES, Cell, StudyRun, known_studies, load_study
from titans_platform.study.spec import Printed, Study, read_paper

TRAINING_SHARE = 0.9
"""Assumed fraction of a cell's time spent in training; the rest is evaluation."""


class CellStatus(NamedTuple):
    """The state of one cell."""

    cell: str | None
    """Name of its folder; None while its data are not prepared."""
    row: str
    seed: int
    state: str
    """done, running, failed, interrupted or missing: see `RunFolder.state`."""
    progress: dict[str, Any]
    """The run's progress, with its ``age`` in seconds; empty for a cell that does not train."""
    reason: str = ""
    """The cause of a failure."""

    @property
    def fraction(self) -> float:
        """Finished share of the cell, 0 to 1."""
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
        progress = folder.progress() if state in ("running", "interrupted") else None
        reason = str((folder.failure() or {}).get("reason", "")) if state == "failed" else ""
        statuses.append(CellStatus(cell.name, cell.row, cell.seed, state, progress or {}, reason))
    return statuses


def counts(statuses: Sequence[CellStatus]) -> dict[str, int]:
    """Count the cells by state."""
    by_state = Counter(item.state for item in statuses)
    return {state: by_state[state] for state in ("done", "running", "failed", "interrupted", "missing")}


def counted(counts: Mapping[str, int]) -> str:
    """Return the number of cells by state, as text."""
    return ", ".join(f"{n} {state}" for state, n in counts.items() if n or state == "done")


def labels_of(root: Path) -> list[str]:
    """Return the studies that have run under a root, as their folders are named."""
    return sorted(path.parent.name for path in root.glob(f"{STUDIES}/*/{RECORD}"))


def read_status(root: Path, study: str, scale: str = "") -> dict[str, Any]:
    """Read a study's status by name and scale, or by its folder's name; as `sweep status --json` has it.

    Without ``scale`` it is laptop, or the only one that has run. Its ``cells`` are `CellStatus`. The study's
    own file is only needed if it has not run. Raises UsageError.
    """
    known = {label.casefold(): label for label in labels_of(root)}
    label = known.get(f"{study}-{scale or 'laptop'}".casefold()) or known.get(study.casefold())
    begun = [known[key] for key in known if not scale and key.startswith(f"{study}-".casefold())]
    if not label and len(begun) == 1:
        label = begun[0]
    if not label:
        file = load_study(study)
        label = f"{file.name}-{file.scale_name(scale)}"
    path = root / STUDIES / label
    if (record := read_json(path / RECORD)) is None:
        raise UsageError(f"{label}: nothing has run under {root}; start with titans sweep run")
    cells = [Cell(c["row"], c["seed"], validate(RunConfig, c["config"]), c["cell"]) for c in record["cells"]]
    statuses, file = cell_statuses(cells, root), validate(Study, record["study"], str(path / RECORD))
    run = StudyRun(file, record["scale"], root, record["commit"], tuple(record["set"])).with_search()
    # locks may not be visible across machines; the files that cells write are
    elsewhere = record["host"] != platform.node() and counts(statuses)["running"] > 0
    return {
        "study": label, "running": is_locked(path / LOCK) or elsewhere, "host": record["host"],
        "counts": counts(statuses), "search": run.search.record() if run.search else None, "cells": statuses,
    }  # fmt: skip


@dataclass(frozen=True)
class PaperItem:
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
        sizes = [size for each in self.printed for size in each.sizes]
        return [size for size in sizes if self.study and size in self.study.scales]

    def record(self) -> dict[str, Any]:
        """Return the state of its study as a JSON value."""
        ran = {scale: {"done": done, "cells": cells} for scale, (done, cells) in self.ran.items()}
        return {"paper": self.names, "ran": ran}

    def lines(self) -> list[str]:
        """Lines for a terminal: the title, then the state of its study."""
        head = f"{' and '.join(self.names)}: {self.title}"
        if self.study is None:
            return [head, f"  study {self.printed[0].study} does not exist yet"]
        ran = {name: f"{name} ({done} of {n} cells done)" for name, (done, n) in self.ran.items() if n}
        scales = ", ".join(ran.get(name, name) for name in self.study.scales)
        return [head, f"  study {self.study.name}; scales {scales}"]


def overview(root: Path, studies: Mapping[str, Study]) -> list[PaperItem]:
    """Return all tables and figures in the paper's order; a study's are together.

    ``studies`` are the available ones, by name.
    """
    by_study: dict[str, list[tuple[str, Printed]]] = {}
    for name, each in read_paper().items.items():
        by_study.setdefault(each.study, []).append((name, each))
    items = []
    for name, printed_items in by_study.items():
        names, printed = zip(*printed_items, strict=True)
        study, ran = studies.get(name), {}
        for scale in study.scales if study else ():
            if record := read_json(root / STUDIES / f"{name}-{scale}" / RECORD):
                states = [RunFolder(root, cell["cell"]).state() for cell in record["cells"] if cell["cell"]]
                ran[scale] = states.count("done"), len(record["cells"])
        items.append(PaperItem(names, printed, study, ran))
    return items


def studies_of_the_paper() -> dict[str, Study]:
    """Load the studies that reproduce a table or figure, by name. Raises UsageError for an invalid file."""
    named = {each.study for each in read_paper().items.values()}
    return {name: load_study(name) for name in known_studies() if name in named}
