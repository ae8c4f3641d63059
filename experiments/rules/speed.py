"""Each rule of the memory beside the paper's: its form and its speed on a CPU.

A new rule in `experiments.rules.names` gets a row by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.rules.names import RULES
from titans_kernels import Extension, Rule, find_rule, forms_used, neural_memory

ONE_TOKEN = ("gated_delta", "mdn", "delta_ttt")
"""Rules that are published with chunks of one token."""


class Case(NamedTuple):
    """A memory to measure, beside the paper's rule with as many layers and as large chunks."""

    name: str
    rule: Rule
    depth: int
    chunk_size: int

    def call(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the tokens' reads."""
        q, k, v, alpha, eta, theta, gates, *weights = tensors
        extension = Extension(rule=self.rule, gates=gates)
        y, _ = neural_memory(
            q, k, v, alpha, eta, theta, tuple(weights), chunk_size=self.chunk_size, extension=extension
        )
        return y

    def inputs(self, batch: int, length: int, heads: int, width: int) -> list[Tensor]:
        """Random leaves: q, k, v, alpha, eta, theta, the rule's own gates and weights."""
        generator = torch.Generator().manual_seed(0)
        normal = lambda *s: torch.randn(*s, generator=generator)  # noqa: E731
        gate = lambda *s: torch.rand(batch, length, heads, *s, generator=generator)  # noqa: E731
        q, k, v = (F.normalize(normal(batch, length, heads, width), dim=-1) for _ in range(3))
        shapes = [(heads, *pair) for pair in pairwise([width] * (self.depth + 1))]
        weights = [normal(*s).softmax(-2) for s in shapes]
        # steps as small as a chunk of 64 tokens needs
        gates = 0.05 * gate(), 0.5 * gate(), 0.02 * gate(), gate(self.rule.extra_gates)
        return [x.requires_grad_() for x in (q, k, v, *gates, *weights)]


def cases(names: Sequence[str] = ()) -> list[Case]:
    """Return a case for every rule, the paper's first, at every depth and chunk size of the others."""
    others = []
    for name, path in RULES.items():
        if name != "paper" and (not names or name in names):
            deep = name not in ONE_TOKEN or name == "delta_ttt"
            others.append(Case(name, find_rule(path), 1 + deep, 1 if name in ONE_TOKEN else 64))
    sizes = sorted({(case.depth, case.chunk_size) for case in others} | {(2, 64)})
    return [*(Case("paper", Rule(), *size) for size in sizes), *others]


def run(
    names: Sequence[str], rounds: int, batch: int, length: int, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Measure each case; forward and backward of all take turns, in seconds of CPU on this thread."""
    chosen, rows = cases(names), []
    all_inputs, seconds = [case.inputs(batch, length, 4, 64) for case in chosen], [[] for _ in chosen]
    for i in range(rounds + 1):
        for case, inputs, times in zip(chosen, all_inputs, seconds, strict=True):
            progress(f"round {i} of {rounds}: {case.name}")
            forms_used(forget=True)
            start = time.process_time()
            torch.autograd.grad(case.call(inputs).sum(), inputs, allow_unused=True)
            times.append(time.process_time() - start)
            form = next(x for x in forms_used() if x.startswith("neural_memory: ")).split()[1]
            if i == 0:
                rows.append({"rule": case.name, "depth": case.depth, "chunk": case.chunk_size, "form": form})
    speeds = [batch * length / median(times[1:]) for times in seconds]  # the first one warms up
    base = {
        (c.depth, c.chunk_size): speed for c, speed in zip(chosen, speeds, strict=True) if c.name == "paper"
    }
    for row, case, speed in zip(rows, chosen, speeds, strict=True):
        row |= {"tokens_per_second": speed, "to_paper": speed / base[case.depth, case.chunk_size]}
    return rows


def lines_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a Markdown table."""
    lines = [
        "| rule | depth | chunk | form | tokens a second | to the paper's |",
        "|---|--:|--:|---|--:|--:|",
    ]
    for r in rows:
        speed = f"{r['tokens_per_second']:,.0f} | {r['to_paper']:.{2 if r['to_paper'] > 0.01 else 3}f}"
        lines.append(f"| {r['rule']} | {r['depth']} | {r['chunk']} | {r['form']} | {speed} |")
    return lines


@click.command()
@click.option("--rule", "names", multiple=True, type=click.Choice(list(RULES)), help="Only this; repeatable.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="All take turns.")
@click.option("--batch", type=click.IntRange(1), default=4, show_default=True, help="Rows.")
@click.option("--length", type=click.IntRange(1), default=1024, show_default=True, help="Tokens of a row.")
def rules(names: tuple[str, ...], rounds: int, batch: int, length: int) -> None:
    """Compare the rules of the memory: form and speed.

    Forward and backward of 4 heads of width 64, in float32, on one thread. The
    last column is the speed relative to the paper's rule with as many layers
    and as large chunks.

    \b
    Example:
      python -m experiments.rules.speed --rule mdn --rule delta_ttt
    """
    torch.set_num_threads(1)
    rows = run(names, rounds, batch, length, lambda message: click.echo(message, err=True))
    click.echo("\n".join(lines_of(rows)))


if __name__ == "__main__":
    rules()
