"""Inside a cluster: a study that runs as a job joins the Ray it is a job of, and looks before it starts.

What a laptop cannot know is found here, in the job's first seconds and before a cell is scheduled: whether
every node sees the storage, and reaches the MLflow server.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titans_platform.errors import ClusterError, UsageError

if TYPE_CHECKING:
    from titans_platform.study.plan import Machine
    from titans_platform.study.spec import Resources

ADDRESS = "TITANS_RAY_ADDRESS"
"""Set in a job: the Ray to join, `auto`. Without it a study starts a Ray of its own."""

NODES = "TITANS_CLUSTER_NODES"
"""Set in a job on a cluster that grows: the nodes it may grow to, as JSON."""


def address() -> str | None:
    """The Ray this process should join, None for one of its own."""
    return os.environ.get(ADDRESS) or None


@contextmanager
def joined(root: Path) -> Iterator[None]:
    """Join the cluster this is a job of, every node's way to the storage and to MLflow checked.

    Does nothing outside a job. Raises ClusterError, UsageError.
    """
    where = address()
    if where is None:
        yield
        return
    from titans_platform.study.run import QUIET

    # read by Ray when it is imported
    os.environ.update({key: value for key, value in QUIET.items() if key not in os.environ})
    from titans_platform.runs.session import session

    with session(1, address=where):
        check_reach(root.resolve())
        yield


def machine(resources: Resources) -> Machine:
    """What cells can be placed on: the cluster at its largest inside a job, this machine outside."""
    from titans_platform.study.plan import Machine, Node, cluster_machine, this_machine

    if address() is None:
        return this_machine(resources)
    grown = os.environ.get(NODES)
    if not grown:
        return cluster_machine()
    nodes = tuple(Node(float(x.get("CPU", 0)), float(x.get("GPU", 0))) for x in json.loads(grown))
    return Machine(sum(x.cpus for x in nodes), sum(x.gpus for x in nodes), nodes)


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
    hosts = sorted({node["NodeManagerAddress"] for node in nodes})
    if uri.startswith("sqlite:") and len(hosts) > 1:
        raise UsageError(
            f"mlflow: {uri} is a file, and there are workers on {len(hosts)} machines; start `mlflow server` "
            "where all of them reach it and write its http:// address into the cluster file"
        )
    folder = root / f".reach-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True)
        (folder / "driver").write_text("here")
        told = _ask_each(nodes, str(folder), uri)
        unseen = [node for node in told if not told[node] and not (folder / node).is_file()]
    except OSError as error:
        raise ClusterError(f"storage {root}: cannot be written on the head node: {error.strerror}") from None
    finally:
        _remove(folder)
    for node in unseen:
        told[node] = f"what it writes to {root} is not seen by the head"
    _raise_told({node: why for node, why in told.items() if why}, len(told))


def _raise_told(told: dict[str, str], of: int) -> None:
    """One ClusterError for what the nodes found wrong, alike answers together."""
    if not told:
        return
    reasons = {why: [node[:8] for node in told if told[node] == why] for why in told.values()}
    said = "; ".join(f"{why} (nodes {', '.join(nodes)})" for why, nodes in reasons.items())
    raise ClusterError(f"{len(told)} of {of} nodes cannot work on the study: {said}")


def _ask_each(nodes: list[dict[str, Any]], folder: str, uri: str) -> dict[str, str]:
    """What is wrong at each node, by its id; empty where nothing is."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0, max_retries=0)(_look)
    asked = {
        node["NodeID"]: look.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(folder, node["NodeID"], uri)
        for node in nodes
    }
    told: dict[str, str] = {}
    for node, answer in asked.items():
        try:
            told[node] = ray.get(answer, timeout=120)
        except Exception as error:
            told[node] = " ".join(str(error).split())[:200] or type(error).__name__
    return told


def _look(folder: str, node: str, uri: str) -> str:
    """What a node finds wrong; runs there."""
    try:
        if (Path(folder) / "driver").read_text() != "here":
            return f"another folder at the storage's path {folder}"
        (Path(folder) / node).write_text("here")
    except OSError as error:
        return f"storage {Path(folder).parent}: {error.strerror}"
    return _ask_mlflow(uri) if uri.startswith("http") else ""


def _ask_mlflow(uri: str) -> str:
    """What is wrong with an MLflow server seen from here; the API is asked, /health says yes to anybody."""
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
        # asked for a password it answered: the client will give it
        return "" if error.code == 401 else f"MLflow at {uri}: {error}"
    except (OSError, ValueError) as error:
        return f"MLflow at {uri}: no answer: {error}"


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
