"""Kind `nodes`: several real Ray nodes on this machine, each with its own raylet, store and folder.

What is tried here (a node that dies, a driver that is killed, a job that comes as a wheel) is what happens
on a real cluster. Each node is a `ray start --block` in a session of its own; `down` ends these processes
and their descendants, never `ray stop`, which would end every Ray of the machine.

Other users of the machine are kept out twice: the folder, from which workers import a job's code, can be
entered by its owner alone, and every process listens on the loopback interface only.
"""

from __future__ import annotations

import secrets
import sys
import tempfile
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import model_validator

from titans_core.config import PositiveInt
from titans_platform.clusters.access import LOOPBACK, free_ports, read_token, token_variables
from titans_platform.clusters.base import Cluster, Count
from titans_platform.clusters.processes import end_processes, find, record
from titans_platform.clusters.rayjobs import RayJobs, answers
from titans_platform.clusters.steps import (
    Note,
    Start,
    Step,
    new_token,
    perform,
    private_folder,
    remove,
    wait_until,
)
from titans_platform.errors import ClusterError

_SOCKET_PATH = 24
"""Letters of the temporary directory that leave room for Ray's socket paths, of at most 107."""

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
    """Ray nodes, the head among them."""
    cpus_per_node: PositiveInt = 1
    """CPUs that Ray counts for a node: a number for scheduling, nothing is bound to it."""
    gpus_per_node: Count = 0
    object_store_mb: PositiveInt = 100
    """Shared memory of each node's object store; 75 is the least Ray takes."""

    @model_validator(mode="after")
    def _own(self) -> Nodes:
        if self.token:
            raise ValueError("token: these nodes get a token of their own; leave it out")
        return self

    @property
    def one_machine(self) -> bool:
        return True

    def up_steps(self) -> list[Step]:
        """A private folder, a token, a head, the other nodes; on ports that are free now."""
        folder = _new_folder()
        head, dashboard, client, *agents = free_ports(3 + self.nodes)
        address = f"http://{LOOPBACK}:{dashboard}"
        facts = {"address": address, "folder": str(folder), "processes": []}
        ports = {"port": head, "dashboard-port": dashboard, "ray-client-server-port": client}
        joins = [["--head", "--dashboard-host", LOOPBACK, *_options(ports)]]
        joins += [["--address", f"{LOOPBACK}:{head}"]] * (self.nodes - 1)
        first, *others = (
            self._start(facts, number, [*how, "--dashboard-agent-listen-port", str(port)])
            for number, (how, port) in enumerate(zip(joins, agents, strict=True))
        )
        count = self.nodes
        return [
            private_folder(folder),
            new_token(self.state.token),
            first,
            wait_until(f"{address} answers", partial(self._answers, facts), self._see_log(0)),
            *others,
            wait_until(f"all {count} nodes are alive", partial(self._alive, facts), self._see_log(count - 1)),
        ]

    def _start(self, facts: dict[str, Any], number: int, how: list[str]) -> Start:
        role = "head" if number == 0 else f"node {number}"
        options = {
            "node-ip-address": LOOPBACK,
            "num-cpus": self.cpus_per_node,
            "num-gpus": self.gpus_per_node,
            # 0: any free one; the nodes of one machine would all want the same
            "min-worker-port": 0,
            "max-worker-port": 0,
            "temp-dir": f"{facts['folder']}/{number}",
            # it sends what workers print to drivers, and ours take none of it
            "include-log-monitor": "false",
            "object-store-memory": self.object_store_mb * 2**20,
        }

        def started(pid: int) -> None:
            facts["processes"].append(record(pid, role))
            self.state.write(facts)

        argv = (sys.executable, "-c", _RAY_START, "start", *how, *_options(options))
        return Start(
            (*argv, "--disable-usage-stats", "--block"),
            {**token_variables(self.state.token), **_ENVIRONMENT},
            self.state.folder / f"node-{number}.log",
            started,
        )

    def _see_log(self, number: int) -> str:
        return f"see {self.state.folder}/node-{number}.log"

    def _answers(self, facts: dict[str, Any]) -> bool:
        self._none_ended(facts)
        return answers(facts["address"], read_token(self.token_used, self.name), timeout=2) == 200

    def _alive(self, facts: dict[str, Any]) -> bool:
        self._none_ended(facts)
        # the dashboard answers some requests before it can answer this one
        with suppress(ClusterError):
            nodes = RayJobs(self.name, facts["address"], self.token_used).about()["nodes"]
            return sum(node["alive"] for node in nodes) == self.nodes
        return False

    def _none_ended(self, facts: dict[str, Any]) -> None:
        for number, process in enumerate(facts["processes"]):
            if find(process) is None:
                raise ClusterError(f"{process['role']} ended at once; {self._see_log(number)}")

    def up(self) -> str:
        """Start the nodes; if one does not come up, the others are ended."""
        found = self.state.read()
        if found and any(find(process) for process in found["processes"]):
            return super().up()
        if found:
            # left behind by a machine that was restarted, or by nodes that were all killed
            self.down()
        with ExitStack() as undo:
            undo.callback(self._undo)
            where = super().up()
            undo.pop_all()
        return where

    def _undo(self) -> None:
        found = self.state.read()
        if found:
            # the logs stay, the error names them
            perform([end_processes(found["processes"]), remove(found["folder"])])
            self.state.file.unlink()

    def down_steps(self) -> list[Step]:
        found = self.state.read()
        if found is None:
            return [Note("nothing to end: it is not up")]
        return [end_processes(found["processes"]), remove(found["folder"], str(self.state.folder))]

    def where(self) -> str:
        return self.require_up()["address"]

    def status(self) -> dict[str, Any]:
        """Down, or what Ray reports, with the process of each node."""
        found = self.state.read()
        if found is None:
            return {"state": "down", "where": "this machine", "nodes": [], "jobs": []}
        processes = [{**process, "alive": find(process) is not None} for process in found["processes"]]
        if not processes or not processes[0]["alive"]:
            state = "broken: the head is dead; take it down"
            return {"state": state, "where": self.where(), "nodes": [], "jobs": [], "processes": processes}
        return {**super().status(), "processes": processes}

    def jobs(self) -> RayJobs:
        address = (self.state.read() or {}).get("address", f"http://{LOOPBACK}:<port>")
        return RayJobs(self.name, address, self.token_used)


def _new_folder() -> Path:
    base = tempfile.gettempdir()
    short = base if len(base) <= _SOCKET_PATH else "/tmp"
    return Path(short) / f"titans-{secrets.token_hex(4)}"


def _options(values: dict[str, Any]) -> list[str]:
    return [part for key, value in values.items() for part in (f"--{key}", str(value))]
