"""`titans bench memory`: the speed and peak memory of the memory layer on a CPU.

The cases to time are defined here; `titans_kernels.bench` checks, times and interleaves them.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

import click
import torch
from rich.console import Console

from titans_core import MemoryConfig, NeuralMemory
from titans_core.init import initialize
from titans_kernels.bench.check import judge
from titans_kernels.bench.inputs import make
from titans_kernels.bench.machine import ceilings, describe
from titans_kernels.bench.peers import titans_pytorch, versions
from titans_kernels.bench.process import TimingProcess
from titans_kernels.bench.shapes import BenchShape, flops
from titans_kernels.bench.timing import Clock, Interleaved, Op
from titans_platform.cli import echo_json, json_option
from titans_platform.errors import TitansError, UsageError

PEER = "titans-pytorch"
PEER_REQUIREMENT = "titans-pytorch==0.5.5"
EXACT_LENGTH = 256
"""Up to this length the peer takes one step a token, as we do; longer ones take too much memory."""
LONGEST_PEER = 4096
"""Beyond it the peer needs 10 GB; there, we are compared with ourselves at the base length."""
BASE_LENGTH = 1024
SHAPE = BenchShape("layer", 2, 64, 256, 2, BASE_LENGTH, heads=4, bound=1.0)
QUICK = BenchShape("quick", 2, 16, 16, 1, BASE_LENGTH, chunk_size=16, heads=2, bound=1.0)
CPU = torch.device("cpu")

Progress = Callable[[str], None]


def layer(**sizes: Any) -> Op:
    """Build our layer, `titans_core.NeuralMemory`, from x [B, T, heads * head_dim] to y."""
    s = BenchShape(**sizes)
    config = MemoryConfig(
        depth=s.depth, heads=s.heads, expansion=s.hidden // s.head_dim,
        chunk_size=s.chunk_size,
    )  # fmt: skip
    module = NeuralMemory(s.heads * s.head_dim, config)
    initialize(module, n_layers=1)
    x = torch.randn(s.batch, s.length, s.heads * s.head_dim, requires_grad=True)
    return Op(lambda: module(x)[0], [x, *module.parameters()])


def operator(**sizes: Any) -> Op:
    """Build our operator alone, `titans_kernels.neural_memory`."""
    inputs = make(BenchShape(**sizes), torch.float32, CPU, seed=0)
    return Op(lambda: inputs.call("auto")[0], inputs.leaves)


def peer(chunk: int, **sizes: Any) -> Op:
    """Build the layer of titans-pytorch; ``chunk`` is its chunk_size, its batch_size is our chunk_size."""
    return titans_pytorch(BenchShape(**sizes), chunk, renewed=True)


def run(
    lengths: list[int], pairs: int, threads: int, *, shape: BenchShape = SHAPE, against: str | None = None,
    progress: Progress = lambda message: None,
) -> dict[str, Any]:  # fmt: skip
    """Check the operator, then time each length forward and backward in ``pairs`` interleaved rounds.

    Raises:
        UsageError: ``against`` is no known peer, or is not installed.
        TitansError: the operator is wrong, or one of our cases failed.
    """
    version = _peer_version(against) if against else None
    progress("checking the operator against its reference")
    verdict = judge(shape.short(), "reference", torch.float32, CPU).verdict(lambda x: x.call("auto"))
    if not verdict.green:
        raise TitansError(f"the operator is not right, so it is not timed: {verdict}")
    progress("measuring the machine's matmul rate")
    torch.set_num_threads(threads)
    machine, rates = describe(CPU, None), ceilings(Clock(CPU), torch.float32, CPU)
    of_lengths = [_cases(replace(shape, length=length), against) for length in lengths]
    rows = [_row(cases, pairs, threads, rates["matmul"], progress) for cases in of_lengths]
    return {
        "shape": {**_sizes(shape), "threads": threads, "pairs": pairs, "base_length": BASE_LENGTH},
        "machine": machine | {"ceilings": rates},
        "peer": {"name": against, "version": version} if against else None,
        "operator_error": verdict.errors[verdict.worst],
        "rows": rows,
    }


def _peer_version(name: str) -> str:
    if name != PEER:
        raise UsageError(f"--against: {name!r} is not known; there is {PEER}")
    if name not in (installed := versions()):
        raise UsageError(f"--against: {PEER} is not installed; pip install {PEER_REQUIREMENT}")
    return installed[name]


def _sizes(shape: BenchShape) -> dict[str, Any]:
    return {name: value for name, value in vars(shape).items() if name not in ("targets", "small", "beside")}


class Case(NamedTuple):
    """One thing to time: the function above that builds it, at a shape."""

    kind: str
    shape: BenchShape
    more: Mapping[str, int] = MappingProxyType({})

    def start(self, threads: int) -> TimingProcess:
        """Start a process that times it."""
        label = f"{PEER if self.kind == 'peer' else self.kind} at T = {self.shape.length}"
        return TimingProcess(f"{__name__}:{self.kind}", _sizes(self.shape) | dict(self.more), threads, label)


def _cases(shape: BenchShape, against: str | None) -> dict[str, Case]:
    """Return the cases that a row of the table compares."""
    cases = {"ours": Case("layer", shape), "operator": Case("operator", shape)}
    if against and shape.length <= LONGEST_PEER:
        chunk = 1 if shape.length <= EXACT_LENGTH else shape.chunk_size
        cases["peer"] = Case("peer", shape, {"chunk": chunk})
    if shape.length > LONGEST_PEER:
        cases["base"] = Case("layer", replace(shape, length=BASE_LENGTH))
    return cases


def _row(
    cases: dict[str, Case], pairs: int, threads: int, matmul: float, progress: Progress
) -> dict[str, Any]:
    shape = cases["ours"].shape
    with ExitStack() as stack:

        def started(case: Case) -> TimingProcess:
            return stack.enter_context(case.start(threads))

        rounds = Interleaved({name: partial(started, case) for name, case in cases.items()})
        rounds.run(pairs, lambda message: progress(f"T = {shape.length}, {message}"))
    if failed := [reason for name, reason in rounds.failed.items() if name != "peer"]:
        raise TitansError(failed[0])
    row: dict[str, Any] = {"length": shape.length, "peer_failed": rounds.failed.get("peer")}
    row |= {name: _summary(cases[name], worker) for name, worker in rounds.runners.items()}
    work = flops(shape.pairs, shape.chunk_size)
    # what the backward computes again is not counted
    least = shape.heads * (work["forward"] + work["backward"] - work["again"])
    share = row["operator"]["tokens_per_second"] * least / matmul
    row["operator"] |= {"matmul_gflops": matmul / 1e9, "share_of_matmul": share}
    for other in row.keys() & {"peer", "base"}:
        row[f"times_{other}"] = _ratio(row["ours"], row[other])
    return row


def _summary(case: Case, worker: TimingProcess) -> dict[str, Any]:
    speeds = [case.shape.batch * case.shape.length / seconds for seconds in worker.samples.steps]
    summary = {"tokens_per_second": median(speeds), "samples": speeds, "peak_mb": worker.peak_bytes / 2**20}
    return summary | ({"chunk_size": case.more["chunk"]} if case.kind == "peer" else {})


def _ratio(ours: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Median, least and most of the ratios of samples of one round."""
    ratios = [a / b for a, b in zip(ours["samples"], other["samples"], strict=True)]
    return {"median": median(ratios), "least": min(ratios), "most": max(ratios)}


def _lengths(ctx: click.Context, parameter: click.Parameter, value: str | None) -> list[int] | None:
    if value is None:
        return None
    try:
        lengths = [int(part) for part in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of numbers such as 1024,4096") from None
    if min(lengths) < 1:
        raise click.BadParameter(f"{min(lengths)} tokens cannot be timed; give at least 1")
    return lengths


@click.command()
@click.option("--against", metavar="PEER", help="Also time another implementation: titans-pytorch.")
@click.option(
    "--lengths", callback=_lengths, help="Tokens of a sequence, comma-separated  [256,1024,4096,16384]"
)
@click.option(
    "--pairs", type=click.IntRange(1), default=5, show_default=True, help="Rounds, subjects interleaved."
)
@click.option("--threads", type=click.IntRange(1), help="Threads of torch  [all cores]")
@click.option("--quick", is_flag=True, help="A tiny memory at two short lengths: does it run?")
@json_option
def memory(
    against: str | None,
    lengths: list[int] | None,
    pairs: int,
    threads: int | None,
    quick: bool,
    as_json: bool,
) -> None:
    """Time the memory layer's forward and backward pass on the CPU.

    The operator is checked against its reference first; one that is wrong is not timed (exit 1).

    \b
    Example:
      titans bench memory --against titans-pytorch
    """
    lengths = lengths or ([32, 64] if quick else [256, 1024, 4096, 16384])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with Console(stderr=True).status("starting") as status:
        shape = QUICK if quick else SHAPE
        result = run(lengths, pairs, threads or cores, shape=shape, against=against, progress=status.update)
    if as_json:
        echo_json(result)
    else:
        click.echo("\n".join(lines_of(result)))


HEADINGS = ("T", "tokens/s", "peer", "ratio", "peak MB", "peer MB", "op/matmul")
_LINE = "{:>7} {:>10} {:>10} {:>20} {:>8} {:>8} {:>9}"


def lines_of(result: dict[str, Any]) -> list[str]:
    """Return the table of ``run`` as text of 80 columns, with a guide to it."""
    shape, peer, rows = result["shape"], result["peer"], result["rows"]
    lines = [
        f"Memory layer, forward and backward: B = {shape['batch']}, {shape['heads']} heads of "
        f"{shape['head_dim']}, depth {shape['depth']}, hidden {shape['hidden']}, "
        f"chunk {shape['chunk_size']}; float32, threads: {shape['threads']}, median of {shape['pairs']}.",
        _LINE.format(*HEADINGS),
    ]
    lines += [_LINE.format(*_columns(row)) for row in rows]
    lines.append(
        "op/matmul: the operator's matrix products over the machine's rate "
        f"({result['machine']['ceilings']['matmul_of']})."
    )
    if peer:
        lines.append(f"peer: {peer['name']} {peer['version']}, its batch_size {shape['chunk_size']}.")
    for row in rows:
        if "peer" in row:
            chunk = row["peer"]["chunk_size"]
            equals = "what we compute" if chunk == 1 else "reads and writes once a chunk"
            lines.append(f"  T = {row['length']}: its chunk_size {chunk}, {equals}.")
        elif row["peer_failed"]:
            lines.append(f"  {row['peer_failed']}.")
    if any("base" in row for row in rows):
        lines.append(f"* over our own speed at T = {shape['base_length']}.")
    return [part for line in lines for part in (textwrap.wrap(line, 80) if len(line) > 80 else [line])]


def _columns(row: dict[str, Any]) -> list[str]:
    ours, peer = row["ours"], row.get("peer")
    return [
        f"{row['length']}",
        f"{ours['tokens_per_second']:,.0f}",
        f"{peer['tokens_per_second']:,.0f}" if peer else "failed" if row["peer_failed"] else "",
        _ratio_text(row),
        f"{ours['peak_mb']:,.0f}",
        f"{peer['peak_mb']:,.0f}" if peer else "",
        f"{row['operator']['share_of_matmul']:.0%}",
    ]


def _ratio_text(row: dict[str, Any]) -> str:
    for name, mark in (("times_peer", ""), ("times_base", "*")):
        if name in row:
            r = row[name]
            digits = 0 if r["median"] >= 10 else 2
            span = f"({r['least']:.{digits}f}-{r['most']:.{digits}f})"
            return f"{r['median']:.{digits}f}x{mark} {span}"
    return ""
