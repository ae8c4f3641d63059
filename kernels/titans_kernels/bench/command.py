"""The command; it depends only on torch, Triton, numpy and click."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click
import torch

from titans_kernels.bench.machine import describe
from titans_kernels.bench.peers import PEERS
from titans_kernels.bench.run import Bench, failures
from titans_kernels.bench.shapes import SHAPES, Shape, chosen
from titans_kernels.bench.subjects import Subject, registered
from titans_kernels.bench.table import WIDTH, heading, lines_of, wrapped

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ON_CPU = ("triton", "chunked")
"""What is timed, or listed as left out, by default where there is no GPU."""
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
@click.option("--repeats", type=click.IntRange(1), help="Rounds, subjects interleaved  [30; on a CPU 5]")
@click.option("--small", is_flag=True, help="Small sizes on a GPU too, as for a memory checker.")
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
    small: bool, check: bool, path: Path | None, commit: str | None, listing: bool,
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
    if small or not on_gpu:
        shapes = [shape.reduced() for shape in shapes]
    report = Report(describe(device, commit), path, timed=not check, judged=on_gpu and not small)
    for dtype in dtypes or ("bfloat16" if on_gpu else "float32",):
        bench = Bench(
            [subject for subject in subjects.values() if subject.name in wanted],
            DTYPES[dtype],
            device,
            repeats=repeats or REPEATS[device.type],
            check_only=check,
            progress=_progress,
        )
        report.take(bench, shapes)
    for line in report.failures:
        click.echo(f"error: {line}", err=True)
    return 1 if report.failures else 0


class Report:
    """Prints results and writes them to the JSON file as they arrive."""

    def __init__(self, machine: dict[str, Any], path: Path | None, *, timed: bool, judged: bool):
        self.machine, self.path, self.timed, self.judged = machine, path, timed, judged
        self.runs: list[dict[str, Any]] = []
        self.failures: list[str] = []

    def take(self, bench: Bench, shapes: list[Shape]) -> None:
        """Run the shapes; the file is complete after each."""
        results: list[dict[str, Any]] = []
        run = {"dtype": str(bench.dtype).removeprefix("torch."), "repeats": bench.repeats}
        self.runs.append(run | {"ceilings": bench.ceilings, "shapes": results})
        click.echo("\n".join(heading(self.machine, bench.ceilings)))
        for result in bench.run(shapes):
            results.append(result)
            self.failures += failures(result)
            _progress("")
            click.echo("\n".join(lines_of(result, timed=self.timed, judged=self.judged)))
            if self.path:
                self.path.write_text(
                    json.dumps({"machine": self.machine, "runs": self.runs}, indent=1) + "\n"
                )


def _progress(message: str) -> None:
    """Progress on one line of a terminal; silent otherwise."""
    if sys.stderr.isatty():
        click.echo(f"\r\033[K{message[: WIDTH - 1]}", err=True, nl=False)


def _known(option: str, names: tuple[str, ...], known: list[str]) -> list[str]:
    for name in names:
        if name not in known:
            raise click.UsageError(f"{option}: {name!r} is unknown; choose from {', '.join(known)}")
    return list(names)


def _writable(path: Path | None) -> None:
    """Fail before the measurement, not after it, if the file cannot be written."""
    if path and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise click.UsageError(f"--json: {path.parent} is not a writable folder")


def _listing(subjects: dict[str, Subject]) -> list[str]:
    lines = ["shapes:"]
    for shape in SHAPES.values():
        lines += wrapped(f"  {shape.name:<17} {shape}", indent=20)
        lines += [f"  {'':<17}   {target}" for target in shape.targets]
    lines.append("backends:")
    for subject in subjects.values():
        lines += wrapped(f"  {subject.name:<17} {subject.note}", indent=20)
    return lines
