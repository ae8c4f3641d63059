"""The folder of a study, ``root/studies/<label>``: its files and its lock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from titans_core.config import Frozen
from titans_platform.errors import UsageError
from titans_platform.files import file_lock, is_locked, read_json, write_json
from titans_platform.provenance import note_command

STUDIES = "studies"


class CellRecord(Frozen):
    """A cell as ``cells.json`` lists it."""

    cell: str | None = None
    """Name of its folder; None while its data are not prepared."""
    row: str
    seed: int
    config: dict[str, Any] = Field(default_factory=dict)
    """The run's config as JSON, which may be of an earlier version."""


class StudyRecord(Frozen, extra="ignore"):
    """What ``cells.json`` holds: which cells a study has, and how it was started."""

    study: str
    scale: str
    set: tuple[str, ...] = ()
    """The ``--set`` options."""
    commit: str
    host: str = ""
    """The machine of the driver."""
    mlflow: str | None = None
    """Address of the MLflow server; None for the store under the root."""
    cells: tuple[CellRecord, ...]


@dataclass(frozen=True)
class StudyFolder:
    """The files of one study at one scale."""

    root: Path
    label: str

    @property
    def path(self) -> Path:
        """The folder itself; it need not exist."""
        return self.root / STUDIES / self.label

    @staticmethod
    def all(root: Path) -> list[StudyFolder]:
        """The folders of all studies that have run under a root, by name."""
        return [StudyFolder(root, path.parent.name) for path in sorted((root / STUDIES).glob("*/cells.json"))]

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the study's lock, which is released when the process dies. Raises UsageError."""
        # longer than `sweep status` holds it to see whether it is taken
        with file_lock(self.path / "lock", timeout=2) as got:
            if not got:
                raise UsageError(
                    f"{self.label}: another sweep run works on this study under {self.root}; "
                    "wait for it, or look at titans sweep status"
                )
            yield

    def is_locked(self) -> bool:
        """Whether a driver on this machine works on the study."""
        return is_locked(self.path / "lock")

    def record(self) -> StudyRecord | None:
        """The study's cells as its last driver wrote them; None before the first run."""
        try:
            return StudyRecord.model_validate_json((self.path / "cells.json").read_bytes())
        except (OSError, ValidationError):
            return None

    def study_file(self) -> dict[str, Any] | None:
        """The study file as it was when the study ran last."""
        return read_json(self.path / "study.json")

    def write_record(self, record: StudyRecord, study_file: dict[str, Any]) -> None:
        """Write ``cells.json`` and ``study.json`` for status and reports; note the command."""
        write_json(self.path / "study.json", study_file)
        write_json(self.path / "cells.json", record.model_dump(mode="json"))
        note_command(self.path)

    def search(self) -> dict[str, Any] | None:
        """The record of the study's search."""
        return read_json(self.path / "search.json")

    def write_search(self, record: dict[str, Any]) -> None:
        """Write ``search.json``."""
        write_json(self.path / "search.json", record)

    def timings(self) -> dict[str, Any] | None:
        """Where the time of the last run went."""
        return read_json(self.path / "timings.json")

    def write_timings(self, record: dict[str, Any]) -> None:
        """Write ``timings.json``."""
        write_json(self.path / "timings.json", record)

    @property
    def trials(self) -> Path:
        """A JSON file for each trial of the study's search, named by its cell."""
        return self.path / "trials"

    @property
    def tune(self) -> Path:
        """Ray Tune's own files, deleted after each run."""
        return self.path / "tune"

    @contextmanager
    def output(self, name: str) -> Iterator[None]:
        """Send stdout and stderr, where Ray prints, to a file; consoles opened before are not affected."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", buffering=1) as log, redirect_stdout(log), redirect_stderr(log):
            yield
