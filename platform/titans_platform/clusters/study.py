"""`titans sweep run STUDY --cluster NAME`: the same command as a job, with what it reads taken along."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from titans_platform.clusters.base import Cluster
from titans_platform.clusters.jobs import Job
from titans_platform.errors import UsageError
from titans_platform.runs.ray_session import ADDRESS, NODES, QUIET
from titans_platform.study.spec import Cell, find_study
from titans_platform.tracking import STORE

_HERE = ("localhost", "127.0.0.1", "::1", "0.0.0.0")


def root_on(cluster: Cluster[Any], root: Path, explicit: bool) -> Path:
    """The storage root as the nodes see it, ``explicit`` if ``root`` was given for this command.

    Raises UsageError where it would be this machine's folder and the nodes do not see it.
    """
    if explicit and not cluster.sees_paths and not root.is_absolute():
        raise UsageError(
            f"--root {root}: should be an absolute path on the nodes of {cluster.name}; or leave it out"
        )
    if explicit or not cluster.spec.storage:
        if not cluster.sees_paths and not (explicit and root.is_absolute()):
            raise UsageError(
                f"clusters/{cluster.name}.yaml.storage: missing: the nodes do not see this machine's {root}; "
                "write the absolute path of a folder there that every node mounts"
            )
        return root.resolve() if cluster.sees_paths else root
    return Path(cluster.spec.storage)


def check_reachable(cluster: Cluster[Any]) -> None:
    """Refuse a tracking store that workers elsewhere cannot write to. Raises UsageError."""
    uri, where = cluster.spec.mlflow, f"clusters/{cluster.name}.yaml.mlflow"
    if uri is None and not cluster.one_machine:
        raise UsageError(
            f"{where}: missing: metrics would go to an SQLite file, which workers on several machines cannot "
            "share; start `mlflow server --host 0.0.0.0 --allowed-hosts NAME:5000` where they reach it, and "
            "write http://NAME:5000"
        )
    if uri and urlsplit(uri).hostname in _HERE and not cluster.one_machine:
        raise UsageError(f"{where}: {uri} is another machine on each node; write a name all of them know")


def environment(cluster: Cluster[Any]) -> dict[str, str]:
    """The variables of a job: which Ray to join, where to log, how wide to print."""
    grown = cluster.grows_to()
    return {
        **QUIET,
        "PYTHONUNBUFFERED": "1",
        # MLflow tells of each run it ends
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "1",
        "COLUMNS": str(shutil.get_terminal_size((100, 24)).columns),
        ADDRESS: "auto",
        **_home(cluster),
        **({NODES: json.dumps(grown)} if grown else {}),
        **({STORE: cluster.spec.mlflow} if cluster.spec.mlflow else {}),
        **cluster.spec.env,
    }


def _home(cluster: Cluster[Any]) -> dict[str, str]:
    """The root of commands that are given none, as it would be here."""
    if cluster.spec.storage:
        return {"TITANS_HOME": cluster.spec.storage}
    here = Path(os.environ.get("TITANS_HOME", "titans-runs"))
    return {"TITANS_HOME": str(here.resolve())} if cluster.sees_paths else {}


def titans_job(cluster: Cluster[Any], arguments: Sequence[str], name: str | None = None) -> Job:
    """Any `titans` command as a job."""
    words = [word for word in arguments if not word.startswith("-")]
    return Job(
        name=name or "-".join(words[:2]) or "titans",
        arguments=tuple(arguments),
        env=environment(cluster),
        pip=cluster.spec.pip,
    )


def study_job(
    cluster: Cluster[Any],
    study: str,
    scale: str,
    root: Path,
    options: Iterable[str],
    cells: Sequence[Cell],
) -> Job:
    """The study at a scale as a job; its file, and tokenizer files it names, travel with it.

    Raises UsageError for what would not be found there.
    """
    path = find_study(study)
    arguments = ["sweep", "run", path.stem, "--scale", scale, "--root", str(root), *options]
    files = {f"sweeps/{path.stem}.yaml": path.read_bytes(), **_tokenizers(cells)}
    _check_sources(cells)
    return Job(
        name=f"{path.stem}-{scale}".lower(),
        arguments=tuple(arguments),
        files=files,
        env=environment(cluster),
        pip=cluster.spec.pip,
    )


def _tokenizers(cells: Sequence[Cell]) -> dict[str, bytes]:
    """Files of tokenizers by relative path; an absolute one is a path of the cluster's."""
    named = {cell.config.data.tokenizer for cell in cells} - {"byte"}
    here = {name: Path(name) for name in sorted(named) if not Path(name).is_absolute()}
    missing = [name for name, path in here.items() if not path.is_file()]
    if missing:
        raise UsageError(
            f"data.tokenizer: no file {missing[0]} here to take along; run from the folder it is in, or give "
            "an absolute path on the cluster"
        )
    if any(".." in path.parts for path in here.values()):
        raise UsageError("data.tokenizer: a path with .. cannot be taken along; run from the folder it is in")
    return {path.as_posix(): path.read_bytes() for path in here.values()}


def _check_sources(cells: Sequence[Cell]) -> None:
    paths = {s.path for cell in cells for s in cell.config.data.sources if s.path}
    local = sorted(path for path in paths if not Path(path).is_absolute())
    if local:
        raise UsageError(
            f"data.sources: {local[0]} is relative to this folder, which a job does not see; give its "
            "absolute path on the nodes"
        )
