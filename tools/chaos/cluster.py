"""Runs of two workers on several Ray nodes of one machine: a worker killed, a node lost, a driver killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titans_platform.runs.folder import RunFolder
from titans_platform.training.checkpoint import step_of
from tools.chaos.local import BATCH, EVERY, Line, config, samples, weights

ELASTIC = {"elastic shrink": [2, 1], "elastic growth": [1, 2]}
"""Faults that change the number of workers, and from which to which."""
KILLED = ("worker killed", "node lost", "driver of workers killed", "worker told to end", "node taken away")
FAULTS = (*KILLED, *ELASTIC)
STEPS = 150
LOOKS_FOR_MORE = 60.0
"""Seconds between two looks of Ray Train's for nodes that have been added."""
NOTICE = 20.0
"""Seconds between the word that a node will be taken away and its end; runs ask every five, Ray too."""
TOLERANCE = 0.02
"""Nats by which the final loss may differ where the number of workers changed on the way."""

DRIVER = """
import json, os, sys
from pathlib import Path
import ray
from titans_platform.config import RunConfig
from titans_platform.runs.load import spec_for
from titans_platform.runs.execute import execute
from titans_platform.runs.ray_session import quiet
from titans_platform.runs.spec import Resources
config, root, address, workers = sys.argv[1:]
quiet()
ray.init(address=address, log_to_driver=False, runtime_env={
    "worker_process_setup_hook": "tools.chaos.attempt.patch", "env_vars": {"CHAOS": os.environ["CHAOS"]}})
resources = Resources.model_validate_json('{"workers": %s}' % workers)
execute(spec_for(RunConfig.model_validate_json(config), Path(root), resources, name="run"))
"""


class Nodes:
    """A head that trains nothing, and nodes of one CPU each that can be lost and come back."""

    def __init__(self, count: int = 2):
        from ray.cluster_utils import Cluster

        os.environ.setdefault("RAY_health_check_period_ms", "1000")
        os.environ.setdefault("RAY_health_check_failure_threshold", "3")
        head = {"num_cpus": 0, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self.cluster.add_node(num_cpus=1) for _ in range(count)]
        self.cluster.wait_for_nodes()

    def lose(self, draw: random.Random) -> None:
        """Remove a node without notice."""
        node = self.nodes.pop(draw.randrange(len(self.nodes)))
        self.cluster.remove_node(node, allow_graceful=False)

    def take_away(self, draw: random.Random, root: Path) -> bool:
        """Remove a node after notice to Ray; return True if the run saved a checkpoint because of it."""
        from ray._raylet import GcsClient
        from ray.core.generated.autoscaler_pb2 import DrainNodeReason

        node, end = self.nodes.pop(draw.randrange(len(self.nodes))), time.time() + NOTICE
        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        GcsClient(address=self.cluster.address).drain_node(node.node_id, reason, "chaos", round(1000 * end))
        saved = False
        while time.time() < end:
            # at the step at which it heard of it, which is seldom one at which a checkpoint was due
            saved = saved or kept(root) % EVERY > 0
            time.sleep(0.05)
        self.cluster.remove_node(node, allow_graceful=False)
        self.bring_back()
        return saved

    def bring_back(self, count: int = 2) -> None:
        """Add nodes until there are as many as before."""
        while len(self.nodes) < count:
            self.nodes.append(self.cluster.add_node(num_cpus=1))
        self.cluster.wait_for_nodes()


@contextmanager
def nodes() -> Iterator[Nodes]:
    """Start a cluster of two nodes for the duration of the block."""
    cluster_nodes = Nodes()
    try:
        yield cluster_nodes
    finally:
        cluster_nodes.cluster.shutdown()


def start(root: Path, address: str, workers: str, seconds: float = 0.02) -> subprocess.Popen:
    """Start a driver that continues the run's training."""
    options = {"root": str(root), "seconds": seconds}
    command = [sys.executable, "-c", DRIVER, config(steps=STEPS), str(root), address, workers]
    return subprocess.Popen(command, env=os.environ | {"CHAOS": json.dumps(options)})


def progress(root: Path) -> dict[str, Any]:
    return RunFolder(root, "run").progress() or {}


def kept(root: Path) -> int:
    """Return the step of the newest checkpoint.

    Faults wait for a new one: three deaths without it end a run.
    """
    return max((step_of(path) for path in (root / "cells/run/checkpoints").glob("step-*")), default=0)


def disturbed(root: Path, fault: str, draw: random.Random, hits: int, cluster_nodes: Nodes) -> int:
    """Complete a run through ``hits`` faults at random moments; return the number that struck."""
    workers, seconds = "[1, 2]" if fault in ELASTIC else "2", 0.02
    if fault == "elastic growth":
        cluster_nodes.lose(draw)
        cluster_nodes.cluster.wait_for_nodes()
        # half of the steps are left when the added node is seen
        seconds = 2 * LOOKS_FOR_MORE / STEPS
    if fault == "node taken away":
        seconds = 2 * NOTICE / STEPS
    struck, before, deadline = 0, 0, time.monotonic() + 1800
    process = start(root, cluster_nodes.cluster.address, workers, seconds)
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline, "it hangs"
            pid, step = progress(root).get("pid"), progress(root).get("step", 0)
            fresh = kept(root) > before
            if struck < hits and pid and fresh and step < STEPS - 10 and Path(f"/proc/{pid}").exists():
                time.sleep(draw.uniform(0, 2))
                before = kept(root)
                struck += strike(root, fault, process, pid, draw, cluster_nodes)
                if "driver" in fault:
                    process.wait(60)
                    process = start(root, cluster_nodes.cluster.address, workers)
                # the next one is to meet other processes
                while process.poll() is None and progress(root).get("pid") == pid:
                    time.sleep(0.05)
            time.sleep(0.05)
        assert process.returncode == 0, process.returncode
    finally:
        process.kill()
        process.wait()
    cluster_nodes.bring_back()
    return struck


def strike(root: Path, fault: str, process: Any, pid: int, draw: random.Random, cluster_nodes: Nodes) -> int:
    """Inject one fault; return 1 if it met a run."""
    if "driver" in fault:
        process.kill()
        return 1
    if fault == "node taken away":
        return int(cluster_nodes.take_away(draw, root))
    if fault in ("node lost", *ELASTIC):
        if fault != "elastic growth":
            cluster_nodes.lose(draw)
        if fault != "elastic shrink":
            cluster_nodes.bring_back()
        return 1
    try:
        os.kill(pid, signal.SIGTERM if fault == "worker told to end" else signal.SIGKILL)
    except ProcessLookupError:
        return 0
    return 1


def series(
    folder: Path, fault: str, draw: random.Random, hits: int, a_run: int, cluster_nodes: Nodes
) -> Line:
    """Run with one fault until it has struck ``hits`` times, at most ``a_run`` times in each run."""
    from titans_platform.config import RunConfig
    from titans_platform.data import prepare

    line, straight = Line(fault), folder / "straight-workers"
    data = RunConfig.model_validate_json(config(steps=STEPS)).data
    if not straight.exists():
        prepare(data, straight)
        assert start(straight, cluster_nodes.cluster.address, "2", 0.0).wait(900) == 0
    expected, drawn, loss = weights(straight), samples(straight), result(straight)["final_train_loss"]
    while line.hits < hits:
        root = folder / f"{fault.replace(' ', '-')}-{line.runs}"
        prepare(data, root)
        most = 1 if fault in ELASTIC else min(a_run, hits - line.hits)
        line.hits += disturbed(root, fault, draw, most, cluster_nodes)
        line.runs += 1
        samples_of_run = samples(root)
        if fault in ELASTIC:
            apart = abs(result(root)["final_train_loss"] - loss)
            worlds = result(root)["world_sizes"]
            line.equal += apart < TOLERANCE and [size for _, size in worlds] == ELASTIC[fault]
            line.notes.append(f"loss within {TOLERANCE}: {apart:.1e}; workers by step: {worlds}")
        else:
            line.equal += weights(root) == expected
        rows = sorted(row for _, pairs in samples_of_run.values() for row in pairs)
        every = sorted(row for _, pairs in drawn.values() for row in pairs)
        missing = len(every) - sum((min(rows.count(row), every.count(row))) for row in set(every))
        line.lost += missing
        line.repeated += max(0, len(rows) - len(every) + missing)
        assert len(every) == STEPS * BATCH
    return line


def result(root: Path) -> dict[str, Any]:
    return json.loads((root / "cells/run/result.json").read_text())
