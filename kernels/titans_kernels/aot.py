"""Compile every kernel ahead of time, without a GPU, and read what the compiler made of it.

`python -m titans_kernels.aot` writes down what each shape of the registry would launch, forward and backward,
compiles it for the targets, and prints registers a thread, bytes spilled, shared memory and tensor-core
instructions of each. Not in a process whose kernels run in the interpreter.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from titans_kernels.memory.triton.launch import Launch, written_down
from titans_kernels.memory.triton.op import memory_triton, memory_triton_backward

TARGETS = (80, 90, 100)
"""Compute capabilities: A100, H100 and H200, B200."""
REGISTERS = 65536
"""of a multiprocessor, on all of these"""
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Shared memory a program may have, bytes."""


class Case(NamedTuple):
    """A call as the kernels see it."""

    widths: tuple[int, ...]
    chunk_size: int
    dtype: torch.dtype = torch.bfloat16
    bound: float = 0.0
    rows: int = 8
    heads: int = 16
    length: int = 4096

    @property
    def name(self) -> str:
        """Depth, widths, chunk size, type and bound."""
        kind = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[self.dtype]
        bounded = " bound" if self.bound else ""
        return f"{'-'.join(map(str, self.widths))} b{self.chunk_size} {kind}{bounded}"


class Report(NamedTuple):
    """What the compiler made of a kernel."""

    kernel: str
    case: str
    target: int
    warps: int
    registers: int
    spilled: int
    """bytes a thread, stored and loaded"""
    shared: int
    tensor_core: int
    """instructions on tensor cores"""


def launches(case: Case) -> list[Launch]:
    """What forward and backward of a case start, with and without what the forward keeps."""
    like = {"dtype": case.dtype, "device": "meta"}
    B, T, H, D, V = case.rows, case.length, case.heads, case.widths[0], case.widths[-1]
    size = sum(2 * a * b for a, b in zip(case.widths, case.widths[1:], strict=False))
    q, k, v = (torch.empty(B, T, H, width, **like) for width in (D, D, V))
    gates = [torch.empty(B, T, H, device="meta") for _ in range(3)]
    start = torch.empty(B, H, size, device="meta")
    options = (list(case.widths), case.chunk_size, "silu", case.bound)
    with written_down() as found:
        for keep in (True, False):
            y, after, *kept = memory_triton._init_fn(q, k, v, *gates, start, None, *options, keep)
            memory_triton_backward._init_fn(y, after, q, k, v, *gates, start, None, kept, *options)
    return found


def source(launch: Launch) -> ASTSource:
    """A launch as the compiler takes it, with the assumptions the launcher would make of its arguments."""
    names = launch.kernel.arg_names
    signature = dict.fromkeys(names, "constexpr")
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    constants = dict(launch.constants)
    for i, (name, x) in enumerate(zip(names, launch.arguments, strict=False)):
        if isinstance(x, Tensor):
            kind = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32"}
            signature[name] = "*" + kind[str(x.dtype).removeprefix("torch.")]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif x == 1:
            constants[name] = 1
        else:
            signature[name] = "i32" if abs(x) < 2**31 else "i64"
            if x % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def compile_launch(launch: Launch, case: str, target: int) -> Report:
    """Compile one launch for one target."""
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    made = triton.compile(source(launch), target=GPUTarget("cuda", target, 32), options=options)
    registers, spilled = _resources(made.asm["cubin"])
    return Report(
        f"{launch.kernel.__module__.rsplit('.', 1)[-1]}.{launch.kernel.__name__.strip('_')}",
        case, target, launch.warps, registers, spilled, made.metadata.shared,
        len(re.findall(r"(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", made.asm["ptx"])),
    )  # fmt: skip


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and bytes of local memory, which is where registers spill to."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2]) + int(found[3])


def reports(cases: Iterable[Case], targets: Iterable[int]) -> Iterator[Report]:
    """Compile what the cases launch, each different kernel once."""
    seen, jobs = set(), []
    for case in cases:
        for launch in launches(case):
            for target in targets:
                key = (source(launch).hash(), launch.warps, launch.stages, target)
                if key not in seen:
                    seen.add(key)
                    jobs.append((launch, case.name, target))
    with ThreadPoolExecutor(2) as pool:
        yield from pool.map(lambda job: compile_launch(*job), jobs)
