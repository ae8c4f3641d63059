"""Options that several commands share, so that they are spelt and explained once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override one field of the config, e.g. --set model.memory.depth=3. May be repeated.",
)

root_option = click.option(
    "--root",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("titans-runs"),
    envvar="TITANS_HOME",
    show_default=True,
    show_envvar=True,
    help="Folder of data, runs, studies and the MLflow store.",
)

cluster_option = click.option(
    "--cluster",
    metavar="NAME",
    help="Run as a job on this cluster (clusters/NAME.yaml, or a file)  [this machine]",
)

checkpoint_option = click.option(
    "--checkpoint-every",
    type=click.IntRange(1),
    metavar="STEPS",
    help="Optimiser steps between checkpoints  [a tenth of the run, at most 500]",
    # as the overrides that it stands for
    callback=lambda ctx, option, steps: () if steps is None else (f"checkpoint.every={steps}",),
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for a program to read.")

dry_run_option = click.option("--dry-run", is_flag=True, help="Show what would be done, and do nothing.")


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """CONFIG, the YAML file of a run, with --set and --root."""
    path = click.argument("config", type=click.Path(dir_okay=False, path_type=Path))
    return path(set_option(root_option(command)))


def echo_json(value: Any) -> None:
    """Print a value as JSON that every reader takes: what is not a number becomes null."""
    click.echo(json.dumps(_finite(value), indent=2, default=str))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
