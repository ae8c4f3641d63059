"""`titans bench`: speed and memory, measured."""

from __future__ import annotations

import sys

import click

from titans_platform.cli import LazyGroup
from titans_platform.errors import UsageError
from titans_platform.provenance import checkout

# imported when they are called, with torch
COMMANDS = {
    "kernels": (
        "titans_kernels.bench.command",
        "kernels",
        "Time the memory's kernels beside others' on a GPU.",
    ),
    "memory": (
        "benchmarks.memory",
        "memory",
        "Time the memory layer's forward and backward pass on the CPU.",
    ),
    "step": ("benchmarks.step", "step", "Time a training step of every row of a study."),
    "stream": ("benchmarks.stream", "stream", "Read a long text: do speed and memory depend on its length?"),
}


class BenchGroup(LazyGroup):
    """A lazy group whose commands may lie in the source tree's `benchmarks/`, which no wheel has."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported now. Raises UsageError: it is not installed."""
        if self.lazy.get(cmd_name, ("",))[0].startswith("benchmarks."):
            if (tree := checkout()) is None:
                raise UsageError(f"bench {cmd_name}: not in the wheel; run it in a clone of the repository")
            if str(tree) not in sys.path:
                sys.path.append(str(tree))
        return super().get_command(ctx, cmd_name)


@click.group(cls=BenchGroup, lazy=COMMANDS)
def bench() -> None:
    """Measure the speed and memory of the neural memory, alone or beside other implementations."""
