"""Kind `nodes`: several real Ray nodes on this machine, each with its own raylet, store and folder.

What is tried here (a node that dies, a driver that is killed, a job that comes as a wheel) is what happens
on a real cluster. Each node is a `ray start --block` in a session of its own; `down` ends these processes
and what is below them, never `ray stop`, which would end every Ray of the machine.
"""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from titans_core.config import PositiveInt
from titans_platform.clusters.base import Cluster
from titans_platform.clusters.jobs import Jobs
from titans_platform.clusters.processes import EndProcesses, find, record
from titans_platform.clusters.rayjobs import RayJobs, answers
from titans_platform.clusters.schema import ClusterSpec, Cpus, Token
from titans_platform.clusters.steps import NewToken, Note, Remove, Start, Step, Until, perform
from titans_platform.clusters.tokens import read_token, with_token
from titans_platform.errors import ClusterError

HOST = "127.0.0.1"


class NodesSpec(ClusterSpec):
    """How many nodes, and what each says it has."""

    kind: Literal["nodes"]
    nodes: PositiveInt = 3
    """Ray nodes, the head among them."""
    cpus_per_node: PositiveInt = 1
    """CPUs that Ray counts for a node: a number for scheduling, nothing is bound to it."""
    gpus_per_node: Cpus = 0
    object_store_mb: PositiveInt = 100
    """Shared memory of each node's object store; 75 is the least Ray takes."""

    @model_validator(mode="after")
    def _own(self) -> NodesSpec:
        if self.token:
            raise ValueError("token: these nodes get a token of their own; leave it out")
        return self


class Nodes(Cluster[NodesSpec]):
    """Ray nodes of this machine."""

    kind = "nodes"
    Spec = NodesSpec
    sees_paths = True

    @property
    def one_machine(self) -> bool:
        """All nodes are on this one."""
        return True

    @property
    def token(self) -> Token:
        """Made by `up`, gone with `down`."""
        return Token(file=str(self.state.token))

    def up_steps(self) -> list[Step]:
        """A token, a head, the other nodes; ports that are free now."""
        # short: the path of a socket below it has 107 letters at most
        folder = f"/tmp/titans-{secrets.token_hex(4)}"
        head, dashboard, client, *agents = free_ports(3 + self.spec.nodes)
        address = f"http://{HOST}:{dashboard}"
        facts = {"kind": self.kind, "address": address, "folder": folder, "processes": []}
        ports = {"port": head, "dashboard-port": dashboard, "ray-client-server-port": client}
        first = ["--head", "--dashboard-host", HOST, *_options(ports)]
        steps: list[Step] = [
            NewToken(self.state.token),
            self._start(facts, 0, [*first, "--dashboard-agent-listen-port", str(agents[0])]),
            Until(f"{address} answers", partial(self._answers, facts), otherwise=self._see_log(0)),
        ]
        for number, port in enumerate(agents[1:], 1):
            joins = ["--address", f"{HOST}:{head}", "--dashboard-agent-listen-port", str(port)]
            steps.append(self._start(facts, number, joins))
        everyone = partial(self._alive, facts)
        count = self.spec.nodes
        return [*steps, Until(f"all {count} nodes are alive", everyone, otherwise=self._see_log(count - 1))]

    def _start(self, facts: dict[str, Any], number: int, where: list[str]) -> Start:
        spec = self.spec
        role = "head" if number == 0 else f"node {number}"
        have = {"num-cpus": spec.cpus_per_node, "num-gpus": spec.gpus_per_node}
        # 0: any free one; many nodes on one machine would want the same
        apart = {"min-worker-port": 0, "max-worker-port": 0, "temp-dir": f"{facts['folder']}/{number}"}
        options = _options({**have, **apart, "object-store-memory": spec.object_store_mb * 2**20})
        argv = [sys.executable, "-m", "ray.scripts.scripts", "start", *where, "--node-ip-address", HOST]
        env = {
            # a job's python and pip are those on the node's PATH
            "PATH": f"{Path(sys.executable).parent}:$PATH",
            "RAY_USAGE_STATS_ENABLED": "0",
            # as nice as whoever started the nodes, not 15 below everything else on the machine
            "RAY_worker_niceness": "0",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

        def started(pid: int) -> None:
            facts["processes"].append(record(pid, role))
            self.state.write(facts)

        return Start(
            (*argv, *options, "--disable-usage-stats", "--block"),
            with_token(self.state.token, env),
            self.state.folder / f"node-{number}.log",
            started,
        )

    def _see_log(self, number: int) -> str:
        return f"see {self.state.folder}/node-{number}.log"

    def _answers(self, facts: dict[str, Any]) -> bool:
        self._none_ended(facts)
        return answers(facts["address"], read_token(self.token, self.name), timeout=2) == 200

    def _alive(self, facts: dict[str, Any]) -> bool:
        self._none_ended(facts)
        nodes = RayJobs(self.name, facts["address"], self.token).about()["nodes"]
        return sum(node["alive"] for node in nodes) == self.spec.nodes

    def _none_ended(self, facts: dict[str, Any]) -> None:
        for number, process in enumerate(facts["processes"]):
            if find(process) is None:
                raise ClusterError(f"{process['role']} ended at once; {self._see_log(number)} says why")

    def up(self) -> str:
        """Start the nodes; what came up of a cluster that does not is ended again."""
        found = self.state.read()
        if found and any(find(process) for process in found["processes"]):
            raise ClusterError(
                f"cluster {self.name}: is up already at {found['address']}; "
                f"titans cluster down {self.name} ends it"
            )
        if found:
            # of a machine that was started anew, or nodes that were all killed
            perform(self.down_steps())
        self.state.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with ExitStack() as undo:
            undo.callback(self._undo)
            perform(self.up_steps())
            undo.pop_all()
        return self.where()

    def _undo(self) -> None:
        found = self.state.read()
        if found:
            # the logs stay, the error names them
            perform([EndProcesses(found["processes"]), Remove((found["folder"],))])
            (self.state.folder / "state.json").unlink()

    def down_steps(self) -> list[Step]:
        """End what is written down, remove its folders."""
        found = self.state.read()
        if found is None:
            return [Note("nothing to end: it is not up")]
        return [EndProcesses(found["processes"]), Remove((found["folder"], str(self.state.folder)))]

    def where(self) -> str:
        """Its dashboard."""
        return self.require_up()["address"]

    def status(self) -> dict[str, Any]:
        """Down, or what Ray says, with the process of each node."""
        found = self.state.read()
        if found is None:
            return {"state": "down", "where": "this machine", "nodes": [], "jobs": []}
        processes = [{**process, "alive": find(process) is not None} for process in found["processes"]]
        if not processes or not processes[0]["alive"]:
            told = {"state": "broken: the head is dead; take it down", "where": found["address"]}
            return {**told, "nodes": [], "jobs": [], "processes": processes}
        return {**super().status(), "processes": processes}

    def open_jobs(self) -> Iterator[Jobs]:
        """The head's job API."""
        jobs = RayJobs(self.name, self.where(), self.token)
        jobs.check()
        yield jobs

    def describe_jobs(self) -> tuple[list[Step], Jobs]:
        """The head's job API, or where it will be."""
        address = (self.state.read() or {}).get("address", f"http://{HOST}:<port>")
        return [], RayJobs(self.name, address, self.token)


def _options(values: dict[str, Any]) -> list[str]:
    return [part for key, value in values.items() for part in (f"--{key}", str(value))]


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on now, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]
