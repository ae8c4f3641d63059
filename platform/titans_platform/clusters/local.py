"""Kind `nodes`: several real Ray nodes on this machine.

Each node has its own raylet, store and folder, and is a `ray start --block` in a session of its
own; `down` terminates these processes and their descendants, without `ray stop`, which would stop every Ray
of the machine. Other users of the machine have no access: only the owner can enter the folder from which
workers import a job's code, and Ray listens on the loopback interface only. (PyTorch, in a cell with several
workers, listens on all interfaces.)
"""

from __future__ import annotations

import secrets
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import psutil
from pydantic import model_validator

from titans_core.config import PositiveInt
from titans_platform.clusters.base import Cluster, Count
from titans_platform.clusters.rayjobs import RayJobs
from titans_platform.clusters.steps import (
    LOOPBACK,
    Note,
    Step,
    command_text,
    detached,
    free_ports,
    new_token,
    perform,
    token_variables,
)
from titans_platform.errors import ClusterError

_MAX_TEMP_PATH = 24
"""Longest temporary directory that leaves room for Ray's socket paths (at most 107 characters)."""
_START_SECONDS = 90

# `ray start` replaces 127.0.0.1 by the machine's network address, and Ray then listens on all interfaces.
# With RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 it keeps 127.0.0.1, but refuses to add a node to a head. So all of
# Ray's processes get the variable, and this command is `ray start` without that replacement and refusal.
_RAY_START = (
    "from ray._private import ray_constants, services; services.resolve_ip_for_localhost = str; "
    "ray_constants.ENABLE_RAY_CLUSTER = True; from ray.scripts.scripts import main; main()"
)
_ENVIRONMENT = {
    # a job's python and pip are those on the node's PATH
    "PATH": f"{Path(sys.executable).parent}:$PATH",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # the priority of whoever started the nodes, not 15 below everything else on the machine
    "RAY_worker_niceness": "0",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
}


class Nodes(Cluster):
    """Ray nodes of this machine."""

    sees_paths: ClassVar[bool] = True
    started_here: ClassVar[bool] = True
    own_token: ClassVar[bool] = True
    nodes: PositiveInt = 3
    """Ray nodes, including the head."""
    cpus_per_node: PositiveInt = 1
    """Logical CPUs of a node, for Ray's scheduler; processes are not pinned."""
    gpus_per_node: Count = 0
    object_store_mb: PositiveInt = 100
    """Shared memory of each node's object store; Ray requires at least 75."""

    @model_validator(mode="after")
    def _own(self) -> Nodes:
        if self.token:
            raise ValueError("token: these nodes generate their own token; leave it out")
        return self

    @property
    def one_machine(self) -> bool:
        return True

    def up_steps(self) -> list[Step]:
        """Return the steps: a private folder, a token, a head, the other nodes, on ports that are free."""
        temp = tempfile.gettempdir()
        base = Path(temp if temp.isascii() and len(temp) <= _MAX_TEMP_PATH else "/tmp")
        folder = base / f"titans-{secrets.token_hex(4)}"
        head, dashboard, client, *agents = free_ports(3 + self.nodes)
        address = f"http://{LOOPBACK}:{dashboard}"
        facts = {"address": address, "folder": str(folder), "processes": []}
        ports = {"port": head, "dashboard-port": dashboard, "ray-client-server-port": client}
        begin = ["--head", "--dashboard-host", LOOPBACK, *_options(ports)]
        join = ["--address", f"{LOOPBACK}:{head}"]
        agent = "--dashboard-agent-listen-port"
        first, *others = (
            self._start(facts, number, [*(join if number else begin), agent, str(port)])
            for number, port in enumerate(agents)
        )
        return [
            Step(f"mkdir -m 700 {shlex.quote(str(folder))}", partial(folder.mkdir, mode=0o700)),
            new_token(self.token_used.path),
            first,
            self._wait(f"{address} answers", 1),
            *others,
            self._wait(f"all {self.nodes} nodes are alive", self.nodes),
        ]

    def _start(self, facts: dict[str, Any], number: int, how: list[str]) -> Step:
        options = {
            "node-ip-address": LOOPBACK,
            "num-cpus": self.cpus_per_node,
            "num-gpus": self.gpus_per_node,
            # 0: any free port; the default ranges of several nodes on one machine collide
            "min-worker-port": 0,
            "max-worker-port": 0,
            "temp-dir": f"{facts['folder']}/{number}",
            # it forwards worker output to drivers, which ours do not read
            "include-log-monitor": "false",
            "object-store-memory": self.object_store_mb * 2**20,
        }
        ray = (sys.executable, "-c", _RAY_START, "start")
        argv = (*ray, *how, *_options(options), "--disable-usage-stats", "--block")
        env = {**token_variables(self.token_used.path), **_ENVIRONMENT}

        def start() -> None:
            with self._log(number).open("wb") as log:
                process = detached(argv, env, stdout=log, stderr=log)
            # recorded immediately: `down` stops only recorded processes
            facts["processes"].append(record(process.pid, f"node {number}" if number else "head"))
            self.record(facts)

        return Step(f"{command_text(argv, env)} > {shlex.quote(str(self._log(number)))} 2>&1 &", start)

    def _log(self, number: int) -> Path:
        return self.state_folder / f"node-{number}.log"

    def _wait(self, event: str, count: int) -> Step:
        """Wait until ``count`` nodes are alive; if not, the log of the last one says why."""

        def wait() -> None:
            deadline = time.monotonic() + _START_SECONDS
            while True:
                # the dashboard serves some endpoints before this one
                with suppress(ClusterError):
                    if sum(node["alive"] for node in self.jobs().describe()["nodes"]) >= count:
                        return
                for number, process in enumerate(self.require_up()["processes"]):
                    if find(process) is None:
                        raise ClusterError(f"{process['role']} exited early; see {self._log(number)}")
                if time.monotonic() > deadline:
                    raise ClusterError(f"{event}: {_START_SECONDS} s are over; see {self._log(count - 1)}")
                time.sleep(0.3)

        return Step(f"# wait until {event}", wait)

    def up(self) -> str:
        """Start the nodes; if one fails to start, stop the others."""
        running = self.recorded()
        if running and any(find(process) for process in running["processes"]):
            return super().up()
        if running:
            # stale: the machine was restarted, or all nodes were killed
            self.down()
        try:
            return super().up()
        except BaseException:
            if running := self.recorded():
                # keep the logs: the error names them
                perform(_end_steps(running))
                (self.state_folder / "state.json").unlink()
            raise

    def down_steps(self) -> list[Step]:
        if (running := self.recorded()) is None:
            return [Note("nothing to stop: it is not up")]
        return _end_steps(running, str(self.state_folder))

    def where(self) -> str:
        return self.require_up()["address"]

    def status(self) -> dict[str, Any]:
        """Return `down`, or what Ray reports, with the process of each node."""
        if (running := self.recorded()) is None:
            return {"state": "down", "where": "this machine", "nodes": [], "jobs": []}
        processes = [{**process, "alive": find(process) is not None} for process in running["processes"]]
        if processes and processes[0]["alive"]:
            return {**super().status(), "processes": processes}
        state = "broken: the head is dead; take it down"
        return {"state": state, "where": self.where(), "nodes": [], "jobs": [], "processes": processes}

    def jobs(self) -> RayJobs:
        address = (self.recorded() or {}).get("address", f"http://{LOOPBACK}:<port>")
        return RayJobs(self.name, address, self.token_used)


def _options(values: dict[str, Any]) -> list[str]:
    return [part for key, value in values.items() for part in (f"--{key}", str(value))]


def _end_steps(running: Mapping[str, Any], *folders: str) -> list[Step]:
    """Stop the recorded processes and delete their folder and ``folders``. Idempotent."""
    alive = [process for process in running["processes"] if find(process)]
    pids, roles = " ".join(str(p["pid"]) for p in alive), ", ".join(p["role"] for p in alive)
    line = f"kill {pids}  # {roles}, and their descendants" if alive else "# none of its processes is alive"
    folders = (running["folder"], *folders)

    def remove() -> None:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)

    return [Step(line, partial(_end, running["processes"])), Step(f"rm -r {shlex.join(folders)}", remove)]


def record(pid: int, role: str) -> dict[str, Any]:
    """Return a process's unique identity: pids are reused, a pid with its creation time is not."""
    return {"pid": pid, "born": psutil.Process(pid).create_time(), "role": role}


def find(process: Mapping[str, Any]) -> Any | None:
    """Return the living process of a record, or None."""
    try:
        living = psutil.Process(process["pid"])
        same = abs(living.create_time() - process["born"]) < 0.05
        return living if same and living.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None


def family(process: Mapping[str, Any]) -> list[Any]:
    """Return the living process of a record and all its descendants."""
    if (living := find(process)) is None:
        return []
    with suppress(psutil.Error):
        return [living, *living.children(recursive=True)]
    return [living]


def _end(processes: Sequence[Mapping[str, Any]], grace: float = 8.0) -> None:
    """Terminate the recorded processes; after ``grace`` seconds kill what is left of them and below."""
    families = [family(process) for process in processes]
    for first in (members[0] for members in families if members):
        with suppress(psutil.Error):
            # `ray start --block` terminates its children when it exits
            first.terminate()
    _, alive = psutil.wait_procs([member for members in families for member in members], timeout=grace)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=grace)
