"""`titans train`: one run, from config to measurements."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from titans_platform.cli.measures import measures_table
from titans_platform.cli.options import dry_run_option, echo_json, json_option, root_option, set_option

if TYPE_CHECKING:
    from titans_platform.config import RunConfig
    from titans_platform.data import PreparedData
    from titans_platform.runs.execute import Tracked
    from titans_platform.runs.folder import RunFolder


@click.command()
@click.argument("config", type=click.Path(dir_okay=False, path_type=Path))
@set_option
@root_option
@click.option(
    "--workers",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Ray Train workers; 0 trains in this process.",
)
@click.option("--gpus", type=click.FloatRange(0), default=0, show_default=True, help="GPUs of each worker.")
@click.option("--name", help="Name of the run in MLflow; the config file's by default.")
@dry_run_option
@json_option
def train(
    config: Path,
    overrides: tuple[str, ...],
    root: Path,
    workers: int,
    gpus: float,
    name: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Train the model of CONFIG (a YAML file), measure it, and record both in MLflow.

    The run's folder is named by a hash of all that decides its numbers: the same command again shows the
    finished run, and goes on from the last checkpoint of an interrupted one.

    \b
    Example:
      titans train run.yaml --set model.memory.depth=3 --set optim.steps=200
    """
    from titans_platform.config import check_model
    from titans_platform.loading import load_config

    console = Console(stderr=as_json)
    cfg = load_config(config, overrides)
    check_model(cfg.model)
    if dry_run:
        _plan(cfg, root, workers, as_json, console)
        return
    result = _run(cfg, root, workers, gpus, name or config.stem, console)
    if as_json:
        echo_json(result)
        return
    console.print(measures_table(result))
    console.print(
        f"run {result['cell']}: {result['parameters']:,} parameters, {result['tokens']:,} tokens, "
        f"{result['train_seconds']:.0f} s, final loss {result['final_train_loss']:.4f} nats"
    )
    console.print(f"folder {root / 'cells' / result['cell']}", soft_wrap=True, highlight=False)


def _run(
    cfg: RunConfig, root: Path, workers: int, gpus: float, name: str, console: Console
) -> dict[str, Any]:
    from titans_platform.data import prepare
    from titans_platform.provenance import commit
    from titans_platform.runs.execute import cell_name, check
    from titans_platform.runs.folder import RunFolder
    from titans_platform.runs.session import session
    from titans_platform.runs.workers import Resources, fit
    from titans_platform.tracking import check_store

    check_store(root)
    with console.status("preparing data"):
        data = prepare(cfg.data, root)
    folder = RunFolder(root.resolve(), cell_name(cfg, data))
    if (done := folder.result()) is not None:
        console.print(f"run {folder.name} is finished; nothing to do")
        return done
    # what the config gets wrong is said before a store is made and a cluster is up
    check(cfg, data, max(1, workers))
    tracked = _tracked(cfg, root, data, folder.name, name)
    resources = Resources(workers, cfg.threads, gpus)
    with _held(folder), session(workers * cfg.threads, workers * gpus), _display(folder, console):
        folder.begin(commit())
        return fit(cfg, root, folder.name, resources, extra={"row": name}, tracked=tracked)


@contextmanager
def _held(folder: RunFolder) -> Iterator[None]:
    from titans_platform.errors import TitansError
    from titans_platform.provenance import commit

    try:
        with folder.hold(timeout=10):
            try:
                yield
            except Exception as error:
                folder.record_failure(error, commit())
                raise
    except TimeoutError as error:
        raise TitansError(f"{error}; wait for it, or stop it") from None


def _tracked(cfg: RunConfig, root: Path, data: PreparedData, cell: str, name: str) -> Tracked:
    from titans_platform.provenance import commit
    from titans_platform.runs.execute import Tracked
    from titans_platform.study.columns import params
    from titans_platform.study.spec import Cell
    from titans_platform.tracking import open_store

    store = open_store(root)
    tags = {"titans.commit": commit(), "titans.data": data.fingerprint}
    columns = params(Cell(name, cfg.seed, cfg), ())
    run_id = store.cell_run(cell, name, params=columns, config=cfg.model_dump(mode="json"), tags=tags)
    return Tracked(store.uri, run_id)


@contextmanager
def _display(folder: RunFolder, console: Console) -> Iterator[None]:
    """A live line fed by the run's progress.json, wherever the run is."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}"),
        TimeElapsedColumn(),
    )
    over = threading.Event()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task("starting", total=None, shown="")
        began = time.time()

        def watch() -> None:
            while not over.wait(0.5):
                state = folder.progress()
                if state and state["age"] < time.time() - began + 1:
                    total, step = state["steps"], state["step"]
                    bars.update(
                        bar, description=state["phase"], total=total, completed=step, shown=shown(state)
                    )

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()


def shown(state: dict[str, Any]) -> str:
    """Loss, rate and time left of a progress.json, as one line."""
    if "loss" not in state:
        return ""
    minutes, seconds = divmod(round(state["eta_seconds"]), 60)
    return f"loss {state['loss']:.3f}  {state['tokens_per_second']:,.0f} tok/s  {minutes}:{seconds:02d} left"


def _plan(cfg: RunConfig, root: Path, workers: int, as_json: bool, console: Console) -> None:
    from titans_core import LanguageModel
    from titans_platform.data import NotPrepared, open_prepared
    from titans_platform.runs.execute import build_model, cell_name
    from titans_platform.runs.folder import RunFolder

    plan: dict[str, Any] = {"workers": workers, "threads": cfg.threads, "steps": cfg.optim.steps}
    try:
        data = open_prepared(cfg.data, root)
    except NotPrepared:
        plan |= {"data": "to be prepared", "state": "missing"}
        model = LanguageModel(cfg.model)
    else:
        folder = RunFolder(root.resolve(), cell_name(cfg, data))
        plan |= {"data": data.fingerprint, "cell": folder.name, "state": folder.state()}
        model = build_model(cfg, data)
    plan["tokens"] = cfg.optim.steps * cfg.optim.global_batch_size * cfg.data.sequence_length
    plan["parameters"] = model.num_parameters()
    plan["state_bytes"] = model.state_bytes(cfg.data.sequence_length)
    if as_json:
        echo_json(plan)
    else:
        for key, value in plan.items():
            console.print(
                f"{key:12} {value:,}" if isinstance(value, int) else f"{key:12} {value}", highlight=False
            )
