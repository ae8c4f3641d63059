"""The kinds of cluster. A new one is a file like those beside this and a line here."""

from __future__ import annotations

from typing import Any

from titans_platform.clusters.base import Cluster
from titans_platform.clusters.existing import Existing
from titans_platform.clusters.kuberay import KubeRay
from titans_platform.clusters.local import Local
from titans_platform.clusters.nodes import Nodes
from titans_platform.clusters.ray_up import RayUp
from titans_platform.clusters.slurm import Slurm

KINDS: dict[str, type[Cluster[Any]]] = {
    found.kind: found for found in (Local, Nodes, Existing, RayUp, KubeRay, Slurm)
}
