"""The ptxas that compiles the kernels: Triton's own choice, unless it is known to miscompile them.

A wheel of Triton has two: ``ptxas``, and a newer ``ptxas-blackwell``. Before 3.9 Triton takes the older one
for Hopper (3.7.1, which torch 2.13 pins on CUDA: 12.8, beside 13.1).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

WRONG_ON_HOPPER = (12, 8), (13, 1)
"""Versions of ptxas from the first on, before the second, give wrong numbers or write outside of shared
memory where wgmma takes an operand from registers, as in most products here: 12.8.93 did both and 13.0.88 the
latter on the same PTX, 13.1.80 neither (flash-linear-attention, pull request 1262 and issue 640)."""
Version = tuple[int, int]


def is_wrong(version: Version, arch: int) -> bool:
    """Return whether a version of ptxas miscompiles the kernels for an architecture such as 90."""
    first, fixed = WRONG_ON_HOPPER
    return 90 <= arch < 100 and first <= version < fixed


def choose(arch: int, current: Version, others: Mapping[str, Version]) -> str | None:
    """Path of the newest ptxas to use in place of ``current``; None to keep it: it is good, or none is."""
    good = {path: version for path, version in others.items() if not is_wrong(version, arch)}
    return max(good, key=good.__getitem__) if is_wrong(current, arch) and good else None


@cache
def select(arch: int) -> tuple[Version, str]:
    """Make Triton use a ptxas that is known to be good for ``arch``.

    A path set by the user is kept. Call it before the first compilation: Triton caches compiled kernels by
    the version.

    Returns:
        The version in use, and Triton's environment variable for its path.
    """
    from triton import knobs
    from triton.backends.nvidia import compiler

    current = compiler.get_ptxas(arch)
    newer = current.path == knobs.nvidia.ptxas_blackwell.path
    variable = "TRITON_PTXAS_BLACKWELL_PATH" if newer else "TRITON_PTXAS_PATH"
    if variable not in os.environ:
        tools = {tool.path: _version(tool) for tool in (knobs.nvidia.ptxas, knobs.nvidia.ptxas_blackwell)}
        if path := choose(arch, _version(current), tools):
            os.environ[variable] = path  # processes that compile inherit it
            compiler.get_ptxas_version.cache_clear()
    return _version(compiler.get_ptxas(arch)), variable


@torch.compiler.assume_constant_result
def refusal(arch: int) -> str | None:
    """Return why the kernels cannot be compiled for an architecture, or None if they can.

    `TITANS_PTXAS=any` in the environment disables the check.
    """
    version, variable = select(arch)
    if os.environ.get("TITANS_PTXAS") == "any" or not is_wrong(version, arch):
        return None
    return (
        f"backend: ptxas {version[0]}.{version[1]} miscompiles products for Hopper (FLA pull request 1262); "
        f"set {variable} to one of CUDA 13.1 or later, or TITANS_PTXAS=any to use it anyway"
    )


def _version(tool: Any) -> Version:
    major, minor = tool.version.split(".")[:2]
    return int(major), int(minor)


def arch_of(device: int | None) -> int:
    """Architecture of a CUDA device, such as 90 for an H100."""
    if not torch.cuda.is_available():
        return 90  # fake tensors of a device that is not here
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
