"""Cluster files: where they are looked up, and from a name to a cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from titans_platform.clusters.base import Cluster
from titans_platform.clusters.registry import KINDS
from titans_platform.clusters.schema import NAME
from titans_platform.errors import UsageError
from titans_platform.loading import nearest, read_yaml, validate


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


def load_cluster(name: str) -> Cluster[Any]:
    """Read a cluster by name or path; UsageError, one line, for anything wrong in it."""
    path = find_cluster(name)
    if not NAME.fullmatch(path.stem):
        raise UsageError(
            f"{path.name}: a cluster's name is its file's: up to 40 of a-z, 0-9 and -, a letter first"
        )
    mapping = read_yaml(path)
    kind = mapping.get("kind")
    if kind not in KINDS:
        raise UsageError(f"{path.name}.kind: {kind!r} is no kind of cluster; {nearest(str(kind), KINDS)}")
    chosen = KINDS[kind]
    return chosen(path.stem, validate(chosen.Spec, mapping, path.name))
