"""`titans bench`: speed and space, measured."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import click

from titans_platform.cli import LazyGroup, echo_json, json_option, set_option
from titans_platform.errors import UsageError
from titans_platform.text import plural

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


@bench.command()
@click.option("--preset", default="laptop", show_default=True, help="Size of the models.")
@click.option(
    "--variants", default="lmm,mac,mag,mal,transformer", show_default=True, help="Variants, with commas."
)
@click.option(
    "--tokens", type=click.IntRange(1), default=2_000_000, show_default=True, help="Tokens to read."
)
@click.option(
    "--every", type=click.IntRange(1), default=100_000, show_default=True, help="Tokens between two looks."
)
@click.option(
    "--text", type=click.Path(path_type=Path), multiple=True, metavar="FILE",
    help="Text to read, again and again. May be repeated.  [random bytes]",
)  # fmt: skip
@click.option("--memory-gb", type=float, default=8, show_default=True, help="Memory at which one is left.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Threads of torch.")
@click.option(
    "--figure", type=click.Path(path_type=Path), metavar="FOLDER", help="Draw it there, as PNG and PDF."
)
@json_option
def stream(
    preset: str, variants: str, text: tuple[Path, ...], memory_gb: float, figure: Path | None, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Read a very long text: does speed or memory depend on how much was read?

    Each variant reads in a process of its own, with weights at their initial values. Times are those of the
    CPU; the first tokens are read again in turn with the last, so that a busy machine slows both. A variant
    that gets 20 times slower, or takes too much memory, is left where it is.

    \b
    Example:
      titans bench stream --tokens 2000000 --text book.txt --figure docs
    """
    from rich.console import Console

    from titans_core.presets import preset as sized
    from titans_platform import stream_benchmark

    try:
        models = {name: sized(preset, name, vocab_size=260) for name in variants.split(",")}
    except ValueError as error:
        raise UsageError(f"--{error}") from None
    with Console(stderr=True).status("starting") as status:
        found = stream_benchmark.run(
            models, text=text, memory=memory_gb * 2**30, progress=status.update, **options
        )
    drawn = stream_benchmark.picture(found, figure) if figure else None
    if as_json:
        echo_json(found)
        return
    click.echo("\n".join(lines_of_stream(found)))
    if drawn:
        click.echo(drawn)


def lines_of_stream(result: dict[str, Any]) -> list[str]:
    """The result of `titans bench stream`: each variant at its first look, at its last, and their ratio."""
    lines = [
        f"{result['tokens']:,} tokens read; the first {result['every']:,} and the last; "
        f"threads: {result['threads']}.",
        _STREAM.format("", "tokens/s", "last", "ratio", "MiB", "last", "ratio", "decode", "ratio"),
    ]
    for row in result["rows"]:
        if row["looks"]:
            first, last = row["looks"][0], row["looks"][-1]
            decode = next(iter(row["decode"].values()), None)
            cells = [
                f"{first['rate']:,.0f}", f"{last['rate']:,.0f}", _times(row["rate_ratio"]),
                f"{first['peak_bytes'] / 2**20:,.0f}", f"{last['peak_bytes'] / 2**20:,.0f}",
                _times(row["peak_ratio"]), f"{1e3 * decode:.2f} ms" if decode else "-",
                _times(row["decode_ratio"]),
            ]  # fmt: skip
            lines.append(_STREAM.format(row["row"], *cells))
        if row["ended"]:
            lines.append(f"  {row['row']} left {row['ended']}")
    return lines


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


_STREAM = "{:<12} {:>9} {:>8} {:>5} {:>6} {:>6} {:>5} {:>9} {:>5}"


@bench.command("run")
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--steps", type=click.IntRange(1), default=200, show_default=True, help="Steps to train.")
@click.option(
    "--every", type=click.IntRange(1), default=100, show_default=True, help="Steps between checkpoints."
)
@set_option
@json_option
def whole_run(config: Path, steps: int, every: int, overrides: tuple[str, ...], as_json: bool) -> None:
    """Time what a run of CONFIG adds to its steps: checkpoints, MLflow, Ray Train.

    The run is trained twice under a temporary folder, in a bare loop and as `titans train` does.

    \b
    Example:
      titans bench run run.yaml --steps 200
    """
    from rich.console import Console

    from titans_platform import run_benchmark
    from titans_platform.loading import load_config

    with Console(stderr=True).status("training twice"):
        found = run_benchmark.run(load_config(config, overrides), steps, every)
    if as_json:
        echo_json(found)
        return
    saved = plural(found["checkpoints"], "checkpoint")
    click.echo(f"{steps} steps and {saved}, clock times")
    click.echo(f"a step          {1e3 * found['step']:8.1f} ms, in a bare loop {1e3 * found['bare']:.1f} ms")
    click.echo(
        f"added a step    {1e3 * found['overhead']:8.1f} ms, {found['share']:.1%} of a step of one second"
    )
    click.echo(f"before the first{found['before']:8.1f} s, most of it imports")
    click.echo(f"after the last  {found['after']:8.1f} s, beside measuring")


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
