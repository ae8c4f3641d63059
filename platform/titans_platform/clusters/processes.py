"""Processes that outlive the command that started them: written down by id and birth, ended by these."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titans_platform.clusters.steps import Step


def _psutil() -> Any:
    """The psutil that Ray brings along; it can be imported once Ray is."""
    importlib.import_module("ray")
    return importlib.import_module("psutil")


def record(pid: int, role: str) -> dict[str, Any]:
    """What identifies a process for good: an id is given away again, an id with its birth is not."""
    return {"pid": pid, "born": _psutil().Process(pid).create_time(), "role": role}


def find(process: Mapping[str, Any]) -> Any | None:
    """The living process of a record, or None."""
    psutil = _psutil()
    try:
        found = psutil.Process(process["pid"])
        same = abs(found.create_time() - process["born"]) < 0.05
        return found if same and found.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None


def family(process: Mapping[str, Any]) -> list[Any]:
    """The living process of a record and all below it."""
    found = find(process)
    if found is None:
        return []
    with contextlib.suppress(_psutil().Error):
        return [found, *found.children(recursive=True)]
    return [found]


def end(processes: Iterable[Mapping[str, Any]], grace: float = 8.0) -> None:
    """End the recorded processes and all below them: asked first, then killed."""
    psutil = _psutil()
    families = [family(process) for process in processes]
    everyone = [member for members in families for member in members]
    for members in families:
        with contextlib.suppress(psutil.Error):
            # Ray's own start command takes its children with it
            for first in members[:1]:
                first.terminate()
    _, alive = psutil.wait_procs(everyone, timeout=grace)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=grace)


@dataclass(frozen=True)
class EndProcesses(Step):
    """End processes that were written down."""

    processes: Sequence[Mapping[str, Any]]

    def shown(self) -> str:
        """The living ones."""
        alive = [process for process in self.processes if find(process)]
        if not alive:
            return "# no process of it is alive"
        roles = ", ".join(process["role"] for process in alive)
        return f"kill {' '.join(str(process['pid']) for process in alive)}  # {roles}, and what is below them"

    def do(self) -> None:
        """End them."""
        end(self.processes)
