"""Error of fixed keys and values in a memory, without a model and without training.

Rules, depths, chunks and sizes of the memory on the pairs of `experiments.depth.pairs`, read back after
1, 2, 4 and 8 passes. Each memory writes with the step (and the scale of its hidden layers' start)
that is best for it on tuning problems; the errors are measured on other problems.
"""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import click
import torch
from matplotlib.axes import Axes
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from experiments.depth.pairs import KINDS, Pairs, generate, trained
from experiments.rules.delta_ttt import DeltaTTT
from experiments.rules.names import RULES
from titans_kernels import Extension, Residual, Rule, find_rule, neural_memory, read_memory
from titans_platform import cli
from titans_platform.cli import echo_json, json_option, root_option
from titans_platform.errors import UsageError
from titans_platform.report.picture import KINDS as COLOURS
from titans_platform.report.picture import LIGHT, MARKERS, Line, Picture, panel, save
from titans_platform.report.table import Difference

Progress = Callable[[str], None]
STEPS = tuple(2.0**i for i in range(-8, 1))
"""Candidates of theta. With keys of norm 1 a linear memory's full step is 0.5."""
GAINS = (1.0, 2.0, 4.0)
"""Candidates of the hidden weights' standard deviation at the start, times the root of their inputs."""
LAST = 0.1
"""The same of the last layer, as in `titans_core.init`."""
ROWS = 64
"""Most rows of a call: more do not fit a core's cache, and take longer each."""
TUNING_SEED = 1000
RUN = "trained"
"""The kind of pairs taken from a run."""
SETTINGS = (
    ("random", 32), ("random", 64), ("random", 128), ("clustered", 64), ("clustered", 128),
    ("low-rank", 64), ("low-rank", 128), ("teacher", 128), ("teacher", 256),
)  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """A memory to compare: its rule and its network, D wide with hidden layers of ``expansion * D``."""

    rule: str = "paper"
    depth: int = 1
    expansion: int = 1
    residual: bool = False
    """``x + f(x)`` in place of f."""
    last_only: bool = False
    """Only the last layer is written: a linear memory of the features that the layers below make of a key."""
    eta: float = 0.0
    """Momentum, the same for all pairs. There is no decay."""

    @property
    def made(self) -> Rule:
        """The rule, of a name in `experiments.rules.names` or an import path."""
        return find_rule(RULES.get(self.rule, self.rule))

    def start(self, N: int, D: int, seed: int) -> list[Tensor]:
        """Weights [N, 1, D_in, D_out] of each layer before the first pair, of the hidden ones with gain 1."""
        generator = torch.Generator().manual_seed(seed)
        widths = [D, *[self.expansion * D] * (self.depth - 1), D]
        shapes = [(N, 1, *pair) for pair in pairwise(widths)]
        layers = [torch.randn(shape, generator=generator) * shape[2] ** -0.5 for shape in shapes]
        return [*layers[:-1], LAST * layers[-1]]

    def state(self, D: int) -> int:
        """Return the number of weights that are written."""
        written = self.start(1, D, 0)[-1 if self.last_only else 0 :]
        return sum(W.numel() for W in written)

    @property
    def gains(self) -> tuple[float, ...]:
        """The candidates of the hidden layers' scale."""
        return GAINS if self.depth > 1 else (1.0,)


MEMORIES = {
    "linear": Memory(),
    "linear, momentum": Memory(eta=0.5),
    "linear, huber": Memory("huber"),
    "linear, yaad": Memory("yaad"),
    "depth 2": Memory(depth=2),
    "depth 2, hidden x2": Memory(depth=2, expansion=2),
    "depth 2, residual": Memory(depth=2, residual=True),
    "depth 3": Memory(depth=3),
    "depth 2, delta_ttt": Memory("delta_ttt", depth=2),
    "last layer, hidden x2": Memory(depth=2, expansion=2, last_only=True),
}
"""Memories compared by default; the first is the baseline. Without decay gated_delta is the paper's rule, and
mdn with its gate open is momentum."""


class Problem(NamedTuple):
    """Pairs of a setting: for tuning the steps, and for reporting errors."""

    kind: str
    tuning: Pairs
    reporting: Pairs


class Candidate(NamedTuple):
    """Hyperparameters to tune."""

    theta: float
    gain: float


def errors(
    memory: Memory,
    pairs: Pairs,
    candidates: Sequence[Candidate],
    passes: Sequence[int],
    chunk: int,
    seed: int,
) -> Tensor:
    """[2, passes, C, N]: squared error over variance, of stored and of held-out pairs (NaN without any).

    C candidates and N problems make one batch, [C * N, P, 1, D], or several. inf: a memory that diverged.
    """
    N, P, D = pairs.k.shape
    if (half := len(candidates) // 2) and len(candidates) * N > ROWS:
        parts = (candidates[:half], candidates[half:])
        return torch.cat([errors(memory, pairs, part, passes, chunk, seed) for part in parts], 2)
    C, rule = len(candidates), memory.made
    theta, gain = (torch.tensor(column).repeat_interleave(N) for column in zip(*candidates, strict=True))
    *hidden, last = (W.repeat(C, 1, 1, 1) for W in memory.start(N, D, seed))
    layers = [*(gain[:, None, None, None] * W for W in hidden), last]
    extension = Extension(Residual() if memory.residual else None, rule=rule)

    def features(k: Tensor) -> Tensor:
        x = k.repeat(C, 1, 1)
        for W in layers[:-1] if memory.last_only else ():
            x = F.silu(x @ W[:, 0])
        return x[:, :, None]

    def error(k: Tensor, v: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
        y = read_memory(features(k), weights, extension=extension)[:, :, 0]
        lost = (y - v.repeat(C, 1, 1)).square().sum((1, 2)).view(C, N) / v.square().sum((1, 2))
        return lost.nan_to_num(nan=torch.inf)

    weights, momentum = tuple(layers[-1:] if memory.last_only else layers), None
    k, v = features(pairs.k), pairs.v.repeat(C, 1, 1)[:, :, None]
    step = theta[:, None, None].expand(-1, P, 1).contiguous()
    alpha, eta = torch.zeros_like(step), torch.full_like(step, memory.eta)
    # a rule's own gates: the later layers' step where each has one, else open
    own = (2 * step).clamp(max=1) if isinstance(rule, DeltaTTT) else torch.ones_like(step)
    gates = own[..., None].expand(*step.shape, rule.extra_gates)
    extension = extension._replace(gates=gates)
    measured = torch.full((2, len(passes), C, N), torch.nan)
    with torch.no_grad():
        for number in range(1, max(passes) + 1):
            _, (weights, momentum) = neural_memory(
                k, k, v, alpha, eta, step, weights, momentum, chunk_size=chunk, extension=extension
            )
            if number in passes:
                at = list(passes).index(number)
                measured[0, at] = error(pairs.k, pairs.v, weights)
                if pairs.held_out:
                    measured[1, at] = error(pairs.held_out.k, pairs.held_out.v, weights)
    return measured


def fit(memory: Memory, problem: Problem, passes: Sequence[int], chunk: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of passes, at the candidate with the lowest error on tuning problems."""
    candidates = [Candidate(*pair) for pair in product(STEPS, memory.gains)]
    tuned = errors(memory, problem.tuning, candidates, passes, chunk, TUNING_SEED)[0].mean(-1)
    best = [candidates[i] for i in tuned.argmin(1).tolist()]
    chosen = list(dict.fromkeys(best))
    measured = errors(memory, problem.reporting, chosen, passes, chunk, 0)
    for at, (number, candidate) in enumerate(zip(passes, best, strict=True)):
        stored, held_out = measured[:, at, chosen.index(candidate)].tolist()
        yield {
            "kind": problem.kind, "pairs": problem.reporting.k.shape[1], "chunk": chunk, "passes": number,
            "theta": candidate.theta, "gain": candidate.gain,
            "at_edge": candidate.theta in (STEPS[0], STEPS[-1]), "stored": stored, "held_out": held_out,
        }  # fmt: skip


def run(
    memories: dict[str, Memory], settings: Sequence[tuple[str, int]] = SETTINGS, *,
    widths: Sequence[int] = (32,), chunks: Sequence[int] = (1, 16), passes: Sequence[int] = (1, 2, 4, 8),
    problems: int = 12, tuning: int = 4, run: str | None = None,
    root: Path = Path("titans-runs"), progress: Progress = lambda message: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Fit every memory at every setting, width, chunk and passes: a row each, with every problem's error.

    Raises:
        UsageError: the pairs of a run cannot be had (`experiments.depth.pairs.trained`).
    """
    rows: list[dict[str, Any]] = []
    for (kind, count), width in product(settings, widths):
        if kind == RUN:
            assert run is not None
            both = trained(run, tuning + problems, count, root, seed=0)
            problem = Problem(kind, both.take(slice(tuning)), both.take(slice(tuning, None)))
        else:
            parts = (
                generate(kind, N, count, width, seed) for N, seed in ((tuning, TUNING_SEED), (problems, 0))
            )
            problem = Problem(kind, *parts)
        for chunk, (name, memory) in product(chunks, memories.items()):
            if chunk > 1 and isinstance(memory.made, DeltaTTT):
                continue  # takes every token for a chunk of its own
            progress(f"{kind}, {count} pairs, width {width}, chunk {chunk}: {name}")
            D = problem.tuning.k.shape[-1]
            about = {"memory": name, "rule": memory.rule, "depth": memory.depth, "width": D}
            about["state"] = memory.state(D)
            rows += [about | row for row in fit(memory, problem, passes, chunk)]
    return rows


def lower(rows: Sequence[dict[str, Any]], baseline: str) -> dict[tuple[str, int, int], tuple[int, ...]]:
    """Count the settings in which the baseline, the memory or neither is lower, by memory, chunk and passes.

    Resolved: Student's 95% interval of the paired difference of stored errors over problems excludes 0; there
    is no correction for many comparisons.
    """
    at = lambda row: (row["kind"], row["pairs"], row["width"], row["chunk"], row["passes"])  # noqa: E731
    base = {at(row): row["stored"] for row in rows if row["memory"] == baseline}
    counts: dict[tuple[str, int, int], list[int]] = {}
    for row in rows:
        if row["memory"] == baseline:
            continue
        count = counts.setdefault((row["memory"], row["chunk"], row["passes"]), [0, 0, 0])
        pairs = zip(row["stored"], base[at(row)], strict=True)
        interval = Difference(tuple(a - b for a, b in pairs)).interval or (-1.0, 1.0)
        count[0 if interval[0] > 0 else 1 if interval[1] < 0 else 2] += 1
    return {key: tuple(count) for key, count in counts.items()}


def lines_of(rows: Sequence[dict[str, Any]], baseline: str) -> list[str]:
    """Return the tables of `run` as text of 80 columns, and the count of settings below them."""
    passes = sorted({row["passes"] for row in rows})
    shape = "{:<22} {:>6}" + " {:>10}" * len(passes) + " {:>8}"
    lines = ["Squared error over variance of stored pairs after so many passes, mean and sd over"]
    lines.append(
        f"{len(rows[0]['stored'])} problems; and of held-out pairs after the first. Each at its own step."
    )
    tables: dict[tuple[Any, ...], dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        table = tables.setdefault((row["kind"], row["pairs"], row["width"], row["chunk"]), {})
        table.setdefault(row["memory"], []).append(row)
    several = len({width for _, _, width, _ in tables}) > 1
    for (kind, count, width, chunk), table in tables.items():
        title = f"{kind} {count}, b {chunk}" + (f", D {width}" if several else "")
        lines += ["", shape.format(title, "state", *passes, "held out")]
        for name, records in table.items():
            cells = [_cell(row["stored"]) for row in records]
            held_out = fmean(records[0]["held_out"])
            lines.append(
                shape.format(
                    name,
                    f"{records[0]['state']:,}",
                    *cells,
                    "" if held_out != held_out else f"{held_out:.2f}",
                )
            )
    settings = {(kind, count, width) for kind, count, width, _ in tables}
    lines += [
        "",
        f"Settings of {len(settings)} in which {baseline} / the other / neither has the lower error,",
    ]
    lines.append("resolved over problems (paired, 95%), after so many passes:")
    counted = lower(rows, baseline)
    for name, chunk in dict.fromkeys((name, chunk) for name, chunk, _ in counted):
        cells = ["/".join(map(str, counted[name, chunk, number])) for number in passes]
        lines.append(shape.format(f"{name}", f"b {chunk}", *cells, "").rstrip())
    if edges := sum(row["at_edge"] for row in rows):
        lines.append(f"{edges} of {len(rows)} steps are the smallest or largest candidate.")
    return lines


def _cell(values: Sequence[float]) -> str:
    x = torch.tensor(values, dtype=torch.float64)
    return f"{x.mean():.3f} {x.std() if len(x) > 1 else 0:.3f}".replace(" 0.", " .")


def write_csv(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write one line a row, with mean and standard deviation over problems."""
    with path.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        names = [name for name in rows[0] if name not in ("stored", "held_out")]
        out.writerow([*names, "problems", "stored", "stored_sd", "held_out", "held_out_sd"])
        for row in rows:
            x = torch.tensor([row["stored"], row["held_out"]], dtype=torch.float64)
            spread = x.std(1) if x.shape[1] > 1 else torch.zeros(2)
            cells = [f"{value:.4f}" for pair in zip(x.mean(1), spread, strict=True) for value in pair]
            out.writerow([*(row[name] for name in names), x.shape[1], *cells])


def picture(rows: Sequence[dict[str, Any]], folder: Path) -> Path:
    """Draw the error of stored pairs against passes at the smallest chunk; the PNG, a PDF lies beside it."""
    chunk = min(row["chunk"] for row in rows)
    shown = [row for row in rows if row["chunk"] == chunk]
    names = list(dict.fromkeys(row["memory"] for row in shown))
    marks = [m for m in MARKERS for _ in COLOURS]
    lines = {n: Line(n, {}, c, m) for n, c, m in zip(names, COLOURS * len(MARKERS), marks, strict=False)}

    def draw(axis: Axes, records: Sequence[dict[str, Any]]) -> None:
        for name, line in lines.items():
            x, y = zip(
                *((row["passes"], fmean(row["stored"])) for row in records if row["memory"] == name),
                strict=True,
            )
            axis.plot(x, y, f"{line.marker}-", color=LIGHT[line.colour], markersize=2.5, linewidth=1)
        axis.set_xscale("log", base=2)

    settings = dict.fromkeys((row["kind"], row["pairs"], row["width"]) for row in shown)
    panels = [
        panel(
            f"{setting[0]}, {setting[1]} pairs", draw, "passes",
            records=[row for row in shown if (row["kind"], row["pairs"], row["width"]) == setting],
        )
        for setting in settings
    ]  # fmt: skip
    caption = f"Squared error over variance of stored pairs, chunks of {chunk}."
    return save(Picture("fit", "Fixed pairs", caption, panels, legend=list(lines.values())), folder)[0]


def _memories(ctx: click.Context, parameter: click.Parameter, names: tuple[str, ...]) -> dict[str, Memory]:
    """Return the baseline and the named ones: keys of `MEMORIES`, or RULE/DEPTH."""
    chosen = {"linear": MEMORIES["linear"]} if names else dict(MEMORIES)
    for name in names:
        rule, slash, depth = name.rpartition("/")
        if name not in MEMORIES and not (slash and depth.isdecimal() and int(depth)):
            known = ", ".join(repr(name) for name in MEMORIES)
            raise click.BadParameter(f"{name!r} is not one of {known}, and not RULE/DEPTH, such as huber/2")
        chosen[name] = MEMORIES.get(name) or Memory(rule, int(depth))
        try:
            _ = chosen[name].made
        except ValueError as error:
            raise click.BadParameter(str(error)) from None
    return chosen


@click.command()
@click.option(
    "--memory", "memories", multiple=True, callback=_memories, metavar="NAME",
    help="Compare this one with linear; may be repeated: "
    f"{', '.join(map(repr, MEMORIES))}, or RULE/DEPTH with a rule of {', '.join(RULES)} or module:Class  "
    "[all that are listed]",
)  # fmt: skip
@click.option(
    "--kind", "kinds", multiple=True, type=click.Choice([*KINDS, RUN]), help="Of pairs; repeatable  [all]"
)
@click.option("--pairs", "counts", multiple=True, type=click.IntRange(1), help="Number of pairs; repeatable.")
@click.option(
    "--width",
    "widths",
    multiple=True,
    type=click.IntRange(2),
    default=(32,),
    show_default=True,
    help="Of keys, values and hidden layers; repeatable.",
)
@click.option(
    "--chunk",
    "chunks",
    multiple=True,
    type=click.IntRange(1),
    default=(1, 16),
    show_default=True,
    help="Tokens of a chunk; repeatable.",
)
@click.option(
    "--passes",
    multiple=True,
    type=click.IntRange(1),
    default=(1, 2, 4, 8),
    show_default=True,
    help="Read back after so many; repeatable.",
)
@click.option("--problems", type=click.IntRange(2), default=12, show_default=True, help="To report.")
@click.option("--tuning", type=click.IntRange(1), default=4, show_default=True, help="Problems to tune on.")
@click.option("--run", "source", metavar="RUN", help="Also take pairs from this run's first memory.")
@click.option(
    "--threads", type=click.IntRange(1), default=1, show_default=True,
    help="Threads of torch; products this small gain nothing from a second.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
    help="Write table.csv, fit.png and fit.pdf there.",
)  # fmt: skip
@root_option
@json_option
def command(
    memories: dict[str, Memory], kinds: tuple[str, ...], counts: tuple[int, ...], source: str | None,
    threads: int, out: Path | None, root: Path, as_json: bool, **sizes: Any,
) -> None:  # fmt: skip
    """Fit fixed keys and values: which memory has the lower error, after how many passes?

    No model is trained. A memory writes all pairs of a problem, once or several times, and is read back; its
    step is tuned on other problems of the same kind. The kinds: random pairs, clustered ones, keys of low
    rank with non-linear values, values from a teacher network, and pairs that a trained run writes (--run).

    \b
    Example:
      python -m experiments.depth.fit --out fit
      python -m experiments.depth.fit --memory huber/2 --memory "depth 3" --kind teacher --pairs 512
    """
    began = time.process_time()
    torch.set_num_threads(threads)
    settings = [pair for pair in SETTINGS if not kinds or pair[0] in kinds]
    if source and (not kinds or RUN in kinds):
        settings.append((RUN, 32))
    elif RUN in kinds:
        raise UsageError(f"--kind: {RUN} needs --run, the run to take the pairs from")
    if counts:
        settings = [(kind, count) for kind in dict.fromkeys(kind for kind, _ in settings) for count in counts]
    with Console(stderr=True).status("starting") as status:
        rows = run(memories, settings, run=source, root=root, progress=status.update, **sizes)
    if out:
        out.mkdir(parents=True, exist_ok=True)
        write_csv(rows, out / "table.csv")
        picture(rows, out)
    if as_json:
        echo_json(rows)
        return
    click.echo("\n".join(lines_of(rows, "linear")))
    if not source:
        click.echo("Pairs from a trained run are left out: give --run.")
    click.echo(f"{time.process_time() - began:.0f} CPU seconds." + (f" {out}" if out else ""))


if __name__ == "__main__":
    sys.exit(cli.run(sys.argv[1:], command))
