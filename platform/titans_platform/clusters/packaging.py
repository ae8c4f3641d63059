"""Shipping of a `titans` command that runs as a job: variables, files and the project's packages.

The packages are copied to the job's folder, not installed; the nodes have their requirements, or pip installs
the locked versions.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from titans_platform.clusters.base import Cluster, Job
from titans_platform.clusters.steps import Write
from titans_platform.config import DataConfig
from titans_platform.errors import UsageError
from titans_platform.loading import file_at, read_yaml
from titans_platform.provenance import checkout
from titans_platform.runs.ray_session import ADDRESS, ALLOCATOR, NODES, QUIET
from titans_platform.study.grid import EXPERIMENT, Cell, find_study, place_of

DISTRIBUTION = "titans-lab"


def root_on(cluster: Cluster, root: Path, explicit: bool) -> Path:
    """Return the storage root as the nodes see it; ``explicit``: ``root`` was given on the command line.

    Raises UsageError if it is a folder of this machine that the nodes do not see.
    """
    if cluster.storage and not explicit:
        return Path(cluster.storage)
    if cluster.sees_paths:
        return root.resolve()
    if not explicit:
        cause = f"missing: the nodes do not see this machine's {root}"
        fix = "set it to the absolute path of a folder that every node mounts"
        raise UsageError(f"clusters/{cluster.name}.yaml.storage: {cause}; {fix}")
    if not root.is_absolute():
        where = f"should be an absolute path on the nodes of {cluster.name}"
        raise UsageError(f"--root {root}: {where}; or leave it out")
    return root


def check_reachable(cluster: Cluster) -> None:
    """Raise UsageError if workers on other machines cannot write to the tracking store."""
    uri, where = cluster.mlflow, f"clusters/{cluster.name}.yaml.mlflow"
    if cluster.one_machine:
        return
    if uri is None:
        raise UsageError(
            f"{where}: missing: metrics would go to an SQLite file, which workers on several machines cannot "
            "share; start `mlflow server --host 0.0.0.0 --allowed-hosts NAME:5000` where they reach it, and "
            "write http://NAME:5000"
        )
    if urlsplit(uri).hostname in ("localhost", "127.0.0.1", "::1", "0.0.0.0"):
        fix = "give a host name that all nodes resolve"
        raise UsageError(f"{where}: {uri} is a different machine on each node; {fix}")


def job_environment(cluster: Cluster) -> dict[str, str]:
    """Environment variables of a job: the Ray to join, the tracking store, the terminal width."""
    # it imports mlflow, which takes seconds
    from titans_platform.tracking import STORE

    root, grown = Path(os.environ.get("TITANS_HOME", "titans-runs")), cluster.grows_to()
    # the default --root of the job, the same as here
    home = cluster.storage or (str(root.resolve()) if cluster.sees_paths else None)
    variables = {"TITANS_HOME": home, NODES: json.dumps(grown) if grown else None, STORE: cluster.mlflow}
    return {
        **QUIET,
        **ALLOCATOR,
        "PYTHONUNBUFFERED": "1",
        # else MLflow prints a line for each run that ends
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "1",
        "COLUMNS": str(shutil.get_terminal_size((100, 24)).columns),
        ADDRESS: "auto",
        **{key: value for key, value in variables.items() if value},
        **cluster.env,
    }


def titans_job(
    cluster: Cluster, arguments: Sequence[str], name: str = "", files: Mapping[str, bytes] | None = None
) -> Job:
    """Package any `titans` command as a job."""
    words = [word for word in arguments if not word.startswith("-")]
    # the name is part of a path and of a URL
    name = name or re.sub(r"[^A-Za-z0-9_.-]+", "-", "-".join(words[:2])).strip("-") or "titans"
    return Job(name, tuple(arguments), files or {}, job_environment(cluster), cluster.pip)


def study_job(
    cluster: Cluster, study: str, scale: str, root: Path, options: Iterable[str], cells: Sequence[Cell]
) -> Job:
    """Package the study at a scale as a job, with its file, the studies it is `like`, and tokenizer files.

    A study of experiments/ brings the Python files there, whose classes it may name by import path.

    Raises UsageError for files that the job would not find.
    """
    path, data = find_study(study), [cell.config.data for cell in cells]
    place = place_of(path)
    name = place.parent.name if place.name == EXPERIMENT else place.stem
    arguments = ["sweep", "run", name, "--scale", scale, "--root", str(root), *options]
    files = {place.as_posix(): path.read_bytes(), **_parents_of(path), **_files_of(data)}
    if path.name == EXPERIMENT:
        tree = path.resolve().parents[1]
        code = (file for file in tree.rglob("*.py") if not file.name.startswith("test_"))
        files |= {f"experiments/{file.relative_to(tree).as_posix()}": file.read_bytes() for file in code}
    return titans_job(cluster, arguments, f"{name}-{scale}".lower(), files)


def _parents_of(study: Path) -> dict[str, bytes]:
    """Return the files of the studies that a study is `like`, by their paths in the job.

    Raises UsageError.
    """
    files: dict[str, bytes] = {}
    while isinstance(other := read_yaml(study).get("like"), str):
        study, explicit = find_study(other), file_at(other, "study")
        if explicit is None:
            files[place_of(study).as_posix()] = study.read_bytes()
        elif ".." in explicit.parts:
            raise UsageError(f"like: {other}: a path with .. cannot be shipped with a job; give a name")
        elif not explicit.is_absolute():
            files[explicit.as_posix()] = explicit.read_bytes()
    return files


def data_job(cluster: Cluster, config: Path, root: Path, options: Iterable[str], data: DataConfig) -> Job:
    """Package `data prepare` of a run's file as a job, with the tokenizer's file. Raises UsageError."""
    arguments = ["data", "prepare", config.name, "--root", str(root), *options]
    files = {config.name: config.read_bytes(), **_files_of([data])}
    return titans_job(cluster, arguments, f"data-{config.stem}".lower(), files)


def _files_of(data: Sequence[DataConfig]) -> dict[str, bytes]:
    """Return the files to ship with a job on these data. Raises UsageError: the job would not find a path."""
    from titans_platform.data.tokenizer import BUILT_IN, names_hub

    for source in sorted({source.path for one in data for source in one.sources if source.path}):
        if not Path(source).is_absolute() and "://" not in source:
            cause = f"{source} is relative to this folder, which a job does not see"
            raise UsageError(f"data.sources: {cause}; give its absolute path on the nodes")
    # absolute paths and Hub names of tokenizers are left to the cluster
    names = {one.tokenizer for one in data}
    files = map(Path, sorted(name for name in names - set(BUILT_IN) if not names_hub(name)))
    relative = [path for path in files if not path.is_absolute()]
    for path in relative:
        if not path.is_file():
            fix = "run from the folder it is in, or give an absolute path on the cluster"
            raise UsageError(f"data.tokenizer: no file {path} here to ship with the job; {fix}")
        if ".." in path.parts:
            fix = "run from the folder it is in"
            raise UsageError(f"data.tokenizer: a path with .. cannot be shipped with a job; {fix}")
    return {path.as_posix(): path.read_bytes() for path in relative}


def requirements() -> list[str]:
    """Return the requirements of the project with its extra `train`."""
    lines = [line.partition(" extra ==") for line in importlib.metadata.requires(DISTRIBUTION) or []]
    return [line.rstrip("; ") for line, _, extra in lines if extra.strip("\"' ") in ("", "train")]


def put_code(folder: Path) -> None:
    """Write the project's packages into ``folder``, as in its wheel. Raises UsageError."""
    if (tree := checkout()) is not None:
        with tempfile.TemporaryDirectory() as built:
            command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", built]
            completed = subprocess.run(command, cwd=tree, capture_output=True, text=True)
            if completed.returncode:
                cause = (completed.stderr.strip() or "hatchling failed").splitlines()[-1]
                fix = "pip install -e '.[dev]' brings hatchling"
                raise UsageError(f"the project's wheel cannot be built: {cause}; {fix}")
            for wheel in Path(built).glob("*.whl"):
                shutil.unpack_archive(wheel, folder, "zip")
        return
    try:
        files = importlib.metadata.distribution(DISTRIBUTION).files or []
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(f"{DISTRIBUTION} is neither installed nor a checkout: no code to ship") from None
    for path in files:
        if path.parts[0] != ".." and path.suffix != ".pyc":
            Write(folder / path, path.read_binary()).do()
