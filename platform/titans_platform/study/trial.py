"""One cell as a Tune trial: what runs on a worker."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titans_platform.config import RunConfig
from titans_platform.files import write_json
from titans_platform.runs.folder import SPAN, RunFolder


def run_trial(task: dict[str, Any]) -> dict[str, Any]:
    """Run one cell from where it stopped; its state, done or failed.

    A failure is written down and returned, never raised: Tune starts a trial again whose process died, and
    another try of what raised would raise again.
    """
    folder = RunFolder(Path(task["root"]), task["cell"])
    began = time.time()
    try:
        with folder.hold():
            if folder.result() is None:
                folder.begin(task["commit"])
                _fit(task)
            folder.drop_stale()
    except Exception as error:
        folder.record_failure(error, task["commit"])
        return {"state": "failed"}
    finally:
        span = {"began": began, "ended": time.time(), "pid": os.getpid(), "host": platform.node()}
        write_json(folder.path / SPAN, span)
    return {"state": "done"}


def _fit(task: dict[str, Any]) -> None:
    from titans_platform.runs.execute import Tracked

    fit_cell(
        RunConfig.model_validate_json(task["config"]),
        Path(task["root"]),
        task["cell"],
        task["resources"],
        extra={"study": task["study"], "row": task["row"]},
        tracked=Tracked(*task["tracked"]),
    )


def fit_cell(
    config: RunConfig, root: Path, cell: str, resources: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    """Train a cell on what its scale gives it: one worker in this process, several as Ray's."""
    from titans_platform.runs.workers import Resources, fit

    # a second process for one worker would only cost its start
    workers = resources["workers"] if resources["workers"] > 1 else 0
    share = Resources(workers, resources["cpus_per_worker"], resources["gpus_per_worker"])
    return fit(config, root, cell, share, **more)
