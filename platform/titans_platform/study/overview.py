"""The paper's tables and figures: which study reproduces each, and how much of it has been run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titans_platform.runs.folder import RunFolder
from titans_platform.study.folder import StudyFolder
from titans_platform.study.grid import known_studies, load_study
from titans_platform.study.paper import Printed, read_paper
from titans_platform.study.spec import Study


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
        return [head, f"  study {self.study.name}; scales {', '.join(map(self._scale, self.study.scales))}"]

    def _scale(self, name: str) -> str:
        done, cells = self.ran.get(name, (0, 0))
        return f"{name} ({done} of {cells} cells done)" if cells else name


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
        study = studies.get(name)
        items.append(Item(names, printed, study, _ran(study, root) if study else {}))
    return items


def studies_of_the_paper() -> dict[str, Study]:
    """The studies that reproduce a table or figure, by name. Raises UsageError for an invalid file."""
    wanted = {each.study for each in read_paper().items.values()}
    return {name: load_study(name) for name in known_studies() if name in wanted}


def _ran(study: Study, root: Path) -> dict[str, tuple[int, int]]:
    ran = {}
    for scale in study.scales:
        if record := StudyFolder(root, f"{study.name}-{scale}").record():
            states = [RunFolder(root, cell.cell).state() for cell in record.cells if cell.cell]
            ran[scale] = states.count("done"), len(record.cells)
    return ran
