"""`titans train`: train and evaluate one run; `titans eval`: evaluate one of its checkpoints."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from titans_platform.cli import (
    FiniteFloat,
    checkpoint_option,
    config_options,
    dry_run_option,
    echo_json,
    json_option,
)
from titans_platform.text import clock

PLAN_LINES = {
    "workers": "workers", "threads": "CPU threads per worker", "steps": "optimizer steps", "data": "data",
    "cell": "run", "state": "state of the run", "resume_from": "resumes from", "tokens": "tokens to train on",
    "parameters": "parameters", "state_bytes": "state bytes per sequence",
    "worker_bytes": "memory per worker", "flops_per_token": "training FLOPs per token",
    "seconds": "estimated time",
}  # fmt: skip
"""Lines of the dry run, by the key that --json has for each."""

if TYPE_CHECKING:
    from titans_platform.objectives import Objective
    from titans_platform.runs.folder import Result
    from titans_platform.runs.spec import Resources, RunSpec


class Workers(click.ParamType):
    """A number of workers, or minimum and maximum of an elastic run: `4`, `2:8`."""

    name = "N|MIN:MAX"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        least, _, most = str(value).partition(":")
        try:
            low, high = int(least), int(most or least)
        except ValueError:
            self.fail(f"{value}: give a number, or the minimum and maximum, as 2:8")
        if not 1 <= low <= high:
            self.fail(f"{value}: give a number of at least 1, or the minimum and then the maximum, as 2:8")
        return (low, high) if low < high else low


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
    from titans_platform.cli.live import measures_table
    from titans_platform.loading import load_config
    from titans_platform.objectives import build_objective
    from titans_platform.runs.check import check_resources, check_start, plan
    from titans_platform.runs.load import located
    from titans_platform.runs.spec import Resources, this_machine

    console = Console(stderr=as_json)
    cfg = located(load_config(config, overrides + checkpoint_every), root)
    objective = build_objective(cfg)
    resources = Resources(workers=workers, cpus_per_worker=cfg.threads, gpus_per_worker=gpus)
    if not gpus and this_machine(Resources(gpus_per_worker=1)).gpus:
        console.print("this machine has a GPU that the run does not use; --gpus 1 trains on it")
    # report errors of the config before creating a store and starting a cluster
    objective.check()
    check_resources(cfg, resources, shared=True)
    check_start(cfg)
    spec = prepared_spec(objective, root, resources, resume_from, console, dry_run)
    if dry_run:
        planned = plan(cfg, resources, spec)
        return echo_json(planned) if as_json else _show_plan(planned, console)
    assert spec
    result = train_run(replace(spec, profile=profile), root, name or config.stem, console)
    if as_json:
        return echo_json(result.record())
    console.print(measures_table(result))
    console.print(
        f"run {result.cell}: {result.parameters:,} parameters, {result.tokens:,} {objective.positions}, "
        f"{result.train_seconds:.0f} s, final loss {result.final_train_loss:.4f} {objective.loss_unit}"
    )
    console.print(f"folder {root / 'cells' / result.cell}", soft_wrap=True, highlight=False)


def prepared_spec(
    objective: Objective[Any], root: Path, resources: Resources, resume_from: str | None, console: Console,
    dry_run: bool,
) -> RunSpec | None:  # fmt: skip
    """Prepare the data and return the run's spec; in a dry run None if they are not prepared."""
    from titans_platform.cli.live import preparing
    from titans_platform.data import NotPrepared
    from titans_platform.runs.check import spec_for
    from titans_platform.runs.load import checkpoint_of_shorter
    from titans_platform.runs.reporter import send_left
    from titans_platform.tracking import check_store

    if dry_run:
        try:
            data = objective.open(root)
        except NotPrepared:
            return objective.check_sources()
    else:
        check_store(root)
        send_left(root)
        with preparing(console) as progress:
            data = objective.prepare(root, progress)
    objective.check(data)
    spec = spec_for(objective.cfg, root, resources)
    return replace(spec, start=checkpoint_of_shorter(spec, resume_from)) if resume_from else spec


def train_run(spec: RunSpec, root: Path, name: str, console: Console) -> Result:
    """Train and evaluate a run, logged in MLflow as ``name``; a finished one is not trained again."""
    from titans_platform.cli.live import run_display
    from titans_platform.runs.execute import execute
    from titans_platform.runs.ray_session import ray_session
    from titans_platform.runs.reporter import send_left
    from titans_platform.runs.spec import Tracking
    from titans_platform.study.grid import Cell
    from titans_platform.study.run import params
    from titans_platform.tracking import open_store

    say = partial(console.print, highlight=False, soft_wrap=True)
    resources, done = spec.resources, spec.folder.state() == "done"
    if done:
        say(f"run {spec.name} is finished; nothing to do")
    else:
        if spec.start:
            say(f"resuming from {spec.start}, which trained the same steps")
        tags = {"titans.commit": spec.commit, "titans.data": spec.data}
        logged = params(Cell(name, spec.config.seed, spec.config), ())
        tracking = Tracking(open_store(root).uri, name, None, logged, tags)
        spec = replace(spec, labels={"row": name}, tracking=tracking)
    alone = nullcontext() if done or not resources.several else ray_session(resources.cpus, resources.gpus)
    with alone, run_display(spec.folder.progress, console):
        result = execute(spec, wait=10)
    for line in send_left(root):
        say(line)
    if spec.profile:
        say(f"trace {spec.trace.parent}/*.json.gz")
    return result


def _show_plan(plan: dict[str, Any], console: Console) -> None:
    written = {
        "flops_per_token": lambda value: f"{value:.3g}",
        "worker_bytes": lambda value: f"at least {value / 2**30:,.2f} GiB",
        "seconds": lambda value: f"{clock(value)} of training, extrapolated from two timed steps",
    }
    for key, value in plan.items():
        plain = f"{value:,}" if isinstance(value, int) else str(value)
        text = plain if value is None or key not in written else written[key](value)
        console.print(f"{PLAN_LINES[key]:32} {text}", highlight=False)
