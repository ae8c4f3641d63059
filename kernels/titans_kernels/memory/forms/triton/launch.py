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
    registers: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """What Triton is told beside the arguments."""
        most = {"maxnreg": self.registers} if self.registers else {}
        return {**OPTIONS, "num_warps": self.warps, "num_stages": self.stages, **most}


class _Here(threading.local):
    """The lists of one thread; kernels of other threads start as usual."""

    def __init__(self) -> None:
        self.lists: list[list[Launch]] = []


_here = _Here()


@contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """A context in which kernels do not start: the list holds what would have started."""
    launches: list[Launch] = []
    _here.lists.append(launches)
    try:
        yield launches
    finally:
        _here.lists.pop()


def is_recording() -> bool:
    """Whether kernels are written down at the moment, over tensors that may hold nothing."""
    return bool(_here.lists)


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int, stages: int = 1,
    registers: int | None = None, **constants: Any,
) -> None:  # fmt: skip
    """Start ``kernel`` on the device of its first tensor, its threads with at most so many ``registers``."""
    made = Launch(kernel, grid, arguments, constants, warps, stages, registers)
    if _here.lists:
        _here.lists[-1].append(made)
        return
    device = next(x.device for x in arguments if isinstance(x, Tensor))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*arguments, **constants, **made.options)
