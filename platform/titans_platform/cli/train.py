"""`titans train`: train and evaluate one run; `titans eval`: evaluate one of its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from titans_platform.cli import (
    FiniteFloat,
    checkpoint_option,
    config_options,
    dry_run_option,
    echo_json,
    json_option,
    root_option,
    set_option,
)
from titans_platform.errors import UsageError
from titans_platform.text import clock

PLAN_LINES = {
    "workers": "workers",
    "threads": "CPU threads per worker",
    "steps": "optimizer steps",
    "data": "data",
    "cell": "run",
    "state": "state of the run",
    "tokens": "tokens to train on",
    "parameters": "parameters",
    "state_bytes": "state bytes per sequence",
    "worker_bytes": "memory per worker",
    "flops_per_token": "training FLOPs per token",
    "seconds": "estimated time",
}
"""Lines of the dry run, by the key that --json has for each."""

if TYPE_CHECKING:
    from titans_platform.config import RunConfig
    from titans_platform.objectives import Data
    from titans_platform.runs.result import Measures, Result
    from titans_platform.runs.spec import Resources, Tracking


class Workers(click.ParamType):
    """A number of workers, or minimum and maximum of an elastic run: `4`, `2:8`."""

    name = "N|MIN:MAX"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        least, _, most = str(value).partition(":")
        try:
            found = int(least), int(most or least)
        except ValueError:
            self.fail(f"{value}: give a number, or the minimum and maximum, as 2:8")
        if found[0] < 1 or found[0] > found[1]:
            self.fail(f"{value}: give a number of at least 1, or the minimum and then the maximum, as 2:8")
        return found if found[0] < found[1] else found[0]


@click.command()
@config_options
@click.option(
    "--workers",
    type=Workers(),
    default="1",
    show_default=True,
    help="Ray Train workers; 1 trains in this process, 2:8 is elastic.",
)
@click.option("--gpus", type=FiniteFloat(0), default=0, show_default=True, help="GPUs per worker.")
@checkpoint_option
@click.option(
    "--profile", is_flag=True, help="Write a trace of three steps to the run's folder, for Perfetto."
)
@click.option("--name", help="Run name in MLflow  [default: the config file's name]")
@dry_run_option
@json_option
def train(
    config: Path,
    overrides: tuple[str, ...],
    root: Path,
    workers: int | tuple[int, int],
    gpus: float,
    checkpoint_every: tuple[str, ...],
    profile: bool,
    name: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Train and evaluate the model of CONFIG (a YAML file), and log both to MLflow.

    The run's folder is named by a hash of its config, data and defaults version. Running the command again
    shows a finished run's results, and resumes an interrupted run from its last checkpoint.

    \b
    Example:
      titans train run.yaml --set model.memory.depth=3 --set optim.steps=200
    """
    from titans_platform.loading import load_config
    from titans_platform.objectives import build_objective
    from titans_platform.runs.load import located
    from titans_platform.runs.spec import Resources, this_machine

    console = Console(stderr=as_json)
    cfg = located(load_config(config, overrides + checkpoint_every), root)
    resources = Resources(workers=workers, cpus_per_worker=cfg.threads, gpus_per_worker=gpus)
    if not gpus and this_machine(Resources(gpus_per_worker=1)).gpus:
        console.print("this machine has a GPU that the run does not use; --gpus 1 trains on it")
    if dry_run:
        _plan(cfg, root, resources, as_json, console)
        return
    result = _run(cfg, root, resources, name or config.stem, profile, console)
    if as_json:
        echo_json(result.record())
        return
    objective = build_objective(cfg)
    console.print(measures_table(result))
    console.print(
        f"run {result.cell}: {result.parameters:,} parameters, {result.tokens:,} "
        f"{objective.positions}, {result.train_seconds:.0f} s, final loss "
        f"{result.final_train_loss:.4f} {objective.loss_unit}"
    )
    console.print(f"folder {root / 'cells' / result.cell}", soft_wrap=True, highlight=False)


def _run(
    cfg: RunConfig, root: Path, resources: Resources, name: str, profile: bool, console: Console
) -> Result:
    from titans_platform.cli.live import run_display
    from titans_platform.objectives import build_objective
    from titans_platform.runs.check import check_resources, check_start, spec_for
    from titans_platform.runs.execute import execute
    from titans_platform.runs.extend import resume_from_shorter
    from titans_platform.runs.ray_session import ray_session
    from titans_platform.runs.reporter import send_left
    from titans_platform.tracking import check_store

    objective = build_objective(cfg)
    objective.check()
    check_resources(cfg, resources, shared=True)
    check_start(cfg)
    check_store(root)
    send_left(root)
    with console.status("preparing data"):
        data = objective.prepare(root)
    spec = spec_for(cfg, root, resources, labels={"row": name}, profile=profile)
    if (done := spec.folder.result()) is not None:
        console.print(f"run {spec.name} is finished; nothing to do")
        return done
    # report config errors before creating a store and starting a cluster
    objective.check(data)
    spec = replace(spec, tracking=_tracking(cfg, root, data, name))
    if line := resume_from_shorter(spec, data.fingerprint):
        console.print(line, highlight=False, soft_wrap=True)
    alone = nullcontext() if not resources.several else ray_session(resources.cpus, resources.gpus)
    with alone, run_display(spec.folder, console):
        result = execute(spec, wait=10)
    for line in send_left(root):
        console.print(line, highlight=False, soft_wrap=True)
    if profile:
        console.print(f"trace {spec.trace.parent}/*.json.gz", soft_wrap=True, highlight=False)
    return result


def _tracking(cfg: RunConfig, root: Path, data: Data, name: str) -> Tracking:
    from titans_platform.provenance import commit
    from titans_platform.runs.spec import Tracking
    from titans_platform.study.grid import Cell
    from titans_platform.study.run import params
    from titans_platform.tracking import open_store

    tags = {"titans.commit": commit(), "titans.data": data.fingerprint}
    return Tracking(open_store(root).uri, name, None, params(Cell(name, cfg.seed, cfg), ()), tags)


def _plan(cfg: RunConfig, root: Path, resources: Resources, as_json: bool, console: Console) -> None:
    """Print the plan of a run. Raises what the run itself would raise before it trains."""
    from titans_platform.data import NotPrepared
    from titans_platform.objectives import build_objective
    from titans_platform.runs.check import check_resources, check_start
    from titans_platform.runs.folder import RunFolder

    objective = build_objective(cfg)
    objective.check()
    try:
        data = objective.open(root)
    except NotPrepared:
        data = None
        objective.check_sources()
    check_resources(cfg, resources, shared=True)
    check_start(cfg)
    plan: dict[str, Any] = {"workers": resources.workers, "threads": cfg.threads, "steps": cfg.optim.steps}
    if data is None:
        plan |= {"data": "to be prepared", "state": "missing"}
    else:
        objective.check(data)
        folder = RunFolder(root.resolve(), objective.run_name(data.fingerprint, resources.hashed_workers))
        plan |= {"data": data.fingerprint, "cell": folder.name, "state": folder.state()}
    plan |= {"tokens": cfg.tokens} | _cost(cfg, resources)
    if as_json:
        echo_json(plan)
        return
    written = {
        "flops_per_token": lambda value: f"{value:.3g}",
        "worker_bytes": lambda value: f"at least {value / 2**30:,.2f} GiB",
        "seconds": lambda value: f"{clock(value)} of training, extrapolated from two timed steps",
    }
    for key, value in plan.items():
        plain = f"{value:,}" if isinstance(value, int) else str(value)
        text = plain if value is None or key not in written else written[key](value)
        console.print(f"{PLAN_LINES[key]:32} {text}", highlight=False)


def _cost(cfg: RunConfig, resources: Resources) -> dict[str, Any]:
    """Size, memory, FLOPs and time of a run; unknown values are left out."""
    from titans_platform.runs.cost import least_memory, seconds_per_token, sizes, training_flops

    flops = training_flops(cfg)
    cost = asdict(sizes(cfg)) | {"worker_bytes": least_memory(cfg, resources).total}
    if flops is not None:
        cost["flops_per_token"] = flops / cfg.row_tokens
    if resources.workers == 1 and (each := seconds_per_token(cfg)) is not None:
        cost["seconds"] = each * cfg.tokens
    return cost


@click.command("eval")
@click.argument("run")
@click.option(
    "--by-position", is_flag=True, help="Loss by position in long texts, with and without carried state."
)
@click.option(
    "--rows", type=int, help="Of --by-position: length of a text in training rows  [default: at most 64]"
)
@click.option(
    "--read",
    "file",
    metavar="FILE",
    help="Of --by-position: your own text: a file, folder or glob of .txt, .jsonl, ..., also .gz, .xz.",
)
@set_option
@root_option
@json_option
def evaluate(
    run: str,
    by_position: bool,
    rows: int | None,
    file: str | None,
    overrides: tuple[str, ...],
    root: Path,
    as_json: bool,
) -> None:
    """Evaluate RUN and print a table of values, chance levels and floors.

    RUN is a run's name (or a prefix of it), its folder, its MLflow run id, or the folder of one checkpoint.
    --set overrides the evaluation: only eval.* may be set.

    --by-position measures what memory brings beyond the training length. Long texts are read with the state
    carried from their start, with a fresh state every row, and with a fresh state that first reads a window
    of preceding rows. Prints a table and saves a figure to the run's folder.

    \b
    Example:
      titans eval 3f2a91c0 --set eval.items=500
      titans eval 3f2a91c0 --by-position --rows 64 --read book.txt
    """
    import torch

    from titans_platform.runs.load import find_checkpoint, load_checkpoint, read_config
    from titans_platform.runs.result import Measures
    from titans_platform.training.loop import deterministic

    console = Console(stderr=as_json)
    point = find_checkpoint(run, root)
    if other := next((o for o in overrides if not o.startswith("eval.")), None):
        raise UsageError(f"--set {other}: the config of a trained run is fixed; only eval.* may be set")
    cfg = read_config(point, overrides)
    if by_position:
        from titans_platform.cli.by_position import Asked, show

        return show(point, cfg, Asked(rows, file), root, as_json, console)
    if rows is not None or file is not None:
        raise UsageError(f"{'--rows' if rows is not None else '--read'}: works only with --by-position")
    with console.status(f"evaluating {point.name}"), deterministic(cfg.seed, cfg.threads):
        model, step, objective = load_checkpoint(point, cfg)
        data, device = objective.open(root), "cuda" if torch.cuda.is_available() else "cpu"
        measured = objective.evaluate(model.to(device), data, device=device)
    if as_json:
        echo_json({"cell": point.parents[1].name, "step": step, **measured})
    else:
        measures = Measures.model_validate(measured)
        console.print(measures_table(measures))
        for buckets in bucket_tables(measures):
            console.print(buckets)
        console.print(f"run {point.parents[1].name}, step {step:,}")


def measures_table(result: Measures) -> Table:
    """The result of ``evaluate`` as a table: each column, followed by its tasks at each length."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for heading in ("value", "± s.e.", "chance", "floor", "items"):
        table.add_column(heading, justify="right")
    heuristics = any(task.heuristic for task in result.tasks.values())
    if heuristics:
        table.add_column("best heuristic")
    for column, value in result.columns.items():
        table.add_row(f"[bold]{column}", f"[bold]{number(value)}", "", number(result.chance.get(column)))
        for name, task in result.tasks.items():
            if name.partition("/")[0] == column:
                measured = map(number, (task.value, task.stderr, task.chance, task.floor))
                last = (task.heuristic or "",) if heuristics else ()
                table.add_row(f"  {name.partition('/')[2]}", *measured, f"{task.items:,}", *last)
    return table


def bucket_tables(result: Measures) -> Iterator[Table]:
    """Of each task with buckets, its value by bucket and length: a needle's depth, a token's position."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for key, buckets in result.buckets.items():
        task, _, length = key.partition("/")[2].rpartition("@")
        for bucket, value in buckets.items():
            found.setdefault(task, {}).setdefault(bucket, {})[length] = value
    for task, rows in found.items():
        lengths = list(dict.fromkeys(length for values in rows.values() for length in values))
        table = Table(box=box.SIMPLE_HEAD, title=task, title_justify="left")
        table.add_column("position, at tokens")
        for length in lengths:
            table.add_column(f"{int(length):,}", justify="right")
        for bucket, values in rows.items():
            table.add_row(bucket, *(_shaded(values.get(length), bucket) for length in lengths))
        yield table


def _shaded(value: float | None, bucket: str) -> str:
    """A number; for a depth, coloured by the share of needles found there."""
    if value is None or not bucket.endswith("%"):
        return number(value)
    colour = "red" if value < 1 / 3 else "yellow" if value < 2 / 3 else "green"
    return f"[{colour}]{number(value)}"


def number(value: float | None) -> str:
    """Three decimals below ten, one above; a dash for None."""
    if value is None:
        return "-"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"
