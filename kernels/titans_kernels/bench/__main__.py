"""`python -m titans_kernels.bench`, or `titans bench kernels`; needs torch, Triton, numpy and click."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

try:
    import click
except ImportError:
    sys.exit("error: the benchmark needs the package click: pip install click")
import torch

from titans_kernels.bench.machine import describe
from titans_kernels.bench.peers import PEERS
from titans_kernels.bench.run import Bench, failures
from titans_kernels.bench.shapes import SHAPES, BenchShape, chosen
from titans_kernels.bench.subjects import TimedForm, registered
from titans_kernels.bench.support import table

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ON_CPU = ("triton", "online", "chunked")
"""Subjects timed, or listed as left out, by default without a GPU."""
REPEATS = {"cuda": 30, "cpu": 5}


@click.command()
@click.option("--shape", "names", multiple=True, metavar="NAME", help="A shape of --list; repeatable  [all]")
@click.option(
    "--backend",
    "backends",
    multiple=True,
    metavar="NAME",
    help="What of --list to time; repeatable  [all; on a CPU triton, online and chunked]",
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
@click.option("--support", is_flag=True, help="Show which kernels compute which memory, in Markdown.")
@click.option(
    "--aot", is_flag=True, help="Compile them for every GPU without one, and show registers; minutes."
)
@click.option("--predict", is_flag=True, help="Predict a step on an H100 from compiled kernels; minutes.")
def kernels(
    names: tuple[str, ...], backends: tuple[str, ...], dtypes: tuple[str, ...], repeats: int | None,
    small: bool, check: bool, path: Path | None, commit: str | None, listing: bool, support: bool,
    aot: bool,
    predict: bool,
) -> int:  # fmt: skip
    """Time the neural memory's kernels, forward and backward, beside others.

    Each op is checked against the token-by-token recurrence first; one that is wrong is not timed (exit 1).
    Without a GPU the shapes are small, and of kernels in Triton's interpreter only the result is checked.

    \b
    Example:
      titans bench kernels --shape l1-d128 --json l1.json
    """
    if support:
        click.echo("\n".join(table()))
        return 0
    if aot:
        from titans_kernels.bench import aot as ahead  # imports the compiler

        ahead.show(ahead.reports(chosen(_known("--shape", names, list(SHAPES))), ["bf16"], ahead.TARGETS))
        return 0
    if predict:
        from titans_kernels.bench import predict as prediction  # imports the compiler

        for line in prediction.lines():
            click.echo(line)
        return 0
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
    report = BenchReport(describe(device, commit), path, timed=not check, judged=on_gpu and not small)
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


class BenchReport:
    """Prints results and writes them to the JSON file as they arrive."""

    def __init__(self, machine: dict[str, Any], path: Path | None, *, timed: bool, judged: bool):
        self.machine, self.path, self.timed, self.judged = machine, path, timed, judged
        self.runs: list[dict[str, Any]] = []
        self.failures: list[str] = []

    def take(self, bench: Bench, shapes: list[BenchShape]) -> None:
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


def _listing(subjects: dict[str, TimedForm]) -> list[str]:
    lines = ["shapes:"]
    for shape in SHAPES.values():
        lines += wrapped(f"  {shape.name:<17} {shape}", indent=20)
        lines += [f"  {'':<17}   {target}" for target in shape.targets]
    lines.append("backends:")
    for subject in subjects.values():
        lines += wrapped(f"  {subject.name:<17} {subject.note}", indent=20)
    return lines


WIDTH = 80
_LINE = "{:<17} {:<8} {:>9} {:>14} {:>7} {:>6} {:>6} {:>6}"
HEAD = _LINE.format("what", "pass", "ns", "least-most", "TFLOP/s", "matmul", "copy", "times")


def heading(machine: dict[str, Any], ceilings: dict[str, Any]) -> list[str]:
    """Return lines that name the machine and explain the tables."""
    card = machine["device"]
    if "multiprocessors" in machine:
        card += f" ({machine['multiprocessors']} SMs, driver {machine['driver']}, CUDA {machine['cuda']})"
    lines = [f"{card}; torch {machine['torch']}, Triton {machine['triton']}"]
    if ceilings:
        lines += wrapped(
            f"measured here: {ceilings['matmul'] / 1e12:.4g} TFLOP/s of matmul ({ceilings['matmul_of']}), "
            f"{ceilings['copy'] / 1e9:.4g} GB/s of copy"
        )
        lines += wrapped(
            "ns: median, a token and head; matmul, copy: share of these rates; times: the first row's time"
        )
    return lines


def lines_of(result: dict[str, Any], timed: bool, judged: bool) -> list[str]:
    """Return the table of one shape; ``judged`` (on a GPU) adds its targets."""
    lines = ["", *wrapped(f"{result['shape']}: {result['is']}; {result['dtype']}")]
    if timed:
        work = result["flops"]
        lines.append(
            f"kFLOP a token and head: forward {work['forward'] / 1e3:.0f}, "
            f"backward {work['backward'] / 1e3:.0f} ({work['again'] / 1e3:.0f} of it again)"
        )
        lines.append(HEAD)
    for row in result["rows"]:
        lines += _timed(row) if row["state"] == "timed" else _untimed(row)
    for target in result["targets"] if judged else []:
        lines += wrapped(f"target: {target['is']}: {target['verdict']}")
    return lines


def wrapped(text: str, indent: int = 2) -> list[str]:
    """Lines of 80 columns, all but the first indented."""
    return textwrap.wrap(text, WIDTH, subsequent_indent=" " * indent)


def _timed(row: dict[str, Any]) -> list[str]:
    lines = []
    for phase, name in (("forward", row["name"]), ("backward", "")):
        m = row[phase]
        rates = ["", "", ""]
        if "share_of_matmul" in m:
            shares = (m["share_of_matmul"], m["share_of_copy"])
            rates = [_number(m["flops_per_second"] / 1e12), *(f"{share:.1%}" for share in shares)]
        span = f"{_number(m['least'])}-{_number(m['most'])}"
        times = f"{_number(row['times_first'][phase])}x"
        lines.append(_LINE.format(name, phase, _number(m["ns"]), span, *rates, times))
    return lines + _graph(row)


def _graph(row: dict[str, Any]) -> list[str]:
    if row.get("graph"):
        graph, step = _number(row["graph"]["ns"]), _number(row["step"]["ns"])
        return [f"  both passes from a CUDA graph: {graph} ns, launched one by one {step}"]
    return wrapped(f"  no CUDA graph: {row['graph_why']}") if "graph_why" in row else []


def _untimed(row: dict[str, Any]) -> list[str]:
    says = "; ".join(check["says"] for check in row.get("checks", []))
    text = {
        "refused": f"{'other form' if row['name'] == 'triton' else 'left out'} ({row['why']})",
        "red": f"RED, not timed: {row['why']}",
        "failed": f"failed: {row['why']}",
        "green": f"right: {says}" + (f"; not timed ({row['why']})" if row["why"] else ""),
    }[row["state"]]
    return wrapped(f"{row['name']:<17} {text}", indent=18)


def _number(value: float) -> str:
    """Format a number with three digits, or all before the point; at most 7 characters below a million."""
    if value < 1e-3:
        return f"{value:.1e}"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def main() -> int:
    """Exit code: 0 success, 1 a check or an op failed, 2 bad usage, 130 interrupted."""
    try:
        return kernels.main(prog_name="python -m titans_kernels.bench", standalone_mode=False) or 0
    except click.Abort:
        click.echo("error: interrupted; finished shapes are in the --json file", err=True)
        return 130
    except click.ClickException as error:
        click.echo(f"error: {error.format_message()}", err=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
