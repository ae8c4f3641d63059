"""Each rule of the memory beside the paper's: its form, its error and its speed on a CPU.

A new rule in `titans_kernels.RULES` gets a row by itself.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor
from torch.nn import functional as F

from titans_kernels import (
    RULES,
    MemoryState,
    OutputActivation,
    Residual,
    Rule,
    find_rule,
    forms_used,
    neural_memory,
)
from titans_kernels.memory.activations import layer_shapes
from titans_kernels.memory.op import FORMS
from titans_kernels.memory.residual import Output
from titans_platform import cli
from titans_platform.cli import echo_json, json_option

ONE_TOKEN = next(form.rules for form in FORMS if form.name == "online") or ()
"""Rules of a linear memory that "online" computes with chunk_size 1."""


class Case(NamedTuple):
    """A memory to measure, beside the paper's rule with as many layers and as large chunks."""

    name: str
    rule: Rule
    depth: int
    chunk_size: int
    output: Output | None = None
    expansion: int = 1
    """Width of the hidden layers over that of a head."""
    activation: str = "silu"

    def call(self, given: Sequence[Tensor], backend: str = "auto") -> tuple[Tensor, MemoryState]:
        """y and the state after the last token."""
        q, k, v, alpha, eta, theta, extra, weight, bias, *state = given
        residual = Residual(weight, bias) if isinstance(self.output, Residual) else self.output
        return neural_memory(
            q, k, v, alpha, eta, theta, tuple(state[: self.depth]), tuple(state[self.depth :]),
            extra=extra if self.rule.extra_gates else None, chunk_size=self.chunk_size, rule=self.rule,
            residual=residual, backend=backend, activation=self.activation,
        )  # fmt: skip

    def inputs(self, batch: int, length: int, heads: int, width: int, dtype: torch.dtype) -> list[Tensor]:
        """Random leaves: q, k, v, alpha, eta, theta, the rule's own gates, LN's two, weights and momenta."""
        generator = torch.Generator().manual_seed(0)
        normal = lambda *s: torch.randn(*s, generator=generator, dtype=dtype)  # noqa: E731
        gate = lambda *s: torch.rand(batch, length, heads, *s, generator=generator, dtype=dtype)  # noqa: E731
        q, k, v = (F.normalize(normal(batch, length, heads, width), dim=-1) for _ in range(3))
        hidden = [self.expansion * width] * (self.depth - 1)
        layers = layer_shapes([width, *hidden, width], self.activation)
        shapes = [(batch, heads, *layer) for layer in layers]
        norm = torch.ones(heads, width, dtype=dtype), torch.zeros(heads, width, dtype=dtype)
        W = [self.rule.start(normal(*s) / s[-1] ** 0.5) for s in shapes]
        # steps as small as a chunk of 64 tokens needs
        leaves = [q, k, v, 0.05 * gate(), 0.5 * gate(), 0.02 * gate(), gate(self.rule.extra_gates),
                  *norm, *W, *map(torch.zeros_like, W)]  # fmt: skip
        return [x.requires_grad_() for x in leaves]

    def error(self) -> tuple[str, float]:
        """The form that "auto" takes, and the largest error of its results and gradients in float64.

        Against the token-by-token reference, relative to the largest value of each tensor.
        """
        given = self.inputs(2, 70, 2, 8, torch.float64)
        found, forms = [], ""
        for backend in ("reference", "auto"):
            forms_used(forget=True)
            y, state = self.call(given, backend)
            forms = next(x for x in forms_used() if x.startswith("neural_memory: ")).split(": ")[1].split()[0]
            results = [y, *state.weights, *state.momentum]
            weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x) for x in results]
            loss = torch.stack([(x * w).sum() for x, w in zip(results, weights, strict=True)]).sum()
            gradients = torch.autograd.grad(loss, given, materialize_grads=True, allow_unused=True)
            found.append([*results, *gradients])
        pairs = [(x, y) for x, y in zip(*found, strict=True) if x.numel()]
        return forms, max(
            float((x - y).detach().abs().max() / x.detach().abs().max().clamp(min=1e-12)) for x, y in pairs
        )


def cases(names: Sequence[str] = ()) -> list[Case]:
    """One case for every rule, and what else makes a memory of another kind.

    The paper's rule comes first, at every depth and chunk size of the others.
    """
    paper = Rule()
    others = [
        Case("paper, silu output", paper, 1, 64, OutputActivation("silu")),
        Case("paper, residual norm", paper, 2, 64, Residual()),
        Case("paper, expansion 2", paper, 2, 64, None, 2),
        Case("paper, norm, expansion 4", paper, 2, 64, Residual(), 4),
        Case("lact, swiglu", find_rule("lact"), 2, 64, activation="swiglu"),
    ]
    for name, kind in RULES.items():
        if kind is not Rule:
            rule, online = kind(), kind in ONE_TOKEN
            others.append(Case(name, rule, 1 if online else 2, 1 if online or rule.layerwise else 64))
    chosen = [case for case in others if not names or case.name.split(",")[0] in names]
    sizes = sorted({(case.depth, case.chunk_size) for case in chosen} | {(2, 64), (1, 1)})
    return [*(Case("paper", paper, *size) for size in sizes), *chosen]


def run(
    names: Sequence[str], rounds: int, batch: int, length: int, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Measure each case; forward and backward of all take turns, in seconds of CPU on this thread."""
    chosen, rows = cases(names), []
    for case in chosen:
        progress(f"{case.name}: error")
        form, error = case.error()
        rows.append(
            {"rule": case.name, "depth": case.depth, "chunk": case.chunk_size, "form": form, "error": error}
        )
    given, seconds = (
        [case.inputs(batch, length, 4, 64, torch.float32) for case in chosen],
        [[] for _ in chosen],
    )
    for i in range(rounds + 1):
        for case, inputs, times in zip(chosen, given, seconds, strict=True):
            progress(f"round {i} of {rounds}: {case.name}")
            start = time.process_time()
            y, _ = case.call(inputs)
            torch.autograd.grad(y.sum(), inputs, allow_unused=True)
            times.append(time.process_time() - start)
    speeds = [batch * length / median(times[1:]) for times in seconds]  # the first one warms up
    base = {
        (c.depth, c.chunk_size): speed for c, speed in zip(chosen, speeds, strict=True) if c.name == "paper"
    }
    for row, case, speed in zip(rows, chosen, speeds, strict=True):
        row |= {"tokens_per_second": speed, "to_paper": speed / base[case.depth, case.chunk_size]}
    return rows


def lines_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A Markdown table."""
    lines = [
        "| rule | depth | chunk | form | error | tokens a second | to the paper's |",
        "|---|--:|--:|---|--:|--:|--:|",
    ]
    for r in rows:
        speed = f"{r['tokens_per_second']:,.0f} | {r['to_paper']:.{2 if r['to_paper'] > 0.01 else 3}f}"
        lines.append(
            f"| {r['rule']} | {r['depth']} | {r['chunk']} | {r['form']} | {r['error']:.1e} | {speed} |"
        )
    return lines


@click.command()
@click.option(
    "--rule", "names", multiple=True, type=click.Choice(list(RULES)), help="Only this one; repeatable."
)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="All take turns.")
@click.option("--batch", type=click.IntRange(1), default=4, show_default=True, help="Rows.")
@click.option("--length", type=click.IntRange(1), default=1024, show_default=True, help="Tokens of a row.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Of torch.")
@json_option
def rules(names: tuple[str, ...], rounds: int, batch: int, length: int, threads: int, as_json: bool) -> None:
    """Compare the rules of the memory: form, error and speed.

    Forward and backward of 4 heads of width 64, in float32; errors in float64
    against the token-by-token reference. The last column is the speed over
    that of the paper's rule with as many layers and as large chunks.

    \b
    Example:
      python -m experiments.rules.speed --rule mdn --rule delta_ttt
    """
    torch.set_num_threads(threads)
    rows = run(names, rounds, batch, length, lambda message: click.echo(message, err=True))
    if as_json:
        echo_json(rows)
    else:
        click.echo("\n".join(lines_of(rows)))


if __name__ == "__main__":
    sys.exit(cli.run(sys.argv[1:], rules))
