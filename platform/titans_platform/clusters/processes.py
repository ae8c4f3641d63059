"""Processes that outlive the command that started them, identified by process id and time of birth."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from titans_platform.clusters.steps import Call, Step


def _psutil() -> Any:
    """The psutil that Ray bundles; it can be imported once Ray is."""
    importlib.import_module("ray")
    return importlib.import_module("psutil")


def record(pid: int, role: str) -> dict[str, Any]:
    """What identifies a process for good: an id is reused, an id with its time of birth is not."""
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
    """The living process of a record and all its descendants."""
    found = find(process)
    if found is None:
        return []
    with contextlib.suppress(_psutil().Error):
        return [found, *found.children(recursive=True)]
    return [found]


def end(processes: Iterable[Mapping[str, Any]], grace: float = 8.0) -> None:
    """Terminate the recorded processes; after ``grace`` seconds kill what is left of them and below."""
    psutil = _psutil()
    families = [family(process) for process in processes]
    everyone = [member for members in families for member in members]
    for members in families:
        with contextlib.suppress(psutil.Error):
            # Ray's own start command ends its children with it
            for first in members[:1]:
                first.terminate()
    _, alive = psutil.wait_procs(everyone, timeout=grace)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=grace)


def end_processes(processes: Sequence[Mapping[str, Any]]) -> Step:
    """The step that ends recorded processes and their descendants."""
    alive = [process for process in processes if find(process)]
    pids, roles = (", ".join(str(process[key]) for process in alive) for key in ("pid", "role"))
    line = f"kill {pids.replace(',', '')}  # {roles}, and their descendants"
    return Call(line if alive else "# none of its processes is alive", partial(end, processes))
