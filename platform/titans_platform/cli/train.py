"""`titans train`: train and evaluate one run; `titans eval`: evaluate one of its checkpoints."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
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
    from titans_platform.runs.check import check_resources, check_start, plan, spec_for
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
    if dry_run:
        planned = plan(cfg, root, resources)
        if resume_from and "cell" in planned:
            planned["resume_from"] = _start(spec_for(cfg, root, resources), resume_from, planned["data"])
        return echo_json(planned) if as_json else _show_plan(planned, console)
    result = _run(objective, root, resources, name or config.stem, profile, resume_from, console)
    if as_json:
        return echo_json(result.record())
    console.print(measures_table(result))
    console.print(
        f"run {result.cell}: {result.parameters:,} parameters, {result.tokens:,} {objective.positions}, "
        f"{result.train_seconds:.0f} s, final loss {result.final_train_loss:.4f} {objective.loss_unit}"
    )
    console.print(f"folder {root / 'cells' / result.cell}", soft_wrap=True, highlight=False)


def _run(
    objective: Objective[Any], root: Path, resources: Resources, name: str, profile: bool,
    resume_from: str | None, console: Console,
) -> Result:  # fmt: skip
    from titans_platform.cli.live import preparing, run_display
    from titans_platform.provenance import commit
    from titans_platform.runs.check import spec_for
    from titans_platform.runs.execute import execute
    from titans_platform.runs.load import start_from_shorter
    from titans_platform.runs.ray_session import ray_session
    from titans_platform.runs.reporter import send_left
    from titans_platform.runs.spec import Tracking
    from titans_platform.study.grid import Cell
    from titans_platform.study.run import params
    from titans_platform.tracking import check_store, open_store

    cfg = objective.cfg
    check_store(root)
    send_left(root)
    with preparing(console) as progress:
        data = objective.prepare(root, progress)
    spec = spec_for(cfg, root, resources, labels={"row": name}, profile=profile)
    if (done := spec.folder.result()) is not None:
        console.print(f"run {spec.name} is finished; nothing to do")
        return done
    objective.check(data)
    tags = {"titans.commit": commit(), "titans.data": data.fingerprint}
    logged = params(Cell(name, cfg.seed, cfg), ())
    spec = replace(spec, tracking=Tracking(open_store(root).uri, name, None, logged, tags))
    if resume_from:
        console.print(
            start_from_shorter(spec, resume_from, data.fingerprint), highlight=False, soft_wrap=True
        )
    alone = nullcontext() if not resources.several else ray_session(resources.cpus, resources.gpus)
    with alone, run_display(spec.folder, console):
        result = execute(spec, wait=10)
    for line in send_left(root):
        console.print(line, highlight=False, soft_wrap=True)
    if profile:
        console.print(f"trace {spec.trace.parent}/*.json.gz", soft_wrap=True, highlight=False)
    return result


def _start(spec: RunSpec, resume_from: str, data: str) -> str:
    from titans_platform.runs.load import checkpoint_of_shorter
    from titans_platform.training.checkpoint import step_of

    if (start := checkpoint_of_shorter(spec, resume_from, data)) is None:
        return "its own checkpoint"
    shorter, point = start
    return f"step {step_of(point)} of run {shorter.name}"


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
