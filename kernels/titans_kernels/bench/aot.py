"""Compile every kernel ahead of time, without a GPU, and report its resource usage.

`python -m titans_kernels.bench.aot` records the launches of the registered shapes, forward and backward,
compiles them for each target, and prints registers per thread, bytes spilled, shared memory and tensor-core
instructions. Does not work in a process that runs Triton's interpreter.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TextIO

import click
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from titans_kernels.bench.shapes import SHAPES, BenchShape
from titans_kernels.bench.support import GPUS
from titans_kernels.memory.forms.online import BLOCK
from titans_kernels.memory.forms.triton import assembler, budget, delta
from titans_kernels.memory.forms.triton.launch import H100, Card, Launch, record_launches
from titans_kernels.memory.forms.triton.op import memory_triton, memory_triton_backward
from titans_kernels.memory.forms.triton.pieces import INTERPRETED
from titans_kernels.memory.forms.triton.refusal import too_large
from titans_kernels.memory.forms.triton.shapes import padded

TARGETS = tuple(GPUS)
CARDS = {80: Card(108, 80), 90: H100, 100: Card(148, 100)}
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32"}


def largest(dtype: torch.dtype) -> tuple[BenchShape, ...]:
    """Return, for each kind of write kernel, the supported shape with the largest programs.

    Tiles are at most 64 wide, except for the keys of a linear memory, and at most a chunk long.
    """
    b = 64 if too_large(dtype, 128) else 128
    return (
        BenchShape("largest-delta", 1, 128, 0, 32, 4096, 1),
        BenchShape("largest-columns", 1, 128, 0, 32, 4096, b),
        BenchShape("largest-columns-bound", 1, 64, 0, 32, 4096, b, bound=0.5),
        BenchShape("largest-resident", 2, 64, 64, 32, 4096, 64, bound=0.5),
        BenchShape("largest-streamed", 2, 256, 512, 1, 4096, b, bound=0.5),
    )


class KernelReport(NamedTuple):
    """Resource usage of a compiled kernel."""

    kernel: str
    shape: str
    dtype: str
    target: int
    warps: int
    registers: int
    """per thread"""
    spilled: int
    """bytes per thread"""
    shared: int
    """bytes per program"""
    tensor_core: int
    """instructions"""
    carried: int
    """asynchronous products still in flight at the end of a loop iteration"""
    instructions: int
    """of PTX"""


def launches(
    shape: BenchShape, dtype: torch.dtype, target: int = 90, packed: bool = False
) -> list[Launch]:  # fmt: skip
    """Return the launches of a shape's forward and backward on a GPU, with and without saving in between.

    A memory of several layers also with decay towards a base. ``packed``: two documents a row, all of which
    start from one state.
    """
    B, T, H, b = shape.batch, shape.length, shape.heads, shape.chunk_size
    if b == 1:
        return _delta_launches(B * H, T // BLOCK, *shape.widths)
    widths = [padded(width) for width in shape.widths]
    size = sum(2 * D * F for D, F in pairwise(widths))
    rows, borders = (1, torch.empty(2 * B + 1, dtype=torch.int32, device="meta")) if packed else (B, None)
    wide = (torch.empty(rows, B * T // rows, H, widths[i], dtype=dtype, device="meta") for i in (0, 0, -1))
    tokens = [*wide, *(torch.empty(rows, B * T // rows, H, device="meta") for _ in range(3))]
    start = torch.empty(rows, H, size, device="meta")
    base = torch.empty(H, size // 2, device="meta") if shape.depth > 1 else None
    rule = (widths, b, "silu", shape.bound or 0.0)
    with record_launches(CARDS[target]) as recorded:
        for keep, towards in product((True, False), dict.fromkeys((None, base))):
            given = (*tokens, start, towards, borders)
            y, after, *kept = memory_triton._init_fn(*given, *rule, keep, not packed)
            memory_triton_backward._init_fn(y, after, *given, kept, *rule)
        if shape.budget:
            k, eta, theta = tokens[1], *tokens[4:]
            limited = budget.forward(k, eta, theta, b, borders, 0)
            budget.backward([*limited, k, eta, theta, *limited], b, borders)
    return recorded


def _delta_launches(R: int, n: int, D: int, F: int) -> list[Launch]:
    """Record the launches for the states of ``n`` blocks, in float32 whatever the inputs are."""
    x, *keys = (torch.empty(R, n, BLOCK, width, device="meta") for width in (F, D, D, D))
    writes, ends = torch.empty(2, R, n, BLOCK, device="meta"), torch.empty(3, R, n, device="meta")
    with record_launches() as recorded:
        states, written = delta.delta_states._init_fn(
            x, *keys, writes, ends, torch.empty(R, 2 * D, F, device="meta")
        )
        delta.delta_states_backward._init_fn(*keys, writes, ends, states, written)
    return recorded


def source(launch: Launch) -> ASTSource:
    """Compiler input of a launch, with the argument specialisations that Triton's launcher would apply."""
    parameters = launch.kernel.params
    signature = {p.name: "constexpr" for p in parameters}
    constants, attributes = dict(launch.constants), {}
    for i, (parameter, x) in enumerate(zip(parameters, launch.arguments, strict=False)):
        name, specialized = parameter.name, not parameter.do_not_specialize
        if isinstance(x, Tensor):
            signature[name] = _POINTERS[x.dtype]
        elif x is None or (x == 1 and specialized):
            constants[name] = x
            continue
        else:
            signature[name] = "i32" if abs(x) < 2**31 else "i64"
        if isinstance(x, Tensor) or (x % 16 == 0 and specialized):
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def compiled(launch: Launch, target: int) -> Any:
    """Compile the kernel for one target with Triton."""
    assembler.select(target)
    return triton.compile(source(launch), target=GPUTarget("cuda", target, 32), options=launch.options)


def report(launch: Launch, shape: str, dtype: str, target: int) -> KernelReport:
    """Compile one launch for one target and report its resource usage."""
    built = compiled(launch, target)
    registers, spilled = _resources(built.asm["cubin"])
    tensor_core = len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b", built.asm["ptx"]))
    return KernelReport(
        name_of(launch), shape, dtype, target, launch.warps, registers, spilled, built.metadata.shared,
        tensor_core, _carried(built.asm["ptx"]), len(re.findall(r"^\s+[@a-z{].*;$", built.asm["ptx"], re.M)),
    )  # fmt: skip


def name_of(launch: Launch) -> str:
    """Return the names of module and kernel, with the variant's extra tasks."""
    module, kernel = launch.kernel.__module__.rsplit(".", 1)[-1], launch.kernel.__name__.strip("_")
    flags = [flag.lower() for flag in ("READ", "KEEP", "HIDDEN", "KEYS") if launch.constants.get(flag)]
    arguments = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False))
    flags += ["base"] if arguments.get("base") is not None else []
    return ".".join([module, kernel]) + ("+" + "+".join(flags) if flags else "")


def _carried(ptx: str) -> int:
    """Maximum number of wgmma groups that are committed but not waited for at a backward jump."""
    labels, flight, most = set(), 0, 0
    for line in map(str.strip, ptx.splitlines()):
        if label := re.match(r"(\$\w+):", line):
            labels.add(label[1])
        elif line.startswith("wgmma.commit_group"):
            flight += 1
        elif wait := re.match(r"wgmma\.wait_group\S*\s+(\d+)", line):
            flight = min(flight, int(wait[1]))
        elif (jump := re.search(r"\bbra(?:\.uni)?\s+(\$\w+)", line)) and jump[1] in labels:
            most = max(most, flight)
    return most


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return registers and stack bytes (spills) per thread."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = subprocess.run([tool, "-res-usage", path], check=True, capture_output=True, text=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if usage is None:
        raise RuntimeError(f"cuobjdump: no register count in its output: {text}")
    return int(usage[1]), int(usage[2])


def reports(
    shapes: Iterable[BenchShape],
    dtypes: Iterable[str],
    targets: Iterable[int],
    kernels: tuple[str, ...] = ("",),
    packed: bool = False,
) -> Iterator[KernelReport]:
    """Compile the launches of the shapes, each distinct kernel once, two in parallel.

    ``kernels``: prefixes of the names of the kernels to compile.
    """
    jobs: dict[tuple, tuple[Launch, str, str, int]] = {}
    for shape in shapes:
        for dtype in dtypes:
            for target in targets:
                for launch in launches(shape, TYPES[dtype], target, packed):
                    if not name_of(launch).startswith(kernels):
                        continue
                    key = (source(launch).hash(), *sorted(launch.options.items()), target)
                    jobs.setdefault(key, (launch, shape.name, dtype, target))
    with ThreadPoolExecutor(2) as pool:
        yield from pool.map(lambda job: report(*job), jobs.values())


def show(made: Iterable[KernelReport]) -> list[KernelReport]:
    """Print reports as they are made, and return them. Raises UsageError: kernels are interpreted."""
    if INTERPRETED:
        raise click.UsageError("TRITON_INTERPRET is set: unset it, an interpreted kernel is not compiled")
    columns = f"{'sm':>4}{'warps':>6}{'regs':>5}{'spill':>6}{'shared':>8}{'tc':>5}"
    click.echo(f"{'shape':22}{'kernel':32}{columns}")
    shown = []
    for r in made:
        shown.append(r)
        numbers = f"{r.target:4}{r.warps:6}{r.registers:5}{r.spilled:6}{r.shared:8}{r.tensor_core:5}"
        click.echo(f"{r.shape:22}{r.kernel:32}{numbers}")
    return shown


@click.command()
@click.option("--shape", "names", multiple=True, type=click.Choice(list(SHAPES)), help="Repeatable  [all]")
@click.option(
    "--shapes", "file", type=click.File(), help="Shapes in JSON, lists of their fields, not a --shape."
)
@click.option("--largest", "edge", is_flag=True, help="Of all that is served what takes most, not a --shape.")
@click.option("--packed", is_flag=True, help="Of packed documents, not of equal rows.")
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(list(TYPES)), help="Repeatable  [bf16]")
@click.option("--target", "targets", multiple=True, type=int, help="80, 90 or 100; repeatable  [all]")
@click.option("--kernel", "kernels", multiple=True, help="Beginning of a name; repeatable  [all]")
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Also write them here.")
def main(
    names: tuple[str, ...], file: TextIO | None, edge: bool, packed: bool, dtypes: tuple[str, ...],
    targets: tuple[int, ...], kernels: tuple[str, ...], path: Path | None,
) -> None:  # fmt: skip
    """Compile each kernel without a GPU and print registers, spills and shared memory.

    \b
    Example:
      python -m titans_kernels.bench.aot --shape l1-d128 --target 90
    """
    shown = []
    given = json.load(file) if file else []
    for dtype in dtypes or ["bf16"]:
        shapes = largest(TYPES[dtype]) if edge else [SHAPES[name] for name in names or SHAPES]
        shapes = [BenchShape(**fields) for fields in given] if given else shapes
        shown += show(reports(shapes, [dtype], targets or TARGETS, kernels or ("",), packed))
    if path:
        versions = {"torch": torch.__version__, "triton": triton.__version__}
        rows = [r._asdict() for r in shown]
        path.write_text(json.dumps({"versions": versions, "kernels": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
