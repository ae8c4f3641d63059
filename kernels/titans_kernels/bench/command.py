"""The command itself; nothing here or below it needs more than torch, Triton, numpy and click."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click
import torch

from titans_kernels.bench.machine import describe
from titans_kernels.bench.peers import PEERS
from titans_kernels.bench.run import Bench, failures
from titans_kernels.bench.shapes import SHAPES, chosen
from titans_kernels.bench.subjects import Subject, registered
from titans_kernels.bench.table import WIDTH, heading, lines_of, wrapped

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ON_CPU = ("triton", "chunked")
"""What is timed, or said to be left out, where nobody asked for anything and there is no GPU."""
REPEATS = {"cuda": 30, "cpu": 5}


@click.command()
@click.option("--shape", "names", multiple=True, metavar="NAME", help="A shape of --list; repeatable  [all]")
@click.option(
    "--backend",
    "backends",
    multiple=True,
    metavar="NAME",
    help="What of --list to time; repeatable  [all; on a CPU triton and chunked]",
)
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(list(DTYPES)),
    multiple=True,
    help="Of q, k and v; repeatable  [bfloat16; on a CPU float32]",
)
@click.option("--repeats", type=click.IntRange(1), help="Rounds, taken by turns  [30; on a CPU 5]")
@click.option("--check", is_flag=True, help="Check every op and time none.")
@click.option(
    "--json",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also write everything measured to FILE, after each shape.",
)
@click.option("--commit", metavar="ID", help="Of the code, for FILE, where it is no git checkout.")
@click.option("--list", "listing", is_flag=True, help="Show shapes, targets and what can be timed.")
def kernels(
    names: tuple[str, ...], backends: tuple[str, ...], dtypes: tuple[str, ...], repeats: int | None,
    check: bool, path: Path | None, commit: str | None, listing: bool,
) -> int:  # fmt: skip
    """Time the neural memory's kernels, forward and backward, beside others.

    Each op is checked against the token-by-token recurrence first; one that is wrong is not timed (exit 1).
    Without a GPU the shapes are small, and of kernels in Triton's interpreter only the result is checked.

    \b
    Example:
      titans bench kernels --shape l1-d128 --json l1.json
    """
    subjects = registered(PEERS)
    if listing:
        click.echo("\n".join(_listing(subjects)))
        return 0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    shapes = chosen(_known("--shape", names, list(SHAPES)))
    wanted = _known("--backend", backends, list(subjects)) or ([*subjects] if on_gpu else [*ON_CPU])
    _writable(path)
    machine, runs, bad = describe(device, commit), [], []
    for kind in dtypes or ("bfloat16" if on_gpu else "float32",):
        bench = Bench(
            [s for s in subjects.values() if s.name in wanted], DTYPES[kind], device,
            repeats=repeats or REPEATS[device.type], check_only=check, progress=_progress,
        )  # fmt: skip
        runs.append({"dtype": kind, "ceilings": bench.ceilings, "repeats": bench.repeats, "shapes": []})
        click.echo("\n".join(heading(machine, bench.ceilings)))
        for result in bench.run(shapes):
            runs[-1]["shapes"].append(result)
            bad += failures(result)
            _progress("")
            click.echo("\n".join(lines_of(result, timed=not check, judged=on_gpu)))
            if path:
                path.write_text(json.dumps({"machine": machine, "runs": runs}, indent=1) + "\n")
    for line in bad:
        click.echo(f"error: {line}", err=True)
    return 1 if bad else 0


def _progress(message: str) -> None:
    """What is being done, on the one line of a terminal; on nothing else."""
    if sys.stderr.isatty():
        click.echo(f"\r\033[K{message[: WIDTH - 1]}", err=True, nl=False)


def _known(option: str, names: tuple[str, ...], known: list[str]) -> list[str]:
    for name in names:
        if name not in known:
            raise click.UsageError(f"{option}: {name!r} is not known; there are {', '.join(known)}")
    return list(names)


def _writable(path: Path | None) -> None:
    """What takes minutes to measure is not lost for a folder that is not there."""
    if path and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise click.UsageError(f"--json: {path.parent} is no folder that can be written to")


def _listing(subjects: dict[str, Subject]) -> list[str]:
    lines = ["shapes:"]
    for shape in SHAPES.values():
        lines += wrapped(f"  {shape.name:<17} {shape}", indent=20)
        lines += [f"  {'':<17}   {target}" for target in shape.targets]
    lines.append("backends:")
    for subject in subjects.values():
        lines += wrapped(f"  {subject.name:<17} {subject.note}", indent=20)
    return lines
