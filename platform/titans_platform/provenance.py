"""The commit of this code: stored in a wheel, read from git in a source tree."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
BAKED = "_commit.txt"
NUMBERS = ("titans-lab", "torch", "triton", "numpy", "ray", "mlflow")
"""Packages whose versions may affect results or their storage."""


def checkout() -> Path | None:
    """The source tree this code runs from; None if it is installed."""
    tree = PACKAGE.parents[1]
    return tree if PACKAGE.parent.name == "platform" and (tree / "pyproject.toml").is_file() else None


def shipped() -> Path:
    """The folder of data files shipped with the code: sweeps/, clusters/, constraints.txt."""
    return checkout() or PACKAGE / "_shipped"


@functools.cache
def commit() -> str:
    """The last commit that changed code: 40 hex digits, with `-dirty` if there are uncommitted changes.

    Commits that change only documentation are skipped: they make no result stale. `unknown` outside git.
    """
    if (baked := PACKAGE / BAKED).is_file():
        return baked.read_text().strip()
    tree = checkout()
    return commit_of_tree(tree) if tree else "unknown"


def commit_of_tree(tree: Path) -> str:
    """The commit of the repository whose top folder is ``tree``; `unknown` if it is not one."""
    try:
        if Path(_git(tree, "rev-parse", "--show-toplevel")).resolve() != tree.resolve():
            return "unknown"
        code = ["kernels", "titans_core", "platform"]
        head = _git(tree, "log", "-1", "--format=%H", "--", *code) or "unknown"
        changed = _git(tree, "status", "--porcelain", "--untracked-files=no", "--", *code)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


@functools.cache
def environment() -> dict[str, str]:
    """What a result was computed with: versions of packages, Python and the system, and the device."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in NUMBERS:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found | {"device": _device()}


def _device() -> str:
    import torch

    from titans_kernels import native

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    # they round differently: the last digits of a run may depend on it
    operators = "compiled" if native.library(torch.float32) else "PyTorch's"
    return f"CPU, {os.cpu_count()} cores, {operators} operators"


def _git(tree: Path, *arguments: str) -> str:
    command = ["git", "-C", str(tree), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
