"""Clusters: the kinds, one file each, and loading a cluster from its YAML file.

A new kind is a file like those beside this one, and a line in ``KINDS``. A kind of your own needs no line: a
cluster file names it by import path, `kind: my_lab.cluster:MyCluster`.
"""

from __future__ import annotations

import re

from titans_kernels import Registry
from titans_platform.clusters.base import Cluster
from titans_platform.errors import UsageError
from titans_platform.loading import file_at, known_files, nearest, read_yaml, validate

KINDS = Registry("kind", Cluster, {
    "nodes": "titans_platform.clusters.local:Nodes",
    "existing": "titans_platform.clusters.rayjobs:Existing",
    "kuberay": "titans_platform.clusters.kuberay:KubeRay",
    "slurm": "titans_platform.clusters.slurm:Slurm",
}, UsageError)  # fmt: skip
NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
"""Valid cluster names: they also name Kubernetes objects and folders."""


def load_cluster(name: str) -> Cluster:
    """Read a cluster by name or path. Raises UsageError, one line, for anything wrong in it."""
    if (path := file_at(name, "cluster")) is None:
        if name not in (known := known_files("clusters")):
            raise UsageError(f"cluster: no {name!r} in clusters/; {nearest(name, known)}")
        path = known[name]
    if not NAME.fullmatch(path.stem):
        rule = "up to 40 of a-z, 0-9 and -, a letter first"
        raise UsageError(f"{path.name}: a cluster is named after its file; rename it to {rule}")
    mapping = read_yaml(path)
    if "kind" not in mapping:
        raise UsageError(f"{path.name}.kind: missing; give one of {', '.join(KINDS)}")
    cluster = validate(KINDS.find(str(mapping.get("kind")), f"{path.name}.kind"), mapping, path.name)
    cluster._name = path.stem
    return cluster
