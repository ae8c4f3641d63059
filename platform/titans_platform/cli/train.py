"""`titans train`: train and evaluate one run; `titans eval`: evaluate one of its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from titans_platform.cli import (
    FiniteFloat,
    checkpoint_option,
    config_options,
    dry_run_option,
    echo_json,
    json_option,
    measures_table,
)
from titans_platform.text import clock, plain_console

PLAN_LINES = {
    "workers": "workers", "threads": "CPU threads per worker", "steps": "optimizer steps", "data": "data",
    "cell": "run", "state": "state of the run", "resume_from": "resumes from", "tokens": "tokens to train on",
    "parameters": "parameters", "state_bytes": "state bytes per sequence",
    "worker_bytes": "memory per worker", "flops_per_token": "training FLOPs per token",
    "seconds": "estimated time",
}  # fmt: skip
"""Lines of the dry run, by the key that --json has for each."""
PLAN_UNITS: dict[str, Callable[[Any], str]] = {
    "flops_per_token": lambda value: f"{value:.3g}",
    "worker_bytes": lambda value: f"at least {value / 2**30:,.2f} GiB",
    "seconds": lambda value: f"{clock(value)} of training, extrapolated from a few timed steps",
}


class Workers(click.ParamType):
    """A number of workers, or minimum and maximum of an elastic run: `4`, `2:8`."""

    name = "N|MIN:MAX"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        low, _, high = str(value).partition(":")
        high = high or low
        if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
            self.fail(f"{value}: give a number of at least 1, or the minimum and then the maximum, as 2:8")
        return int(low) if low == high else (int(low), int(high))


@click.command()
@config_options
@click.option("--workers", type=Workers(), default="1", help="Ray Train workers; 2:8 is elastic.")
@click.option("--gpus", type=FiniteFloat(0), default=0, help="GPUs per worker.")
@checkpoint_option
@click.option("--profile", is_flag=True, help="Write a trace of three steps to the run's folder.")
@click.option("--name", help="Run name in MLflow  [default: the config file's name]")
@click.option("--resume-from", metavar="RUN", help="Start from a shorter run of the same config.")
@dry_run_option
@json_option
def train(
    config: Path, overrides: tuple[str, ...], root: Path, workers: int | tuple[int, int], gpus: float,
    checkpoint_every: tuple[str, ...], profile: bool, name: str | None, resume_from: str | None,
    dry_run: bool, as_json: bool,
) -> None:  # fmt: skip
    """Train and evaluate the model of CONFIG (a YAML file), and log both to MLflow.

    The run's folder is named by a hash of its config, data and defaults version. Running the command again
    shows a finished run's results, and resumes an interrupted run from its last checkpoint. To train longer,
    raise optim.steps and name the run so far with --resume-from: a schedule of constant or wsd and a warm-up
    counted in steps (optim.warmup_steps) end in the numbers of a run from the start.

    \b
    Example:
      titans train run.yaml --set model.memory.depth=3 --set optim.steps=200
    """
    from titans_platform.cli.live import preparing, train_run
    from titans_platform.loading import load_config
    from titans_platform.objectives import build_objective
    from titans_platform.runs.check import check_resources, plan
    from titans_platform.runs.load import prepared_spec
    from titans_platform.runs.spec import Resources, this_machine

    console = plain_console(stderr=as_json)
    cfg = load_config(config, overrides + checkpoint_every)
    objective = build_objective(cfg)
    resources = Resources(workers=workers, cpus_per_worker=cfg.threads, gpus_per_worker=gpus)
    if not gpus and this_machine(Resources(gpus_per_worker=1)).gpus:
        console.print("this machine has a GPU that the run does not use; --gpus 1 trains on it")
    # report errors of the config before creating a store and starting a cluster
    objective.check()
    check_resources(cfg, resources, shared=True)
    with preparing(console) as progress:
        spec = prepared_spec(cfg, root, resources, resume_from, None if dry_run else progress)
    result = None
    if spec and not dry_run:
        result = train_run(replace(spec, profile=profile), root, name or config.stem, console)
    record = result.record() if result else plan(cfg, resources, spec)
    if as_json:
        return echo_json(record)
    if result:
        console.print(measures_table(result))
        console.print(
            f"run {result.cell}: {result.parameters:,} parameters, {result.tokens:,} {objective.positions}, "
            f"{result.train_seconds:.0f} s, final loss {result.final_train_loss:.4f} {objective.loss_unit}"
        )
        return console.print(f"folder {root / 'cells' / result.cell}", soft_wrap=True)
    for key, value in record.items():
        text = f"{value:,}" if isinstance(value, int) else str(value)
        if key in PLAN_UNITS and value is not None:
            text = PLAN_UNITS[key](value)
        console.print(f"{PLAN_LINES[key]:32} {text}", soft_wrap=True)
