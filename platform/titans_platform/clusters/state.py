"""What `up` started, kept outside the project, so that `down` can end that and nothing else."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titans_platform.files import read_json, write_json


def state_home() -> Path:
    """The folder of all clusters' states; XDG_STATE_HOME moves it."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "titans" / "clusters"


@dataclass(frozen=True)
class State:
    """The folder of one cluster's state: a JSON file, its token where `up` made one, logs."""

    name: str

    @property
    def folder(self) -> Path:
        """The folder; it need not exist."""
        return state_home() / self.name

    @property
    def token(self) -> Path:
        """The file of a token that is this cluster's own."""
        return self.folder / "token"

    def read(self) -> dict[str, Any] | None:
        """What was written, or None where nothing is up."""
        return read_json(self.folder / "state.json")

    def write(self, value: dict[str, Any]) -> None:
        """Write it down, whole or not at all; nobody else may look."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(self.folder / "state.json", value)

    def forget(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
