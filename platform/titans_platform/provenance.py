"""The commit of this code, the machine it runs on, and the GPUs that it may be planned for."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
BAKED = "_commit.txt"
NUMBERS = ("titans-lab", "torch", "triton", "numpy", "ray", "mlflow")
"""Packages whose versions may affect results or their storage."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as a plan sees it."""

    name: str
    memory: float
    """GiB that PyTorch can allocate."""
    flops: float
    """Peak FLOP/s in bfloat16 (V100: float16) without sparsity, from the data sheet; half of it in TF32."""
    arch: int
    """Architecture: 90 is sm_90."""


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("B200", 178.3, 2250e12, 100), Gpu("H200", 139.8, 989e12, 90), Gpu("H100", 79.1, 989e12, 90),
        Gpu("A100", 79.1, 312e12, 80), Gpu("L40S", 44.4, 362e12, 89), Gpu("A10G", 22.0, 70e12, 86),
        Gpu("RTX 4090", 23.5, 165e12, 89), Gpu("V100", 31.7, 125e12, 70),
    )
}  # fmt: skip
"""GPUs by a substring of the device's name, each with the larger memory it is sold with."""


def gpu_named(name: str) -> Gpu | None:
    """Return the entry of `GPUS` for a device's name, if there is one."""
    return next((gpu for part, gpu in GPUS.items() if part in name), None)


def cores(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the CPUs this process may use: by its affinity and the quota of its container."""
    quotas = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # versions 2 and 1
        with suppress(OSError, ValueError):  # ValueError: "max", no limit
            quota, period = map(int, " ".join((cgroups / file).read_text() for file in files).split())
            quotas += [max(1, quota // period)] * (quota > 0)
    return min(quotas)


def die_with_parent() -> None:
    """Kill this process when its parent dies: the raylet of a driver that was killed, a pool that tokenises.

    Ray's own check takes seconds, in which an orphaned worker could still write into a run that the next
    driver has already resumed. Linux only.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def checkout() -> Path | None:
    """Return the source tree this code runs from; None if it is installed."""
    tree = PACKAGE.parents[1]
    return tree if PACKAGE.parent.name == "platform" and (tree / "pyproject.toml").is_file() else None


def shipped() -> Path:
    """Return the folder of data files shipped with the code: sweeps/, clusters/, constraints.txt."""
    return checkout() or PACKAGE / "_shipped"


@functools.cache
def commit() -> str:
    """Return the last commit of code or studies: 40 hex digits, with `-dirty` if files have changed since.

    Commits that change only documentation are skipped: they make no result stale. `unknown` outside git.
    """
    if (baked := PACKAGE / BAKED).is_file():
        return baked.read_text().strip()
    tree = checkout()
    return commit_of_tree(tree) if tree else "unknown"


def commit_of_tree(tree: Path) -> str:
    """Return the commit of the repository whose top folder is ``tree``; `unknown` if it is not one."""
    try:
        if Path(_git(tree, "rev-parse", "--show-toplevel")).resolve() != tree.resolve():
            return "unknown"
        # a study's expectations and rates are part of what its numbers mean
        studies = ["sweeps", ":(glob)experiments/**/*.yaml", ":(glob)experiments/**/*.py"]
        code = ["kernels", "titans_core", "platform", *studies]
        head = _git(tree, "log", "-1", "--format=%H", "--", *code) or "unknown"
        changed = _git(tree, "status", "--porcelain", "--untracked-files=no", "--", *code)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


@functools.cache
def environment() -> dict[str, str]:
    """Describe what a result was computed with: versions of packages, Python and the system; the device."""
    versions = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in NUMBERS:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    import torch

    from titans_kernels.native import library

    if torch.cuda.is_available():
        return versions | {"device": torch.cuda.get_device_name()}
    # they round differently: the last digits of a run may depend on it
    operators = "compiled" if library(torch.float32) else "PyTorch's"
    return versions | {"device": f"CPU, {os.cpu_count()} cores, {operators} operators"}


def _git(tree: Path, *arguments: str) -> str:
    command = ["git", "-C", str(tree), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
