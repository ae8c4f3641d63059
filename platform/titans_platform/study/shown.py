"""What `sweep run` printed of a complete study, to be printed again while nothing behind it has changed.

Running nothing takes seconds of imports, most of them torch. Here none of them is needed.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from titans_kernels.registry import source_file
from titans_platform.config import digest
from titans_platform.files import file_times, read_json, write_json
from titans_platform.provenance import code_times, commit
from titans_platform.runs.folder import RESULT
from titans_platform.study.grid import StudyRun, load_study

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
    texts = {text for config in configs for text in _texts(config.model_dump(mode="json"))}
    if any("://" in text for text in texts) or any(config.start_from for config in configs):
        return None
    folder = run.folder.path
    return [
        *(cell.folder(run.root).path / RESULT for cell in run.whole),
        *(path for path in folder.iterdir() if path.suffix in (".html", ".md", ".tex", ".csv")),
        *(folder / "cells.json", *(folder / "figures").glob("*")),
        *filter(None, map(source_file, texts)),
        *(path for text in texts for path in _at(text)),
    ]


def _texts(value: Any) -> Iterator[str]:
    """Every text in a JSON value, keys apart."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _at(text: str) -> Iterator[Path]:
    """Files and folders at a path or pattern; a folder's time changes with the files in it."""
    for name in glob.glob(os.path.expanduser(text)):
        yield Path(name)
        yield from Path(name).rglob("*")
