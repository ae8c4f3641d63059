"""The one place where Ray is started or joined, and ended.

Outside a cluster a study starts a Ray of its own and ends it. A job on a cluster joins the Ray it is a job
of, and checks first what can only be seen there: whether every node sees the storage and reaches MLflow.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import platform
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titans_platform.errors import ClusterError, UsageError
from titans_platform.runs.spec import Machine, Resources, this_machine

ADDRESS = "TITANS_RAY_ADDRESS"
"""Set in a job: the Ray to join, `auto`. Without it a study starts a Ray of its own."""
NODES = "TITANS_CLUSTER_NODES"
"""Set in a job on a cluster that grows: the nodes it may grow to, as JSON."""
OBJECT_STORE = 128 * 2**20
"""Bytes of Ray's object store; 75 MiB is the least Ray takes."""
START_SECONDS = 180.0
"""Time Ray has to start or to be joined; on two busy cores it takes about 10."""

QUIET = {
    # no result files beside ours, no change of directory, Ctrl-C to us
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # as nice as whoever started the study, not 15 below everything else on the machine
    "RAY_worker_niceness": "0",
    # how often Train looks after its workers; small runs would do little but wait for its default of 2 s
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
}
"""Settings that Ray reads from the environment when it is imported."""
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(2**26),
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(2**28),
    "MALLOC_ARENA_MAX": "2",
}
"""Settings that glibc reads when a process starts: it keeps what a step freed for the next one.

By itself it asks the system for every block of over 32 MiB anew, over half of a step of Mamba on rows of 501
tokens. It still does from 64 MiB on: a thread, in which a study's cells are trained, has no room for those by
itself, and where it was given room (`MALLOC_ARENA_MAX` of 1) a process held 1.6 times the memory. Without a
limit the threads of each cell open arenas of their own, up to 8 a core, and each keeps what it freed: a
worker grew from 0.8 to 2.0 GB over ten cells of 137K parameters.
"""
MALLOPT = {
    "MALLOC_MMAP_THRESHOLD_": -3,
    "MALLOC_TRIM_THRESHOLD_": -1,
    "MALLOC_TOP_PAD_": -2,
    "MALLOC_ARENA_MAX": -8,
}
"""The same settings' numbers in glibc's malloc.h, for a process that has started."""


def quiet() -> None:
    """Set what Ray and its workers read as they start, and turn its log lines off in this process.

    What the user's environment says stays. The allocator's settings hold in this process too.
    """
    given = {key: value for key, value in (QUIET | ALLOCATOR).items() if key not in os.environ}
    os.environ.update(given)
    told = "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    if platform.libc_ver()[0] == "glibc" and not told:
        for name in MALLOPT.keys() & given.keys():
            ctypes.CDLL(None).mallopt(MALLOPT[name], int(given[name]))
    for name in ("ray", "ray.train", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)


@contextmanager
def ray_session(cpus: float, gpus: float = 0) -> Iterator[None]:
    """A Ray of this process's own with ``cpus`` and ``gpus``, ended with the block.

    A Ray that this process is connected to already is used and left as it is. Raises ClusterError.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    # a run takes its config and leaves files: the share of memory that Ray would reserve stays free
    # RAY_ADDRESS would turn the embedded default into a client of somebody's cluster
    where = {"address": "local", "object_store_memory": OBJECT_STORE, "num_cpus": max(1, round(cpus))}
    with _connected(where | ({"num_gpus": max(1, round(gpus))} if gpus else {}), "on this machine"):
        yield


@contextmanager
def joined(root: Path) -> Iterator[None]:
    """Join the cluster this process is a job of, the storage and MLflow checked on every node.

    Does nothing outside a job. Raises ClusterError, UsageError.
    """
    if not (address := os.environ.get(ADDRESS)):
        yield
        return
    with _connected({"address": address}, address):
        check_reach(root.resolve())
        yield


def in_job() -> bool:
    """Whether this process is a job of a cluster."""
    return bool(os.environ.get(ADDRESS))


def available(resources: Resources) -> Machine:
    """What runs can be placed on: inside a job the cluster at its largest, outside this machine."""
    if not os.environ.get(ADDRESS):
        return this_machine(resources)
    if grown := os.environ.get(NODES):
        return Machine.of(json.loads(grown))
    return Machine.of([node["Resources"] for node in _nodes()])


@contextmanager
def _connected(where: dict[str, Any], named: str) -> Iterator[None]:
    quiet()
    import ray

    log = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    over = threading.Event()
    try:
        with _own_sigterm():
            _start(lambda: ray.init(**log, configure_logging=True, **where), over)
    except Exception as error:
        ray.shutdown()
        over.set()
        raise ClusterError(f"Ray cluster {named}: {' '.join(str(error).split())}") from error
    try:
        yield
    finally:
        ray.shutdown()
        over.set()


def _start(call: Callable[[], object], over: threading.Event) -> None:
    """Run ``call`` in a thread, TimeoutError if it takes too long: Ray's start has no limit of its own.

    The thread lives until ``over``: the kernel ends Ray's processes with the thread that started them.
    """
    raised: list[BaseException] = []
    started = threading.Event()

    def run() -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                call()
                break
            except BaseException as error:
                # Ray gives its node 30 s, which a busy machine can take
                if "timed out during startup" not in str(error) or time.monotonic() > deadline:
                    raised.append(error)
                    break
        started.set()
        over.wait()

    threading.Thread(target=run, daemon=True, name="ray-start").start()
    if not started.wait(START_SECONDS):
        raise TimeoutError(
            f"did not start in {START_SECONDS:.0f} s; its logs are in /tmp/ray/session_latest/logs"
        )
    if raised:
        raise raised[0]


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Ray's start may put a handler on SIGTERM that aborts: put ours back, which ends a run like Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


def die_with_parent() -> None:
    """End this worker process when the raylet that started it ends, as when its driver was killed.

    Ray's own check takes seconds, in which a worker would go on writing into a run that the next driver
    already continues. Linux only; elsewhere Ray's check remains.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _nodes() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def check_reach(root: Path) -> None:
    """Let every node read what the driver wrote under ``root``, write beside it, and find MLflow.

    Raises UsageError for an SQLite store with workers on several machines, ClusterError for a node that
    does not reach something.
    """
    from titans_platform.tracking import store_uri

    nodes, uri = _nodes(), store_uri(root)
    hosts = {node["NodeManagerAddress"] for node in nodes}
    if uri.startswith("sqlite:") and len(hosts) > 1:
        raise UsageError(
            f"mlflow: {uri} is a file, and there are workers on {len(hosts)} machines; start `mlflow server` "
            "where all of them reach it and write its http:// address into the cluster file"
        )
    folder = root / f".reach-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True)
        (folder / "driver").write_text("here")
        faults = _ask_each(nodes, str(folder), uri)
        for node, fault in faults.items():
            if not fault and not (folder / node).is_file():
                faults[node] = f"what it writes to {root} is not seen by the head"
    except OSError as error:
        raise ClusterError(f"storage {root}: cannot be written on the head node: {error.strerror}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    # equal faults together
    reasons: dict[str, list[str]] = {}
    for node, fault in faults.items():
        if fault:
            reasons.setdefault(fault, []).append(node[:8])
    if reasons:
        text = "; ".join(f"{fault} (nodes {', '.join(nodes)})" for fault, nodes in reasons.items())
        wrong = sum(map(len, reasons.values()))
        raise ClusterError(f"{wrong} of {len(faults)} nodes cannot work on the study: {text}")


def _ask_each(nodes: list[dict[str, Any]], folder: str, uri: str) -> dict[str, str]:
    """What is wrong at each node, by its id; empty where nothing is."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0, max_retries=0)(_look)
    pending = {
        node["NodeID"]: look.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(folder, node["NodeID"], uri)
        for node in nodes
    }
    faults: dict[str, str] = {}
    for node, answer in pending.items():
        try:
            faults[node] = ray.get(answer, timeout=120)
        except Exception as error:
            faults[node] = " ".join(str(error).split())[:200] or type(error).__name__
    return faults


def _look(folder: str, node: str, uri: str) -> str:
    """What is wrong at the node this runs on."""
    try:
        if (Path(folder) / "driver").read_text() != "here":
            return f"another folder at the storage's path {folder}"
        (Path(folder) / node).write_text("here")
    except OSError as error:
        return f"storage {Path(folder).parent}: {error.strerror}"
    return _ask_mlflow(uri) if uri.startswith("http") else ""


def _ask_mlflow(uri: str) -> str:
    """What is wrong with an MLflow server seen from here; /health would answer under any host name."""
    import urllib.error
    import urllib.request

    try:
        address = f"{uri.rstrip('/')}/api/2.0/mlflow/experiments/search?max_results=1"
        with urllib.request.urlopen(address, timeout=20):
            return ""
    except urllib.error.HTTPError as error:
        body = error.read(200).decode(errors="replace")
        if "Host header" in body:
            return f"MLflow at {uri} takes no requests under this name; start it with --allowed-hosts"
        # it wants a password, which the client will give
        return "" if error.code == 401 else f"MLflow at {uri}: {error}"
    except (OSError, ValueError) as error:
        return f"MLflow at {uri}: no answer: {error}"
