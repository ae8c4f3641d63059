"""`titans tasks`: the generated tasks with their chance levels, heuristics and floors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import click
from rich import box
from rich.console import Console
from rich.table import Table

from titans_platform.cli import echo_json, json_option
from titans_platform.config import TaskConfig
from titans_platform.errors import UsageError
from titans_platform.loading import parse_yaml, validate


class Asked(NamedTuple):
    """A task with its column, its row length in tokens and its tokenizer."""

    column: str
    task: TaskConfig
    length: int
    tokenizer: Any


@click.command()
@click.argument("study", required=False)
@click.option("--scale", help="Scale of the study  [default: the smallest except smoke]")
@click.option(
    "--task", "tasks", multiple=True, metavar="YAML", help="A task to measure instead of a study's."
)
@click.option(
    "--length", type=click.IntRange(2), default=64, show_default=True, help="Row length for --task, in bytes."
)
@json_option
def tasks(study: str | None, scale: str | None, tasks: tuple[str, ...], length: int, as_json: bool) -> None:
    """Show the tasks of STUDY: chance, the score of each heuristic, and the floor.

    A heuristic is a shortcut that a model could use instead of what the task is meant to measure; the best
    one is the task's floor. Without STUDY and --task, all generated tasks are shown with their defaults.

    \b
    Example:
      titans tasks state_tracking
      titans tasks --task '{task: recall, options: {pairs: 8}}' --length 128
    """
    if study and tasks:
        raise UsageError("--task: give either a study or --task")
    asked = _of_study(study, scale) if study else _of_options(tasks, length)
    found = [_measured(one) for one in asked]
    if as_json:
        echo_json(found)
        return
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("task@tokens, heuristics below it", no_wrap=True)
    for heading in ("chance %", "floor %"):
        table.add_column(heading, justify="right")
    for task in found:
        floor = "-" if task["floor"] is None else f"{100 * task['floor']:.1f}"
        table.add_row(
            f"[bold]{task['task']}@{task['length']}", f"{100 * task['chance']:.1f}", f"[bold]{floor}"
        )
        for name, value in task["heuristics"].items():
            table.add_row(f"  {name}", "", f"{100 * value:.1f}")
    Console().print(table)


def _measured(asked: Asked) -> dict[str, Any]:
    from titans_platform.evals import build_generated

    task = build_generated(asked.task)
    floor = task.floor(asked.length, asked.tokenizer)
    return {
        "task": f"{asked.column}/{task.label}" if asked.column else task.label,
        "options": task.options.model_dump(mode="json"),
        "length": asked.length,
        "chance": task.chance,
        "heuristics": floor.scores if floor else {},
        "floor": floor and floor.value,
        "heuristic": floor and floor.heuristic,
    }


def _of_options(tasks: tuple[str, ...], length: int) -> Iterator[Asked]:
    """The tasks given as YAML, or all whose options have defaults."""
    from titans_platform.data import load_tokenizer
    from titans_platform.evals import TASKS, GeneratedTask

    tokenizer = load_tokenizer("byte")
    configs = [validate(TaskConfig, parse_yaml(task, "--task"), "--task") for task in tasks]
    if not tasks:
        for name, kind in sorted(TASKS.items()):
            needs = any(field.is_required() for field in kind.Options.model_fields.values())
            if issubclass(kind, GeneratedTask) and not needs and name != "babilong_hub":
                configs.append(TaskConfig(task=name))
    for config in configs:
        # RULER's sentences need longer rows than the other tasks
        words = config.task in ("needle", "reasoning") and config.options.get("style") != "compact"
        yield Asked("", config, max(length, 512) if words else length, tokenizer)


def _of_study(name: str, scale: str | None) -> Iterator[Asked]:
    """Each task of the study's columns once, at each of its lengths."""
    from titans_platform.data import load_tokenizer
    from titans_platform.evals import GeneratedTask, build_task, row_length
    from titans_platform.study.grid import expand, load_study

    study = load_study(name)
    if scale is None:
        scale = next((known for known in study.scales if known != "smoke"), "smoke")
    seen: set[tuple[str, int]] = set()
    for cell in expand(study, scale):
        for column, configs in cell.config.eval.columns.items():
            for config in configs:
                if not isinstance(build_task(config), GeneratedTask):
                    continue
                for multiple in config.lengths:
                    length = row_length(multiple, cell.config.data.sequence_length)
                    key = config.model_dump_json(exclude={"lengths", "weight"}), length
                    if key not in seen:
                        seen.add(key)
                        yield Asked(column, config, length, load_tokenizer(cell.config.data.tokenizer))
