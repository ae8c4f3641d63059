"""`titans bench`: speed and space, measured."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import click

from titans_platform.cli import LazyGroup, echo_json, json_option, set_option

# with torch, which takes seconds to import
KERNELS = ("titans_kernels.bench.command", "kernels", "Time the memory's kernels beside others, on a GPU.")


@click.group(cls=LazyGroup, lazy={"kernels": KERNELS})
def bench() -> None:
    """Measure the speed and memory of the neural memory, alone or beside other implementations."""


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
    import os

    from rich.console import Console

    from titans_platform import benchmarks

    lengths = lengths or ([32, 64] if quick else [256, 1024, 4096, 16384])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with Console(stderr=True).status("starting") as status:
        shape = benchmarks.QUICK if quick else benchmarks.SHAPE
        result = benchmarks.run(
            lengths, pairs, threads or cores, shape=shape, against=against, progress=status.update
        )
    if as_json:
        echo_json(result)
    else:
        click.echo("\n".join(lines_of(result)))


@bench.command()
@click.argument("study", default="ablation")
@click.option("--scale", default="laptop", show_default=True, help="Size of the study.")
@click.option("--rows", multiple=True, metavar="NAME", help="Only this row. May be repeated.")
@click.option(
    "--against", type=click.Path(path_type=Path), metavar="CHECKOUT",
    help="Also time the code of another checkout of this project, in turns.",
)  # fmt: skip
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Times each is timed.")
@click.option("--steps", type=click.IntRange(1), default=4, show_default=True, help="Steps of a round.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Threads of torch.")
@set_option
@json_option
def step(study: str, overrides: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Time a training step of every row of a study: forward, backward, optimiser.

    Rows are random tokens, a document each. Tokens a second are those of CPU time, which other work on the
    machine changes less than the clock's. Beside another checkout a row must have the same losses in both:
    one that has not is not timed (exit 1), or is marked where a field of its config is new. To have an
    earlier commit beside this one: git worktree add ../before COMMIT.

    \b
    Example:
      titans bench step ablation --scale laptop --against ../before
    """
    from rich.console import Console

    from titans_platform import step_benchmark

    with Console(stderr=True).status("starting") as status:
        result = step_benchmark.run(study, overrides=overrides, progress=status.update, **options)
    if as_json:
        echo_json(result)
    else:
        click.echo("\n".join(lines_of_steps(result)))
    if any("refused" in row for row in result["rows"]):
        raise click.exceptions.Exit(1)


@bench.command()
@click.option(
    "--gigabytes", type=click.FloatRange(0.05), default=1.0, show_default=True, help="Data to write."
)
@click.option("--lengths", callback=_lengths, default="4096,64", show_default=True, help="Tokens of a row.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Times each is timed.")
@click.option("--shards", type=click.IntRange(1), default=10_000, show_default=True, help="Shards to open.")
@click.option(
    "--folder", type=click.Path(file_okay=False, exists=True, path_type=Path), help="Disk to write to  [/tmp]"
)
@json_option
def data(as_json: bool, **options: Any) -> None:
    """Time reading prepared tokens, beside the iterable of `datasets` over the same Arrow files.

    Ours gives batches of training: mixed rows as int64 tensors, with document starts and targets; that of
    datasets gives its files from end to end, as arrays of a row's tokens. One core, CPU time.

    \b
    Example:
      titans bench data --gigabytes 10
    """
    from rich.console import Console

    from titans_platform import data_benchmark

    with Console(stderr=True).status("starting") as status:
        result = data_benchmark.run(**options, progress=status.update)
    if as_json:
        echo_json(result)
    else:
        click.echo("\n".join(lines_of_data(result)))


def lines_of_data(result: dict[str, Any]) -> list[str]:
    """The table of ``data_benchmark.run`` as text of 80 columns."""
    lines = [
        f"Reading {result['shards']} shards; one core, median of {result['rounds']}.",
        f"{'T':>7} {'tokens/s':>14} {'datasets':>14} {'ratio':>20}",
    ]
    for row in result["rows"]:
        r = row["times"]
        ratio = f"{r['median']:.1f}x ({r['least']:.1f}-{r['most']:.1f})"
        lines.append(f"{row['length']:>7} {row['ours']:>14,.0f} {row['datasets']:>14,.0f} {ratio:>20}")
    return [
        *lines,
        f"Every row once, {result['tokens']:,} tokens: {result['epoch_rate']:,.0f} tokens/s, memory grew by",
        f"{result['grown_mb']:.0f} MB; {result['mapped_mb']:,.0f} MB of files mapped at most.",
        f"Opening {result['opened_shards']:,} shards to the first batch: {result['open_seconds']:.2f} s.",
    ]


_STEP = "{:<24} {:>9} {:>8} {:>10} {:>8} {:>18}"


def lines_of_steps(result: dict[str, Any]) -> list[str]:
    """The table of ``step_benchmark.run`` as text of 80 columns."""
    lines = [
        f"Training steps of {result['study']} at {result['scale']}; threads: {result['threads']}, "
        f"median of {result['rounds']}.",
        _STEP.format("row", "tokens/s", "CPU ms", "clock ms", "before", "ratio").rstrip(),
    ]
    for row in result["rows"]:
        if "refused" in row:
            lines.append(f"{row['row'][:24]:<24} not timed: {row['refused']}")
            continue
        before, ratio, ours = "", "", row["ours"]
        if "theirs" in row:
            r = row["times"]
            before = f"{row['theirs']['cpu_ms']:.1f}"
            mark = "" if row["same_losses"] else "*"
            ratio = f"{r['median']:.2f}x{mark} ({r['least']:.2f}-{r['most']:.2f})"
        lines.append(
            _STEP.format(
                row["row"][:24], f"{ours['tokens_per_second']:,.0f}", f"{ours['cpu_ms']:.1f}",
                f"{ours['wall_ms']:.1f}", before, ratio,
            ).rstrip()
        )  # fmt: skip
    if result["against"]:
        lines.append(f"before: CPU ms of {result['against']}; ratio: before over now.")
    if any(not row.get("same_losses", True) for row in result["rows"]):
        lines.append("* other losses in that checkout, whose config lacks a field: another model.")
    return lines


HEADINGS = ("T", "tokens/s", "peer", "ratio", "peak MB", "peer MB", "op/matmul")
_LINE = "{:>7} {:>10} {:>10} {:>20} {:>8} {:>8} {:>9}"


def lines_of(result: dict[str, Any]) -> list[str]:
    """The table of ``benchmarks.run`` as text of 80 columns, with how to read it."""
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
            what = "what we compute" if chunk == 1 else "reads and writes once a chunk"
            lines.append(f"  T = {row['length']}: its chunk_size {chunk}, {what}.")
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
        _ratio(row),
        f"{ours['peak_mb']:,.0f}",
        f"{peer['peak_mb']:,.0f}" if peer else "",
        f"{row['operator']['share_of_matmul']:.0%}",
    ]


def _ratio(row: dict[str, Any]) -> str:
    for name, mark in (("times_peer", ""), ("times_base", "*")):
        if name in row:
            r = row[name]
            digits = 0 if r["median"] >= 10 else 2
            span = f"({r['least']:.{digits}f}-{r['most']:.{digits}f})"
            return f"{r['median']:.{digits}f}x{mark} {span}"
    return ""
