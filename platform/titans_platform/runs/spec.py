"""A run, whole: what is trained, on what, where it is logged, how often it is saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titans_platform.config import RunConfig
from titans_platform.runs.folder import RunFolder
from titans_platform.runs.resources import Resources

_SAVED = 10
"""Checkpoints of a run whose config leaves that open; in a long one there is one every 500 steps."""


@dataclass(frozen=True)
class Tracking:
    """Where in MLflow a run is logged, and as what."""

    uri: str
    """The store's address."""
    title: str
    """Name of the run in MLflow."""
    parent: str | None = None
    """Run id of the study it is part of."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """The few fields of the config that are columns in MLflow."""
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Rung:
    """Where a run is looked at on its way: after ``step`` optimiser steps, by one column."""

    step: int
    column: str


@dataclass(frozen=True)
class RunSpec:
    """All that `execute` needs to know. `titans train`, a cell of a grid and a trial of a search make one.

    Of these only ``config`` and ``resources.workers`` decide the run's numbers, and so its name.
    """

    config: RunConfig
    root: Path
    """Storage root; one folder to all workers."""
    name: str
    """The run's folder under ``root/cells``; `run_name` gives it."""
    commit: str
    """The commit of the code that runs it."""
    resources: Resources = Resources()
    tracking: Tracking | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    """What goes into the result as it is: the study and the row."""

    @property
    def folder(self) -> RunFolder:
        """Where the run lives."""
        return RunFolder(self.root, self.name)

    @property
    def checkpoint_interval(self) -> int:
        """Optimiser steps between checkpoints."""
        return self.config.checkpoint.every or min(500, max(1, self.config.optim.steps // _SAVED))
