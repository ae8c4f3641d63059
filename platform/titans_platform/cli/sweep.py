"""`titans sweep`: studies, from the grid to the table."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from titans_platform.cli import (
    checkpoint_option,
    cluster_option,
    dry_run_option,
    echo_json,
    json_option,
    root_option,
    set_option,
)
from titans_platform.errors import UsageError

if TYPE_CHECKING:
    from titans_platform.config import RunConfig, TaskConfig
    from titans_platform.report.numbers.table import Table
    from titans_platform.study.plan import StudyRun
    from titans_platform.study.spec import Study

MAX_SEEDS = 1000
"""Seeds of one command; more are a slip of the keyboard, and would be counted for minutes."""
LONG = ("data.sources.", "eval.")
"""Fields too long for `sweep show`."""


def split(values: tuple[str, ...]) -> list[str]:
    """Names given one by one or with commas."""
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def parse_rows(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> list[str]:
    """The rows of --rows; none given means all. Raises UsageError."""
    if values and not split(values):
        raise UsageError("--rows: names no row; give a name, or leave the option out for all")
    # a name may hold a comma: only the study knows
    return list(values)


scale_option = click.option("--scale", default="laptop", show_default=True, help="Size of the study.")
rows_option = click.option(
    "--rows",
    multiple=True,
    metavar="NAME",
    help="Only this row, or several with commas. May be repeated.",
    callback=parse_rows,
)
seeds_option = click.option(
    "--seeds", metavar="LIST", help="Seeds in place of the scale's own, e.g. 0,1,2 or 0-4."
)


def study_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """STUDY with --scale, --rows, --seeds, --set and --root."""
    options = (click.argument("study"), scale_option, rows_option, seeds_option, set_option, root_option)
    return reduce(lambda below, option: option(below), reversed(options), command)


@click.group()
def sweep() -> None:
    """Studies: a grid of runs trained, measured and put in a table beside the paper's.

    \b
    Example:
      titans sweep run ablation --scale laptop
    """


@sweep.command("list")
@root_option
@json_option
def list_studies(root: Path, as_json: bool) -> None:
    """List the paper's tables and figures, what of each has been run under --root, and all studies.

    \b
    Example:
      titans sweep list
    """
    from titans_platform.study.grid import known_studies, load_study
    from titans_platform.study.overview import overview

    studies = []
    for path in known_studies().values():
        try:
            studies.append((load_study(str(path)), path))
        except UsageError as error:
            click.echo(f"wrong: {error}", err=True)
    items = overview(root.resolve(), {study.name: study for study, _ in studies})
    if as_json:
        of = {item.study.name: item.record() for item in items if item.study}
        echo_json([_about(*each) | of.get(each[0].name, {}) for each in studies])
        return
    click.echo("The paper's tables and figures:")
    for item in items:
        click.echo("\n".join(item.lines()))
    click.echo("\nStudies:")
    for study, path in studies:
        click.echo(f"{study.name}: {' '.join(study.description.split())}")
        rows = len(study.rows_at(next(iter(study.scales))))
        click.echo(f"  scales {', '.join(study.scales)}; {rows} rows; {path}")


def _about(study: Study, path: Path) -> dict[str, Any]:
    scales = {name: {"about": scale.about, "seeds": scale.seeds} for name, scale in study.scales.items()}
    rows = [row.name for row in study.rows_at(next(iter(study.scales)))]
    about = {"name": study.name, "description": study.description, "path": path}
    return about | {"scales": scales, "rows": rows}


@sweep.command(short_help="Show a study's rows, columns and sizes.")
@click.argument("study")
@scale_option
@set_option
@json_option
def show(study: str, scale: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Show a study's rows, what each changes, and the columns at a scale.

    \b
    Example:
      titans sweep show ablation --scale 340M
    """
    from titans_platform.study.grid import expand, load_study

    found = load_study(study)
    cells = expand(found, scale, overrides=overrides)
    if as_json:
        configs = {cell.row: cell.config.model_dump(mode="json") for cell in cells}
        echo_json({"study": found.name, "scale": scale, "seeds": found.scale(scale).seeds, "rows": configs})
        return
    _show(Console(highlight=False), found, scale, [cell.config for cell in cells])


def _show(console: Console, study: Study, scale: str, configs: Sequence[RunConfig]) -> None:
    size = study.scale(scale)
    console.print(f"[bold]{study.name}[/] at {scale}: {' '.join(size.about.split())}")
    runs = dict.fromkeys(_run_text(config) for config in configs)
    console.print(f"{', '.join(runs)}; seeds {', '.join(map(str, size.seeds))}")
    columns = {key: tasks for config in configs for key, tasks in config.eval.columns.items()}
    for key, tasks in columns.items():
        console.print(f"  {key}: {', '.join(map(_task_text, tasks))}")
    for row in study.rows_of(scale):
        console.print(f"  {row.name:30} {_changes(row.set) or 'the base'}", markup=False)
        for key, expected in row.expected.items():
            way = "better" if expected.better else "worse"
            console.print(f"    {key} should be {way}. {' '.join(expected.because.split())}", markup=False)
    for name, axis in study.axes_at(scale).items():
        console.print(f"{'each trained once for every' if axis.across else 'each at every'} {name}:")
        for value, sets in axis.steps():
            console.print(f"  {value!s:30} {_changes(sets)}", markup=False)


def _changes(sets: Mapping[str, Any]) -> str:
    """Fields and values; what is trained on and asked is in the columns and the file."""
    from titans_platform.text import flatten

    shown = {field: value for field, value in flatten(dict(sets)).items() if not field.startswith(LONG)}
    return ", ".join(f"{field}={value}" for field, value in shown.items())


def _run_text(config: RunConfig) -> str:
    rows = f"{config.optim.global_batch_size} rows of {config.row_tokens} tokens"
    return f"{config.optim.steps} steps of {rows}"


def _task_text(task: TaskConfig) -> str:
    kind = f" {task.options['kind']}" if "kind" in task.options else ""
    lengths = "" if task.lengths == (1.0,) else f" at {'/'.join(f'{x:g}' for x in task.lengths)}x"
    return f"{task.task}{kind}{lengths}"


@sweep.command(short_help="Run the cells that are missing, then draw table and figure.")
@study_options
@click.option("--rerun-stale", is_flag=True, help="Run again the cells that another commit made.")
@click.option("--concurrency", type=click.IntRange(1), help="Cells at once; as many as fit by default.")
@checkpoint_option
@cluster_option
@dry_run_option
@json_option
def run(
    rerun_stale: bool,
    concurrency: int | None,
    cluster: str | None,
    dry_run: bool,
    as_json: bool,
    **chosen: Any,
) -> int:
    """Run the cells of STUDY (a name, or a YAML file) that are missing, then draw its table and figure.

    A cell's name is a hash of all that decides its numbers, so the same command again runs nothing twice
    and goes on from the last checkpoint of what was interrupted. Exit code 4: some of the cells asked for
    have no result; the table always shows the whole study.

    \b
    Example:
      titans sweep run ablation --scale laptop --dry-run
      titans sweep run ablation --rows "LMM, w/o Momentum" --seeds 0-4
      titans sweep run ablation --scale 340M --cluster lab
    """
    from titans_platform.runs.ray_session import joined
    from titans_platform.study.drive import dry_run as show_plan
    from titans_platform.study.drive import run_study

    began = time.time()
    console, opened = _console(as_json), _opened(**chosen)
    if cluster not in (None, "local"):
        from titans_platform.cli.cluster import run_study_on

        return run_study_on(cluster, click.get_current_context(), opened.cells)
    if dry_run:
        found, refusal = show_plan(opened, rerun_stale, concurrency, console, quiet=as_json)
        if as_json:
            echo_json(found)
        if refusal:
            raise refusal
        return 0
    # half a second of imports that a plan need not wait for
    from titans_platform.report.publish import make as report_study

    with joined(chosen["root"]):
        table = run_study(
            opened,
            console,
            lambda whole, ran: report_study(whole, console, link=ran),
            rerun_stale=rerun_stale,
            concurrency=concurrency,
            began=began,
        )
    return _exit_code(table, as_json)


@sweep.command(short_help="Tell how a study is going, running or dead.")
@click.argument("study", required=False)
@scale_option
@root_option
@json_option
def status(study: str | None, scale: str, root: Path, as_json: bool) -> None:
    """Tell how a study is going, or all of them, from the files under --root alone.

    Any machine that sees the folder can ask: while the study runs, from another shell, or after it died.

    \b
    Example:
      titans sweep status ablation --scale laptop
    """
    from titans_platform.study.status import print_status, read_status, status_of, studies_under

    root = root.resolve()
    if study is not None:
        found = [read_status(study, scale, root)]
    else:
        found = [status_of(label, root) for label in studies_under(root)]
    if as_json:
        echo_json(found if study is None else found[0])
        return
    for each in found:
        print_status(each, Console())
    if not found:
        click.echo(f"no study has run under {root}")


@sweep.command(short_help="Write a study's report: page, tables, figures.")
@study_options
@click.option("--ui", metavar="ADDRESS", help="Where the page's links lead, e.g. http://127.0.0.1:5001.")
@json_option
def report(ui: str | None, as_json: bool, **chosen: Any) -> int:
    """Write the report of a study anew: one HTML page that needs nothing beside it, and the table as
    Markdown, LaTeX and CSV. The table is the whole study's; exit code 4: cells asked for are missing.

    \b
    Example:
      titans sweep report ablation --scale laptop
    """
    from titans_platform.report.publish import make as report_study

    return _exit_code(report_study(_opened(**chosen), _console(as_json), address=ui), as_json)


def _opened(
    study: str,
    scale: str,
    root: Path,
    rows: list[str],
    seeds: str | None,
    overrides: tuple[str, ...],
    checkpoint_every: tuple[str, ...] = (),
) -> StudyRun:
    """The study that the options of a command choose."""
    from titans_platform.study.cells import open_study

    overrides += checkpoint_every
    return open_study(study, scale, root, rows=rows, seeds=parse_seeds(seeds), overrides=overrides)


def _console(as_json: bool) -> Console:
    """The stream as it is now: while Ray runs, sys.stdout leads to its log."""
    return Console(file=sys.stderr if as_json else sys.stdout)


def _exit_code(table: Table, as_json: bool) -> int:
    from titans_platform.report.numbers.table import as_record

    if as_json:
        echo_json(as_record(table))
    return 4 if table.unfinished else 0


def parse_seeds(text: str | None) -> list[int]:
    """`0,2,5-7` as a list. Raises UsageError."""
    if text is None:
        return []
    seeds: list[int] = []
    for part in text.split(","):
        low, dash, high = part.partition("-")
        try:
            numbers = range(int(low), int(high) + 1) if dash else range(int(low), int(low) + 1)
        except ValueError:
            raise UsageError(f"--seeds {text}: should be whole numbers, e.g. 0,1,2 or 0-4") from None
        if len(seeds) + len(numbers) > MAX_SEEDS:
            raise UsageError(f"--seeds {text}: {len(seeds) + len(numbers):,} seeds; give {MAX_SEEDS} at most")
        seeds.extend(numbers)
    if not seeds:
        raise UsageError(f"--seeds {text}: names no seed; give e.g. 0,1,2 or 0-4, the lower one first")
    return seeds
