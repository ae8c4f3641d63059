"""`titans bench`: speed and space, measured."""

from __future__ import annotations

import click

from titans_platform.cli import LazyGroup
from titans_platform.cli.options import echo_json, json_option

# with torch, which takes seconds to import
KERNELS = ("titans_kernels.bench.command", "kernels", "Time the memory's kernels beside others, on a GPU.")


@click.group(cls=LazyGroup, lazy={"kernels": KERNELS})
def bench() -> None:
    """Measure the memory's speed and space, alone or beside another's."""


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


@bench.command()
@click.option("--against", metavar="PEER", help="Also time another implementation: titans-pytorch.")
@click.option("--lengths", callback=_lengths, help="Tokens of a row, comma-separated  [256,1024,4096,16384]")
@click.option("--pairs", type=click.IntRange(1), default=5, show_default=True, help="Rounds, taken by turns.")
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
    import os

    from rich.console import Console

    from titans_platform.benchmarks import memory as benchmark
    from titans_platform.benchmarks.render import print_memory

    lengths = lengths or ([32, 64] if quick else [256, 1024, 4096, 16384])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with Console(stderr=True).status("starting") as status:
        result = benchmark.run(
            lengths,
            pairs,
            threads or cores,
            shape=benchmark.QUICK_SHAPE if quick else None,
            against=against,
            progress=status.update,
        )
    if as_json:
        echo_json(result)
    else:
        print_memory(result, Console())
