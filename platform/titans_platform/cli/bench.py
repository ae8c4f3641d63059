"""`titans bench`: benchmarks of speed and memory use."""

from __future__ import annotations

import sys

import click

from titans_platform.cli import LazyGroup
from titans_platform.errors import UsageError
from titans_platform.provenance import checkout

# imported on first use: they import torch
COMMANDS = {
    "kernels": (
        "titans_kernels.bench.command",
        "kernels",
        "Time the memory kernels next to other implementations on a GPU.",
    ),
    "memory": (
        "benchmarks.memory",
        "memory",
        "Time the memory layer's forward and backward pass on the CPU.",
    ),
    "step": ("benchmarks.step", "step", "Time a training step of every row of a study."),
    "stream": ("benchmarks.stream", "stream", "Speed and memory use over the length of a long text."),
}


class BenchGroup(LazyGroup):
    """A lazy group; its commands in the source tree's `benchmarks/` are not in the wheel."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported on first use. Raises UsageError: it is not installed."""
        if self.lazy.get(cmd_name, ("",))[0].startswith("benchmarks."):
            if (tree := checkout()) is None:
                raise UsageError(f"bench {cmd_name}: not in the wheel; run it in a clone of the repository")
            if str(tree) not in sys.path:
                sys.path.append(str(tree))
        return super().get_command(ctx, cmd_name)


@click.group(cls=BenchGroup, lazy=COMMANDS)
def bench() -> None:
    """Benchmark the neural memory: speed and memory use, next to other implementations."""
