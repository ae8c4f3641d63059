"""`titans eval`: evaluate a checkpoint, also by position in long texts; `titans tasks`: chance and floors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from titans_platform import text
from titans_platform.cli import (
    beyond_training,
    bucket_tables,
    echo_json,
    json_option,
    measures_table,
    root_option,
    scale_option,
    set_option,
)
from titans_platform.errors import UsageError

if TYPE_CHECKING:
    from titans_platform.config import RunConfig, TaskConfig
    from titans_platform.data import PreparedData
    from titans_platform.evals.by_position import ByPosition
    from titans_platform.objectives import Objective

ROWS = 64
"""Default length of a text of --by-position in training rows; less if the texts are shorter."""
Asked = tuple[str, "TaskConfig", int, Any]
"""A task of `titans tasks`: its column, its config, its row length in tokens, its tokenizer."""


@click.command("eval")
@click.argument("run")
@click.option("--by-position", is_flag=True, help="Loss by position in long texts, state carried or new.")
@click.option("--rows", type=int, help="Length of a --by-position text in rows  [default: at most 64]")
@click.option("--read", "file", metavar="FILE", help="Text for --by-position: a file, folder or glob.")
@click.option("--other-data", is_flag=True, help="Evaluate on the sources as they are now.")
@set_option
@root_option
@json_option
def evaluate(
    run: str, by_position: bool, rows: int | None, file: str | None, other_data: bool,
    overrides: tuple[str, ...], root: Path, as_json: bool,
) -> None:  # fmt: skip
    """Evaluate RUN and print a table of values, chance levels and floors.

    RUN is a run's name (or a prefix of it), its folder, its MLflow run id, or the folder of one checkpoint.
    --set overrides the evaluation: only eval.* may be set. It is measured on the data it was trained on; if
    they are gone, --other-data prepares its sources anew.

    --by-position measures the gain from the carried state beyond the training length. Long texts are read
    with the state carried from their start, with a fresh state every row, and with a fresh state that first
    reads a window of preceding rows. Prints a table and saves a figure to the run's folder.

    \b
    Example:
      titans eval 3f2a91c0 --set eval.items=500
      titans eval 3f2a91c0 --by-position --rows 64 --read book.txt
    """
    import torch

    from titans_platform import evals
    from titans_platform.evals.ngrams import count_text
    from titans_platform.runs.folder import Result
    from titans_platform.runs.load import find_checkpoint, load_checkpoint, read_config
    from titans_platform.training.loop import deterministic

    console = text.plain_console(stderr=as_json)
    point = find_checkpoint(run, root)
    if other := next((o for o in overrides if not o.startswith("eval.")), None):
        raise UsageError(f"--set {other}: the config of a trained run is fixed; only eval.* may be set")
    cfg = read_config(point, overrides)
    if by_position:
        if rows is not None and rows < 2:
            cause = f"{rows} is too few: state is carried from the second row on"
            raise UsageError(f"--rows: {cause}; give 2 or more")
        return _by_position(point, cfg, rows, file, other_data, root, as_json, console)
    if rows is not None or file is not None:
        raise UsageError(f"{'--rows' if rows is not None else '--read'}: works only with --by-position")
    with console.status("evaluating"), deterministic(cfg.seed, cfg.threads):
        model, step, objective = load_checkpoint(point, cfg)
        data = _run_data(objective, point, root, other_data)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        measured = evals.evaluate(
            model.to(device), data, cfg.eval, cfg.data.sequence_length, device=device,
            precision=cfg.optim.precision, ngrams=partial(count_text, data, cfg),
        )  # fmt: skip
    if as_json:
        return echo_json({"cell": point.parents[1].name, "step": step, **measured})
    result = Result(cell=point.parents[1].name, **measured)
    for table in (measures_table(result), *bucket_tables(result)):
        console.print(table)
    console.print(f"run {result.cell}, step {step:,}")


def _by_position(
    point: Path, cfg: RunConfig, rows: int | None, file: str | None, other_data: bool, root: Path,
    as_json: bool, console: Console,
) -> None:  # fmt: skip
    """Evaluate the checkpoint ``point``, print the table and save the figure to the run's folder."""
    import torch

    from titans_core import LanguageModel
    from titans_platform.evals import by_position, evaluating
    from titans_platform.evals.scoring import Scorer
    from titans_platform.report.figures import loss_picture
    from titans_platform.report.picture import save
    from titans_platform.runs.load import load_checkpoint
    from titans_platform.training.loop import deterministic

    row, folder = cfg.data.sequence_length, point.parents[1]
    field, remedy = "data.sources", "raise a text source's validation_fraction"
    if file:
        field, remedy = "--read", "give a longer text"
    if rows:
        field = "--rows"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with deterministic(cfg.seed, cfg.threads):
        model, step, objective = load_checkpoint(point, cfg)
        if not isinstance(model, LanguageModel):
            kind = cfg.objective.kind
            raise UsageError(f"--by-position: objective {kind} does not read text; next_token does")
        validation: Any = None if file else _run_data(objective, point, root, other_data)
        with _read(cfg, file, console) if file else nullcontext(validation) as data:
            rows = rows or max(2, min(ROWS, by_position.longest_text(data) // row))
            texts = by_position.long_texts(data, rows, cfg.eval.perplexity_tokens, field, remedy)
            scorer = Scorer(model.to(device), data.tokenizer, device, cfg.eval.batch_tokens)
            with evaluating(model), console.status(f"reading {len(texts)} texts of {rows} rows"):
                losses = by_position.read_by_position(scorer, texts, row)
    # the user's text must not overwrite the figure of the validation data
    suffix = f"-{re.sub(r'[^A-Za-z0-9_-]+', '-', Path(file).name)}" if file else ""
    picture = loss_picture(losses, f"by-position{suffix}", f"Loss by position, run {folder.name}")
    figures = save(picture, folder)
    numbers = as_numbers(losses)
    if as_json:
        paths = [str(path) for path in figures]
        return echo_json({"cell": folder.name, "step": step, **numbers, "figures": paths})
    console.print(position_table(numbers))
    mean, stderr = numbers["gain"], numbers["stderr"]
    sample = f"{text.plural(losses.texts, 'text')} of {losses.length:,} tokens"
    sample += "; s.e. over 16 parts of it" if losses.texts == 1 else ""
    gain = f"{mean:+.3f} ± {stderr:.3f} nats a token beyond the first row ({sample})"
    console.print(f"gain from the carried state: {gain}")
    if losses.length > cfg.trained_context:
        console.print(beyond_training(losses.length, cfg.trained_context))
    console.print(f"run {folder.name}, step {step:,}; figure {figures[0]}", soft_wrap=True)


def _run_data(objective: Objective[Any], point: Path, root: Path, other_data: bool) -> Any:
    """Return the data that a checkpoint's run was trained on. Raises UsageError.

    With ``other_data``, its sources as they are now.
    """
    from titans_platform.config import hashes_of
    from titans_platform.data import NotPrepared
    from titans_platform.objectives.base import DataChanged
    from titans_platform.runs.folder import RunFolder

    if other_data:
        return objective.prepare(root)
    record = RunFolder.at(point.parents[1]).record()
    files = record.get("files", {})
    try:
        for name, now in hashes_of(objective.cfg.eval.model_dump(mode="json")).items():
            if files.get(name, now) != now:
                raise DataChanged(f"eval.columns: {name} has changed since the run began")
        return objective.reopen(root, record.get("data", ""))
    except (DataChanged, NotPrepared) as error:
        fix = "--other-data prepares and evaluates on what its sources hold now, which it may have trained on"
        raise UsageError(f"{str(error).partition(';')[0]}; {fix}") from None


@contextmanager
def _read(cfg: RunConfig, file: str, console: Console) -> Iterator[PreparedData]:
    """Open the user's text, held out whole and deleted afterwards."""
    from titans_platform.config import SourceConfig
    from titans_platform.data import prepare

    source = SourceConfig(kind="files", path=file, weight=0, validation_fraction=1.0)
    fields = {"sources": (source,), "store": None}
    with TemporaryDirectory(prefix="titans-read-") as folder:
        try:
            with console.status("tokenising"):
                data = prepare(cfg.data.model_copy(update=fields), Path(folder))
        except UsageError as error:
            # the user wrote an option, not this field of a config
            raise UsageError(re.sub(r"^data\.sources\.0(\.path)?: ", "--read: ", str(error))) from None
        yield data


def position_table(numbers: dict[str, Any]) -> Table:
    """Lay out the result of `as_numbers`: perplexities by position; the gain, from the second row on."""
    window = numbers["best_window"]
    best = "best window" + (f"\n({text.plural(window, 'row')})" if window else "")
    table = text.table("position", "carried", "fresh", best, "gain ± s.e. (nats)", left=0)
    for each in numbers["positions"]:
        losses = [each.get(mode) for mode in ("carried", "fresh", "window")]
        ppl = ["-" if loss is None else f"{math.exp(loss):,.2f}" for loss in losses]
        gain = f"{each['gain']:+.3f} ± {each['stderr']:.3f}" if each["first"] > numbers["row"] else "-"
        table.add_row(f"{each['first']:,}-{each['last']:,}", *ppl, gain)
    return table


def as_numbers(result: ByPosition) -> dict[str, Any]:
    """Return the table as a JSON value; losses in nats."""
    modes = {mode.partition("-")[0]: mode for mode in result.shown}
    buckets = []
    for first, last in result.buckets():
        losses = {name: result.loss(mode, first, last)[0] for name, mode in modes.items()}
        gain, stderr = result.gain(first, last)
        buckets.append({"first": first, "last": last, **losses, "gain": gain, "stderr": stderr})
    gain, stderr = result.gain()
    return {
        "gain": gain, "stderr": stderr, "texts": result.texts, "tokens": result.length, "row": result.row,
        "best_window": result.best_window and int(result.best_window.partition("-")[2]),
        "loss": {name: result.loss(mode)[0] for name, mode in modes.items()}, "positions": buckets,
    }  # fmt: skip


@click.command()
@click.argument("study", required=False)
@scale_option
@click.option("--task", "tasks", multiple=True, metavar="YAML", help="A task, instead of a study's.")
@click.option("--length", type=click.IntRange(2), help="Row length in bytes  [default: 64, 512 for prose]")
@json_option
def tasks(
    study: str | None, scale: str, tasks: tuple[str, ...], length: int | None, as_json: bool
) -> None:  # fmt: skip
    """Show the tasks of STUDY: chance, the score of each heuristic, and the floor.

    A heuristic is a shortcut that a model could use instead of what the task is meant to measure; the best
    one is the task's floor. Without STUDY and --task, all generated tasks are shown with their defaults.

    \b
    Example:
      titans tasks state_tracking
      titans tasks --task '{task: recall, options: {pairs: 8}}' --length 128
    """
    from titans_platform.tasks import build_generated

    if study and tasks:
        raise UsageError("--task: give either a study or --task")
    if scale and not study:
        raise UsageError("--scale: works only with STUDY")
    if length and study:
        raise UsageError("--length: works only without STUDY, whose columns have lengths")
    listed = []
    for column, config, tokens, tokenizer in _of_study(study, scale) if study else _of_options(tasks, length):
        task = build_generated(config)
        floor = task.floor(tokens, tokenizer)
        listed.append({
            "task": f"{column}/{task.label}" if column else task.label,
            "options": task.options.model_dump(mode="json"), "length": tokens, "chance": task.chance,
            "heuristics": floor.scores if floor else {}, "floor": floor and floor.value,
            "heuristic": floor and floor.heuristic,
        })  # fmt: skip
    if as_json:
        return echo_json(listed)
    table = text.table("task@tokens, heuristics below it", "chance %", "floor %")
    table.columns[0].no_wrap = True
    for task in listed:
        floor = "-" if task["floor"] is None else f"{100 * task['floor']:.1f}"
        label = f"{task['task']}@{task['length']}"
        table.add_row(label, f"{100 * task['chance']:.1f}", floor, style="bold")
        for name, value in task["heuristics"].items():
            table.add_row(f"  {name}", "", f"{100 * value:.1f}")
    text.plain_console().print(table)


def _of_options(tasks: tuple[str, ...], length: int | None) -> Iterator[Asked]:
    """Yield the tasks given as YAML, or all whose options have defaults."""
    from titans_platform.config import TaskConfig
    from titans_platform.data import load_tokenizer
    from titans_platform.loading import parse_yaml, validate
    from titans_platform.tasks import TASKS, GeneratedTask

    configs = [validate(TaskConfig, parse_yaml(task, "--task"), "--task") for task in tasks]
    for name, kind in () if tasks else sorted(TASKS.items()):
        needs = any(field.is_required() for field in kind.Options.model_fields.values())
        if issubclass(kind, GeneratedTask) and not needs and name != "babilong_hub":
            configs.append(TaskConfig(task=name))
    for config in configs:
        # RULER's sentences need longer rows than the other tasks
        words = config.task in ("needle", "reasoning") and config.options.get("style") != "compact"
        default = 512 if words else 64
        yield "", config, max(length or default, 0 if tasks else default), load_tokenizer("byte")


def _of_study(name: str, scale: str) -> Iterator[Asked]:
    """Yield each task of the study's columns once, at each of its lengths."""
    from titans_platform.data import load_tokenizer
    from titans_platform.study.grid import expand, load_study
    from titans_platform.tasks import GeneratedTask, build_task, row_length

    seen: set[tuple[str, int]] = set()
    for cell in expand(load_study(name), scale):
        for column, configs in cell.config.eval.columns.items():
            for config in (each for each in configs if isinstance(build_task(each), GeneratedTask)):
                for multiple in config.lengths:
                    length = row_length(multiple, cell.config.data.sequence_length)
                    key = config.model_dump_json(exclude={"lengths", "weight"}), length
                    if key not in seen:
                        seen.add(key)
                        yield column, config, length, load_tokenizer(cell.config.data.tokenizer)
