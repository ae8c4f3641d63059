"""Launches kernels, or records the launches, to compile the kernels without a GPU."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titans_kernels.memory.forms.triton import assembler

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
"""True if kernels run in Triton's interpreter; fixed when they are defined."""
OPTIONS = {"enable_fp_fusion": True}
"""Options of every kernel: fused multiply-add, set here because the default may change."""


class Card(NamedTuple):
    """The GPU that launches are for."""

    processors: int
    """number of streaming multiprocessors"""
    arch: int


H100 = Card(132, 90)


class Launch(NamedTuple):
    """A kernel launch: positional arguments and named constants."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Tensor | int | float | None, ...]
    constants: dict[str, Any]
    warps: int
    stages: int
    registers: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Compile options of the launch."""
        most = {"maxnreg": self.registers} if self.registers else {}
        return {**OPTIONS, "num_warps": self.warps, "num_stages": self.stages, **most}


class _Here(threading.local):
    """Recordings of one thread; other threads launch their kernels as usual."""

    def __init__(self) -> None:
        self.lists: list[list[Launch]] = []
        self.card = H100


_here = _Here()


@contextmanager
def record_launches(card: Card = H100) -> Iterator[list[Launch]]:
    """Record launches in a list instead of running them, within the context."""
    launches: list[Launch] = []
    before, _here.card = _here.card, card
    _here.lists.append(launches)
    try:
        yield launches
    finally:
        _here.lists.pop()
        _here.card = before


def card_of(device: torch.device) -> Card:
    """Return the card of a CUDA device; without a GPU the one of the recording, by default an H100."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return _here.card
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Card(processors, assembler.arch_of(device.index))


def fake(op: Callable[..., Any]) -> Callable[..., Any]:
    """Return the fake implementation of a custom operator: its output buffers, and no launch."""

    def without_launching(*args: Any, **kwargs: Any) -> Any:
        with record_launches():
            return op(*args, **kwargs)

    return without_launching


def float32_precision() -> str:
    """``input_precision`` of float32 products: tf32x3, as exact as float32, or tf32 if PyTorch allows it."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def is_recording() -> bool:
    """Return True if launches are being recorded; tensors may then have no data."""
    return bool(_here.lists)


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int, stages: int = 1,
    registers: int | None = None, **constants: Any,
) -> None:  # fmt: skip
    """Launch ``kernel`` on the device of its first tensor, with at most ``registers`` per thread."""
    recorded = Launch(kernel, grid, arguments, constants, warps, stages, registers)
    if _here.lists:
        _here.lists[-1].append(recorded)
        return
    device = next(x.device for x in arguments if isinstance(x, Tensor))
    if device.type == "cuda":
        assembler.select(assembler.arch_of(device.index))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*arguments, **constants, **recorded.options)
