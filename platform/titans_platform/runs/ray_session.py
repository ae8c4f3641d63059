"""Ray sessions: start a local Ray, or connect to the cluster of the job, and shut it down again.

Outside a cluster a study starts its own local Ray. A job on a cluster connects to that cluster's Ray, then
checks what can only be checked there: that every node sees the shared storage and reaches MLflow.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import platform
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titans_platform.errors import ClusterError, UsageError, one_line
from titans_platform.files import write_text
from titans_platform.runs.spec import Machine, Resources, this_machine

ADDRESS = "TITANS_RAY_ADDRESS"
"""Set in a job: the address of the Ray to connect to, `auto`. If unset, a study starts its own Ray."""
NODES = "TITANS_CLUSTER_NODES"
"""Set in a job on an autoscaling cluster: the nodes at its largest size, as JSON."""
OBJECT_STORE = 128 * 2**20
"""Size of Ray's object store in bytes; Ray's minimum is 75 MiB."""
LONGEST_TEMP = 39
"""Length of the longest temporary directory that leaves room for Ray's sockets, whose paths take 107 bytes of
ASCII."""
START_SECONDS = 180.0
"""Timeout in seconds to start Ray or connect to it; on two busy cores that takes about 10 s."""

QUIET = {
    # no result files of Tune, no change of directory, and Ctrl-C is left to our own handler
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # the niceness of the process that started the study, instead of 15
    "RAY_worker_niceness": "0",
    # how often Train polls its workers; with the default of 2 s small runs would mostly wait
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
}
"""Settings that Ray reads from the environment when it is imported."""
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(2**26),
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(2**28),
    "MALLOC_ARENA_MAX": "2",
}
"""Settings that glibc's malloc reads when a process starts, so that memory freed by one step is reused by the
next.

By default glibc maps every block above 32 MiB anew, which took over half of a step of Mamba on rows of 501
tokens. Blocks of 64 MiB and more are still mapped: a study trains its cells in threads, whose arenas have no
room for them, and with a single arena (`MALLOC_ARENA_MAX` of 1), which has, a process held 1.6 times the
memory. Without a limit, the threads of each cell create arenas of their own, up to 8 per core, which keep
what they freed: a worker grew from 0.8 to 2.0 GB over ten cells of 137K parameters.
"""
MALLOPT = {
    "MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_TOP_PAD_": -2, "MALLOC_ARENA_MAX": -8,
}  # fmt: skip
"""`mallopt` parameter numbers of these settings (glibc's malloc.h), for a process already running."""


def return_freed_memory() -> None:
    """Return the memory that malloc keeps for the next step to the system: the next run needs other sizes."""
    if platform.libc_ver()[0] == "glibc":
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


def quiet() -> None:
    """Set the environment variables that Ray and its workers read, and silence Ray's loggers in this process.

    Variables that the user has set are kept. The allocator settings are applied to this process too.
    """
    variables = {key: value for key, value in (QUIET | ALLOCATOR).items() if key not in os.environ}
    os.environ.update(variables)
    tuned = "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    if platform.libc_ver()[0] == "glibc" and not tuned:
        for name in MALLOPT.keys() & variables.keys():
            ctypes.CDLL(None).mallopt(MALLOPT[name], int(variables[name]))
    for name in ("ray", "ray.train", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)


@contextmanager
def ray_session(cpus: float, gpus: int = 0) -> Iterator[None]:
    """Start a local Ray with ``cpus`` and ``gpus``, and shut it down at the end of the block.

    If this process is already connected to a Ray, that one is used and left running. Raises ClusterError.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    # runs exchange files, not objects: a small object store leaves the memory to training
    # without an explicit address RAY_ADDRESS would connect this process to another cluster
    where = {"address": "local", "object_store_memory": OBJECT_STORE, "num_cpus": max(1, round(cpus))}
    base = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    usable = os.path.isabs(base) and os.access(base, os.W_OK) and base.isascii()
    where["_temp_dir"] = f"{base if usable and len(base) <= LONGEST_TEMP else '/tmp'}/ray"
    try:
        # where Ray writes its token
        (folder := Path.home() / ".ray").mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError):
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with _connected(where | ({"num_gpus": gpus} if gpus else {}), "on this machine"):
        yield


@contextmanager
def joined(root: Path) -> Iterator[None]:
    """Connect to the Ray cluster of this job, and check storage and MLflow on every node.

    Does nothing outside a job. Raises ClusterError, UsageError.
    """
    if not (address := os.environ.get(ADDRESS)):
        yield
        return
    with _connected({"address": address}, address):
        check_reach(root.resolve())
        yield


def in_job() -> bool:
    """Return True if this process is a job on a cluster."""
    return bool(os.environ.get(ADDRESS))


def available(resources: Resources) -> Machine:
    """Resources to place runs on: in a job the cluster at its largest size, otherwise this machine."""
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
    over, handler = threading.Event(), signal.getsignal(signal.SIGTERM)
    try:
        try:
            _start(lambda: ray.init(**log, configure_logging=True, **where), over)
        except Exception as error:
            raise ClusterError(f"Ray cluster {named}: {' '.join(str(error).split())}") from error
        finally:
            if threading.current_thread() is threading.main_thread():
                # `ray.init` may install a handler that aborts the process
                signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)
        yield
    finally:
        ray.shutdown()
        over.set()


def _start(call: Callable[[], object], over: threading.Event) -> None:
    """Run ``call`` in a thread. Raises TimeoutError if it takes too long, as `ray.init` has no timeout.

    The thread lives until ``over`` is set: the kernel kills Ray's processes when the thread that started them
    ends.
    """
    started: Future[object] = Future()

    def run() -> None:
        deadline = time.monotonic() + START_SECONDS
        while not started.done():
            try:
                started.set_result(call())
            except BaseException as error:
                # Ray's own timeout for its node is 30 s, which a busy machine can exceed: retry
                if "timed out during startup" not in str(error) or time.monotonic() > deadline:
                    started.set_exception(error)
        over.wait()

    threading.Thread(target=run, daemon=True, name="ray-start").start()
    if not wait([started], START_SECONDS).done:
        logs = "/tmp/ray/session_latest/logs"
        raise TimeoutError(f"did not start in {START_SECONDS:.0f} s; its logs are in {logs}")
    started.result()


def _nodes() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def check_reach(root: Path) -> None:
    """Check on every node that it sees and can write the storage at ``root``, and reaches MLflow.

    Raises UsageError for an SQLite store with workers on several machines, ClusterError if a node fails.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from titans_platform.tracking import store_uri

    nodes, uri, mark = _nodes(), store_uri(root), root / f".reach-{secrets.token_hex(4)}"
    hosts = {node["NodeManagerAddress"] for node in nodes}
    if uri.startswith("sqlite:") and len(hosts) > 1:
        raise UsageError(
            f"mlflow: {uri} is a file, and there are workers on {len(hosts)} machines; start `mlflow server` "
            "where all of them reach it and write its http:// address into the cluster file"
        )
    write_text(mark, "head")
    check = ray.remote(num_cpus=0, max_retries=0)(_check_node)
    pinned = (NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes)
    try:
        ray.get([check.options(scheduling_strategy=node).remote(mark, uri) for node in pinned], timeout=120)
    except Exception as error:
        cause = one_line(getattr(error, "cause", error))
        raise ClusterError(f"a node cannot work on the study: {cause}") from None
    finally:
        mark.unlink(missing_ok=True)


def _check_node(mark: Path, uri: str) -> None:
    """Raise TitansError if this node does not see what the head wrote, or cannot do its work."""
    from titans_platform.tracking import check_server

    if not mark.is_file() or not os.access(mark.parent, os.W_OK):
        raise ClusterError(f"{platform.node()}: cannot read and write the head's storage {mark.parent}")
    if uri.startswith("http"):
        check_server(uri)
