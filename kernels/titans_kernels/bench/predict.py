"""`titans bench kernels --predict`: a training step on an H100, predicted from the compiled kernels.

For LMM, and for MAC, MAG and MAL, whose memory runs the same kernels. Each part takes the longest of its
matrix products, its memory traffic and its instructions. The instructions of the memory's kernels are counted
in the compiled artefacts: SASS of every loop, times how often it runs. Everything else is an assumption,
printed with the numbers. One was measured: LMM at 340M, on an H200 (experiments/gpu).
"""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from titans_kernels.bench.aot import compiled, launches, name_of
from titans_kernels.bench.shapes import BenchShape, flops
from titans_kernels.memory.forms.triton.launch import Launch

SIZES = {"170M": (768, 19), "340M": (1024, 22), "400M": (1024, 24), "760M": (1536, 23)}
"""Width of the model and number of blocks, as in `titans_core.presets`."""
ROWS, LENGTH, VOCABULARY, HEAD, CHUNK = 16, 4096, 32_000, 64, 64
PEAK, BANDWIDTH, CLOCK, PROCESSORS = 989e12, 3.35e12, 1.755e9, 132
"""Of an H100 SXM: bf16 FLOP/s, bytes/s, Hz at its boost under load, multiprocessors."""
MATMUL, COPY, ISSUE = 0.6, 0.8, 1.6
"""Shares of the peak in large products and copies; instructions a multiprocessor issues in a cycle."""
CONVOLVED, OTHER = 40, 100
"""Bytes a token, channel and block, forward and backward: of a projection with its convolution, norm and
rotation, and of residuals, gates and the feed-forward layer."""
FLASH, SEGMENT = 0.35, 1024
"""Share of the peak in attention with heads of 64; tokens of a window, and of MAC's segment."""
ASSUMPTIONS = (
    f"large products at {MATMUL:.0%} of {PEAK / 1e12:.0f} TFLOP/s, memory at {COPY:.0%} of "
    f"{BANDWIDTH / 1e12:.2f} TB/s, {ISSUE} instructions a cycle and multiprocessor at {CLOCK / 1e9:.3f} GHz",
    f"blocks of 12 D^2 parameters; {CONVOLVED} D bytes a token of elementwise work a convolved projection",
    f"(3 in LMM, 6 in MAG and MAL, 9 in MAC) and {OTHER} D for the rest of a block",
    f"MAC applies 5 matrices to tokens and reads; attention to {SEGMENT} keys at {FLASH:.0%} of the peak",
    "no recomputation, communication, or wait for data or launches; LMM at 340M reached 54% of it on an H200",
)


class Variant(NamedTuple):
    """A design beside its memory."""

    convolved: int
    """projections with a convolution"""
    again: int = 0
    """matrices D x D that are applied twice"""
    keys: int = 0
    """mean number of keys that a token attends to"""


# a token of MAC sees half a segment's tokens and as many reads, in the mean
VARIANTS = {"LMM": Variant(3), "MAC": Variant(9, 5, SEGMENT), "MAG": Variant(6, 0, SEGMENT)}
VARIANTS["MAL"] = VARIANTS["MAG"]


class Part(NamedTuple):
    """A part of a step, of all blocks."""

    name: str
    flops: float
    bytes: float
    instructions: float
    """of warps"""
    share: float = MATMUL
    """of the peak in its products"""

    @property
    def times(self) -> dict[str, float]:
        """Seconds by what limits it; a step takes the longest."""
        return {
            "products": self.flops / (PEAK * self.share),
            "bytes": self.bytes / (BANDWIDTH * COPY),
            "instructions": self.instructions / (PROCESSORS * ISSUE * CLOCK),
        }

    @property
    def seconds(self) -> float:
        """The longest of its times."""
        return max(self.times.values())


def parts(size: str, variant: Variant, kernels: list[Part]) -> list[Part]:
    """Return the parts of a step of one size on one GPU; ``kernels`` are its memory's."""
    width, blocks = SIZES[size]
    tokens = ROWS * LENGTH
    weights = 12 * width**2 * blocks + VOCABULARY * width
    applied = weights + variant.again * width**2 * blocks
    moved = (variant.convolved * CONVOLVED + OTHER) * width * tokens * blocks
    # the backward of attention has five products, the forward two
    attention = 3.5 * 4 * variant.keys * width * tokens * blocks
    return [
        Part("products with weights", 6 * applied * tokens, 0, 0),
        Part("elementwise", 0, moved, 0),
        *kernels,
        Part("attention", attention, 0, 0, FLASH),
        Part("optimiser", 0, 28 * weights, 0),
    ]


def memory_parts(size: str) -> list[Part]:
    """Return the kernels of a step's memories, from their compilation."""
    width, blocks = SIZES[size]
    heads = width // HEAD
    shape = BenchShape(size, 2, HEAD, HEAD, ROWS, LENGTH, CHUNK, heads, bound=1.0, budget=2.0)
    work = flops(shape.pairs, CHUNK)
    total = (work["forward"] + work["backward"]) * ROWS * LENGTH * heads * blocks
    kernels: dict[str, list[Launch]] = {"memory": [], "write budget": []}
    for launch in step(launches(shape, torch.bfloat16)):
        kernels["write budget" if name_of(launch).startswith("budget") else "memory"].append(launch)
    return [
        Part(name, total if name == "memory" else 0, blocks * sum(map(traffic, group)),
             blocks * sum(map(instructions, group)))
        for name, group in kernels.items()
    ]  # fmt: skip


def step(recorded: list[Launch]) -> Iterator[Launch]:
    """Yield the launches of one forward and backward that saves, without a base."""
    first = next(i for i, x in enumerate(recorded[1:], 1) if name_of(x) == "gates.forward")
    yield from recorded[:first]
    yield from (x for x in recorded if name_of(x).startswith("budget"))


def traffic(launch: Launch) -> int:
    """Return the bytes of a launch's tensors, each read or written once."""
    return sum(x.numel() * x.element_size() for x in launch.arguments if isinstance(x, Tensor))


def instructions(launch: Launch) -> float:
    """Return the instructions that all warps of a launch issue, on a fresh compilation for an H100."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled(launch, 90).asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        sass = subprocess.run([tool, "-c", path], check=True, capture_output=True, text=True).stdout
    return issued(sass, name_of(launch)) * launch.warps * math.prod(launch.grid)


def issued(sass: str, kernel: str) -> float:
    """Return the instructions that a warp issues: a loop's as often as `trips` says."""
    labels: dict[str, int] = {}
    lines: list[str] = []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif re.match(r"\s*/\*[0-9a-f]{4,}\*/", line):
            lines.append(line)
    jumps = (
        (i, labels.get(m[1], i)) for i, x in enumerate(lines) if (m := re.search(r"BRA.*?(\.L_x_\d+)", x))
    )
    # a jump to itself is the padding after the end
    loops = {start: end for end, start in jumps if start < end}
    counts = [1.0] * len(lines)
    for start, end in loops.items():
        depth = sum(a <= start and end <= b for a, b in loops.items())
        inside = "".join(lines[start : end + 1])
        times = trips(kernel, depth, "MMA" in inside)
        counts[start : end + 1] = [n * times for n in counts[start : end + 1]]
    return sum(counts)


def trips(kernel: str, depth: int, products: bool) -> float:
    """Return how often a loop runs: over a row's chunks and tiles, in the write budget over blocks of 16."""
    if not kernel.startswith("budget"):
        if depth == 1:
            return LENGTH / CHUNK if kernel.startswith(("resident", "columns", "streamed")) else 1
        return HEAD / 32 if kernel.startswith("streamed") else 1  # tiles of features
    if depth == 1:
        return CHUNK / 16 if "keys" not in kernel else 1
    return (CHUNK / 16 - 1) / 2 if products else 16  # earlier blocks, and the tokens of one


def lines() -> Iterator[str]:
    """Yield the assumptions, and a table for each size and variant."""
    yield from ("assumed: " + text for text in ASSUMPTIONS)
    for size in SIZES:
        kernels = memory_parts(size)
        for name, variant in VARIANTS.items():
            yield f"\n{name} {size}: {ROWS} rows of {LENGTH} on one H100, bf16"
            yield from table(size, [part for part in parts(size, variant, kernels) if part.seconds])


def table(size: str, rows: list[Part]) -> Iterator[str]:
    """Yield a line for each part, and one for the step."""
    yield f"{'part':<22} {'TFLOP':>7} {'GB':>7} {'G instr.':>9} {'ms':>7}  limited by"
    for part in rows:
        by = max(part.times, key=lambda name: part.times[name])
        yield (
            f"{part.name:<22} {part.flops / 1e12:7.1f} {part.bytes / 1e9:7.1f} "
            f"{part.instructions / 1e9:9.1f} {1e3 * part.seconds:7.1f}  {by}"
        )
    (width, blocks), tokens, total = SIZES[size], ROWS * LENGTH, sum(part.seconds for part in rows)
    useful = 6 * (12 * width**2 * blocks + VOCABULARY * width)
    rate, share = tokens / total / 1e3, useful * tokens / total / PEAK
    yield f"{1e3 * total:.0f} ms a step, {rate:.0f}K tokens/s, {share:.0%} MFU (6 N a token)"
