"""The `titans` command, and the options and output that its commands share.

Commands are imported when they are called, so that --help answers at once.
"""

from __future__ import annotations

import errno
import importlib
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from titans_platform.errors import StorageError, TitansError, UsageError, missing_extra
from titans_platform.provenance import checkout
from titans_platform.text import table

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.table import Table

    from titans_platform.runs.folder import Result

Model = TypeVar("Model", bound="BaseModel")
INTERRUPTED = 130
RESUME = "run the same command again to resume from the last checkpoint, if one was written"
PARTS = "finished parts are kept; run the same command again for the rest"
AFTER_INTERRUPT = {"adapt": RESUME, "train": RESUME, "sweep": RESUME, "data": PARTS}
"""Hints for resuming an interrupted command; the others leave nothing behind."""

# name -> (module under titans_platform.cli, the attribute in it, one line for --help)
COMMANDS: dict[str, tuple[str, str, str]] = {
    "adapt": ("adapt", "adapt", "Give a pretrained transformers model a memory, and train it."),
    "audit": ("audit", "audit", "Check that a layer is causal, trained, and the same in pieces and decoded."),
    "chat": ("adapt", "chat", "Chat with a model of `titans adapt`, whose memory is kept between calls."),
    "cluster": ("cluster", "cluster", "Bring clusters up, run commands on them, take them down."),
    "data": ("data", "data", "Tokenise sources into shards, and inspect them."),
    "eval": ("evaluate", "evaluate", "Evaluate a run or one of its checkpoints."),
    "export": ("model", "export", "Export a run's model and tokenizer to Hugging Face transformers."),
    "generate": ("model", "generate", "Generate text with a run's model; save and load its memory."),
    "init": ("init", "init", "Write a starter run file with every field explained."),
    "inspect": ("model", "inspect", "Show what a run's memory does while it reads a text."),
    "paper": ("runs", "paper", "Write one page: the paper's tables and figures next to our results."),
    "runs": ("runs", "runs", "List and delete runs."),
    "sweep": ("sweep", "sweep", "List, run and report studies (grids of runs)."),
    "tasks": ("evaluate", "tasks", "Show evaluation tasks: chance, heuristics and floors."),
    "train": ("train", "train", "Train and evaluate one model."),
    "ui": ("runs", "ui", "Serve the MLflow UI on the runs."),
}
BENCHMARKS = {
    "kernels": ("titans_kernels.bench.__main__", "kernels", "Time the memory kernels and others on a GPU."),
    "memory": ("benchmarks.memory", "memory", "Time the memory layer, forward and backward, on the CPU."),
    "step": ("benchmarks.step", "step", "Time a training step of every row of a study."),
}


class FiniteFloat(click.FloatRange):
    """A range of finite numbers: nan and inf are rejected, which click.FloatRange lets pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


class OSPath(click.Path):
    """A path of names that file systems take: a longer one is refused before anything is done."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not os.fspath(value):
            self.fail("is empty; give a path", param, ctx)
        if any(len(name) > 255 for name in os.fsencode(value).split(b"/")):
            self.fail(f"{value}: has a name of more than 255 bytes; give a shorter one", param, ctx)
        return super().convert(value, param, ctx)


file_type = OSPath(dir_okay=False, path_type=Path)

set_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE",
    help="Override one field of the config, e.g. --set model.memory.depth=3. May be repeated.",
)  # fmt: skip

root_option = click.option(
    "--root", type=OSPath(file_okay=False, path_type=Path), default=Path("titans-runs"),
    envvar="TITANS_HOME", show_envvar=True, help="Folder of data, runs, studies and the MLflow store.",
)  # fmt: skip

cluster_option = click.option(
    "--cluster", metavar="NAME",
    help="Submit as a job to this cluster (clusters/NAME.yaml, or a file)  [default: this machine]",
)  # fmt: skip

checkpoint_option = click.option(
    "--checkpoint-every", type=click.IntRange(1), metavar="STEPS",
    help="Optimiser steps between checkpoints  [default: a tenth of the run, at most 500]",
    # as the equivalent --set override
    callback=lambda ctx, option, steps: () if steps is None else (f"checkpoint.every={steps}",),
)  # fmt: skip

json_option = click.option("--json", "as_json", is_flag=True, help="Print machine-readable JSON.")

scale_option = click.option("--scale", default="", help="A study's scale  [default: laptop, or the only one]")

dry_run_option = click.option("--dry-run", is_flag=True, help="Show what would be done without doing it.")


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """CONFIG, the YAML file of a run, with --set and --root."""
    return click.argument("config", type=file_type)(set_option(root_option(command)))


def from_options(model: type[Model], **options: Any) -> Model:
    """Build a model of a command's options. Raises UsageError of one that click let pass, such as nan."""
    from titans_platform.loading import validate

    try:
        return validate(model, options)
    except UsageError as error:
        field, _, cause = str(error).partition(": ")
        raise UsageError(f"--{field.partition('.')[0].replace('_', '-')}: {cause}") from None


def echo_json(value: Any) -> None:
    """Print a value as strict JSON: nan and inf become null."""
    from pydantic_core import to_json

    click.echo(to_json(value, indent=2, inf_nan_mode="null", fallback=str).decode())


def beyond_training(tokens: int, context: int) -> str:
    """Return a warning for a text longer than the longest context that training carried a state over."""
    return (
        f"{tokens:,} tokens exceed the context that training carried a state over, about {context:,}: the "
        "loss may be higher than with a fresh state (docs/training.md, Streams; titans eval RUN "
        "--by-position measures it)"
    )


def measures_table(result: Result) -> Table:
    """Return the result of ``evaluate`` as a table: each column, followed by its tasks at each length."""
    grid = table("", "value", "± s.e.", "chance", "floor", "items")
    heuristics = any(task.heuristic for task in result.tasks.values())
    if heuristics:
        grid.add_column("best heuristic")
    for column, value in result.columns.items():
        grid.add_row(column, _short(value), "", _short(result.chance.get(column)), style="bold")
        for name, task in result.tasks.items():
            if name.partition("/")[0] == column:
                measured = map(_short, (task.value, task.stderr, task.chance, task.floor))
                last = (task.heuristic or "",) if heuristics else ()
                grid.add_row(f"  {name.partition('/')[2]}", *measured, f"{task.items:,}", *last)
    return grid


def bucket_tables(result: Result) -> Iterator[Table]:
    """Yield a table by bucket and length for each task with buckets: a needle's depth, a token's place."""
    by_task: dict[str, dict[str, dict[str, float]]] = {}
    for key, buckets in result.buckets.items():
        task, _, length = key.partition("/")[2].rpartition("@")
        for bucket, value in buckets.items():
            by_task.setdefault(task, {}).setdefault(bucket, {})[length] = value
    for task, rows in by_task.items():
        lengths = dict.fromkeys(length for values in rows.values() for length in values)
        headings = [f"{int(length):,}" for length in lengths]
        grid = table("position, at tokens", *headings, title=task, title_justify="left")
        for bucket, values in rows.items():
            grid.add_row(bucket, *(_short(values.get(length)) for length in lengths))
        yield grid


def _short(value: float | None) -> str:
    """Format a number with three decimals below ten, one above; a dash for None."""
    if value is None:
        return "-"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"


class LazyGroup(click.Group):
    """A group with commands in modules not yet imported; ``lazy`` is a table like ``COMMANDS``."""

    def __init__(self, *arguments: Any, lazy: dict[str, tuple[str, str, str]], **options: Any):
        super().__init__(*arguments, **options)
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, in order."""
        return sorted([*self.lazy, *self.commands])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command. Raises UsageError: a benchmark, outside a clone."""
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        module, attribute, _ = self.lazy[cmd_name]
        if module.startswith("benchmarks."):
            # the source tree: `benchmarks/` is not in the wheel
            if (tree := checkout()) is None:
                raise UsageError(f"bench {cmd_name}: not in the wheel; run it in a clone of the repository")
            if str(tree) not in sys.path:
                sys.path.append(str(tree))
        module = module if "." in module else f"titans_platform.cli.{module}"
        return getattr(importlib.import_module(module), attribute)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        lines = {name: command.get_short_help_str(100) for name, command in self.commands.items()}
        lines |= {name: line for name, (_, _, line) in self.lazy.items()}
        with formatter.section("Commands"):
            formatter.write_dl(sorted(lines.items()))


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True},
)
@click.version_option(package_name="titans-lab")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Titans: models that learn to memorize at test time. Train them, and make the paper's tables.

    \b
    Exit codes: 0 done, 1 failed, 2 bad usage or config, 3 cluster, authentication or storage,
    4 study incomplete, 130 interrupted.

    \b
    Example:
      titans sweep run ablation --scale laptop
    """


@cli.group(cls=LazyGroup, lazy=BENCHMARKS)
def bench() -> None:
    """Benchmark the neural memory and training steps, next to others."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code; an error is one line unless --debug is given."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # a terminal that is not UTF-8 shows ? in place of what it cannot
            stream.reconfigure(errors="replace")
    # schedulers preempt a job with SIGTERM: handle it like Ctrl-C
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str], command: click.Command = cli) -> int:
    """Run one command line of ``command``; its exit code."""
    # classes named by import path are found in the current directory, after whatever is installed
    sys.path.append(os.getcwd())
    debug = "--debug" in arguments
    try:
        # --debug is accepted anywhere in the line
        words = [a for a in arguments if a != "--debug"]
        code = command.main(words, prog_name="titans" if command is cli else None, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, click.Abort):
        name = next((a for a in arguments if not a.startswith("-")), "")
        left = f"; {AFTER_INTERRUPT[name]}" if name in AFTER_INTERRUPT else ""
        return _failed(f"interrupted{left}", INTERRUPTED, debug)
    except click.exceptions.NoArgsIsHelpError as error:
        # a group without a command: print its help, not an error
        click.echo(error.ctx.get_help() if error.ctx else error.format_message())
        return 0
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "titans"
        return _failed(f"{error.format_message()} (see {where} --help)", 2, debug)
    except (click.ClickException, TitansError) as error:
        return _failed(str(error), error.exit_code, debug)
    except BrokenPipeError:
        return _closed_pipe()
    except SystemExit as error:
        # rich exits with 1 on a closed pipe
        if isinstance(error.__context__, BrokenPipeError):
            return _closed_pipe()
        raise
    except Exception as error:
        if missing := missing_extra(error):
            return _failed(missing, 2, debug)
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            return _failed(f"{error.filename}: {error.strerror}; give a shorter one", 2, debug)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _failed(f"{error.filename or 'output'}: {error.strerror}", StorageError.exit_code, debug)
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return _failed(f"{reason} (--debug shows the traceback)", 1, debug)


def _closed_pipe() -> int:
    """Return 0: the reader of the pipe has exited, and there is nothing to flush to."""
    sys.stdout = None
    return 0


def _failed(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    click.echo(f"error: {' '.join(message.split())}", err=True)
    return code
