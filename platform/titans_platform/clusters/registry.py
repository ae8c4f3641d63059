"""The kinds of cluster, and from a name to a cluster.

A new kind is a file like those beside this one, and a line in ``KINDS``. A kind of your own needs no line: a
cluster file names it by import path, `kind: my_lab.cluster:MyCluster`.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any

from titans_platform.clusters.base import Cluster
from titans_platform.errors import UsageError
from titans_platform.loading import nearest, read_yaml, validate

KINDS = {
    "local": "titans_platform.clusters.local:Local",
    "nodes": "titans_platform.clusters.nodes:Nodes",
    "existing": "titans_platform.clusters.existing:Existing",
    "ray-up": "titans_platform.clusters.ray_up:RayUp",
    "kuberay": "titans_platform.clusters.kuberay:KubeRay",
    "slurm": "titans_platform.clusters.slurm:Slurm",
}
NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
"""What a cluster may be called: also the name of a Kubernetes object and of a folder."""


def cluster_folders() -> list[Path]:
    """Where clusters are looked up by name, the first that has it wins."""
    package = Path(__file__).resolve().parents[1]
    return [Path.cwd() / "clusters", package / "_shipped" / "clusters", package.parents[1] / "clusters"]


def known_clusters() -> dict[str, Path]:
    """Every cluster that can be given by name, and its file."""
    files: dict[str, Path] = {}
    for folder in cluster_folders():
        for path in sorted(folder.glob("*.yaml")):
            files.setdefault(path.stem, path)
    return files


def find_cluster(name: str) -> Path:
    """The file of a cluster given by name or by path. Raises UsageError."""
    if name.endswith((".yaml", ".yml")) or os.sep in name:
        if not Path(name).is_file():
            raise UsageError(f"cluster: no file {name}")
        return Path(name)
    found = known_clusters()
    if name not in found:
        raise UsageError(f"cluster: no {name!r} in clusters/; {nearest(name, found)}")
    return found[name]


def load_cluster(name: str) -> Cluster:
    """Read a cluster by name or path. Raises UsageError, one line, for anything wrong in it."""
    path = find_cluster(name)
    if not NAME.fullmatch(path.stem):
        raise UsageError(
            f"{path.name}: a cluster's name is its file's: up to 40 of a-z, 0-9 and -, a letter first"
        )
    mapping = read_yaml(path)
    kind = find_kind(mapping.get("kind"), f"{path.name}.kind")
    return validate(kind, mapping, path.name).named(path.stem)


def find_kind(kind: Any, field: str) -> type[Cluster]:
    """The class of a kind, by its name in ``KINDS`` or by import path. Raises UsageError for ``field``."""
    found = KINDS.get(kind, kind) if isinstance(kind, str) else ""
    module, colon, attribute = found.partition(":")
    if not colon:
        raise UsageError(
            f"{field}: {kind!r} is no kind of cluster; {nearest(str(kind), KINDS)}; "
            "or a class of your own, as module:Class"
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        chosen = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{field}: {kind} cannot be imported: {error}") from None
    if not (isinstance(chosen, type) and issubclass(chosen, Cluster)):
        raise UsageError(f"{field}: {kind} should be a subclass of titans_platform.clusters.base.Cluster")
    if chosen.__abstractmethods__:
        raise UsageError(f"{field}: {kind} lacks {', '.join(sorted(chosen.__abstractmethods__))}")
    return chosen
