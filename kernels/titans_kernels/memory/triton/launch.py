"""The one place where kernels start, or are written down instead, to be compiled without a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

OPTIONS = {"enable_fp_fusion": True}
"""Options of every kernel: fused multiply-add, set here because the default may change."""


class Launch(NamedTuple):
    """A kernel as it would start: its arguments in order, then its constants by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Tensor | int | float | None, ...]
    constants: dict[str, Any]
    warps: int
    stages: int


class _Here(threading.local):
    """The lists of one thread; kernels of other threads start as usual."""

    def __init__(self) -> None:
        self.lists: list[list[Launch]] = []


_here = _Here()


@contextmanager
def written_down() -> Iterator[list[Launch]]:
    """A context in which kernels do not start: the list holds what would have started."""
    launches: list[Launch] = []
    _here.lists.append(launches)
    try:
        yield launches
    finally:
        _here.lists.pop()


def writing_down() -> bool:
    """Whether kernels are written down at the moment, over tensors that may hold nothing."""
    return bool(_here.lists)


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int, stages: int = 1, **constants: Any
) -> None:
    """Start ``kernel`` on the device of its first tensor."""
    if _here.lists:
        _here.lists[-1].append(Launch(kernel, grid, arguments, constants, warps, stages))
        return
    device = next(x.device for x in arguments if isinstance(x, Tensor))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*arguments, **constants, **OPTIONS, num_warps=warps, num_stages=stages)
