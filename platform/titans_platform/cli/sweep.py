"""`titans sweep`: studies, from the grid to the table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem
from rich.console import Console
from rich.table import Table as RichTable

from titans_platform.cli import (
    checkpoint_option,
    cluster_option,
    dry_run_option,
    echo_json,
    json_option,
    root_option,
    scale_option,
    set_option,
)
from titans_platform.errors import TitansError, UsageError
from titans_platform.text import NONE, clock, count, flatten, plain_console, plural, short, table

if TYPE_CHECKING:
    from titans_platform.report.table import Table
    from titans_platform.study.grid import StudyRun

LONG = ("data.sources.", "eval.")
"""Fields too long for `sweep show`."""
PLAIN: dict[str, Any] = {"box": None, "padding": (0, 2, 0, 0), "header_style": "dim"}
"""Look of the tables of a dry run."""


def parse_rows(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> list[str]:
    """Return the rows of --rows; an empty list means all. Raises UsageError."""
    # a name may contain a comma, so the study splits them
    if values and not any(value.strip(" ,") for value in values):
        raise UsageError("--rows: is empty; give the name of a row, or leave the option out for all rows")
    return list(values)


rows_option = click.option(
    "--rows", multiple=True, metavar="NAME", help="Only these rows, separated by commas. May be repeated.",
    callback=parse_rows,
)  # fmt: skip
seeds_option = click.option(
    "--seeds", metavar="LIST", help="Seeds to use instead of the scale's, e.g. 0,1,2 or 0-4."
)


def complete_study(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete the name of a study, or a path."""
    from titans_platform.study.grid import known_studies

    names = [CompletionItem(name) for name in known_studies() if name.startswith(typed)]
    return names or [CompletionItem(typed, type="file")]


study_argument = click.argument("study", shell_complete=complete_study)


def study_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """STUDY with --scale, --rows, --seeds, --set and --root."""
    for option in (root_option, set_option, seeds_option, rows_option, scale_option, study_argument):
        command = option(command)
    return command


@click.group()
def sweep() -> None:
    """Studies: train and evaluate a grid of runs, and compare its table with the paper's.

    \b
    Example:
      titans sweep run ablation --scale laptop
    """


@sweep.command("list")
@root_option
@json_option
def list_studies(root: Path, as_json: bool) -> None:
    """List the paper's tables and figures with the progress under --root, and all studies.

    \b
    Example:
      titans sweep list
    """
    from titans_platform.study.grid import EXPERIMENT, known_studies, load_study
    from titans_platform.study.status import overview

    studies = []
    for path in known_studies().values():
        try:
            studies.append((load_study(str(path)), path))
        except UsageError as error:
            click.echo(f"invalid: {error}", err=True)
    items = overview(root.resolve(), {study.name: study for study, _ in studies})
    if as_json:
        of = {item.study.name: item.record() for item in items if item.study}
        records = [{
            "name": study.name, "description": study.description, "path": path,
            "scales": {name: {"about": s.about, "seeds": s.seeds} for name, s in study.scales.items()},
            "rows": [row.name for row in study.rows_at(next(iter(study.scales)))],
        } | of.get(study.name, {}) for study, path in studies]  # fmt: skip
        return echo_json(records)
    click.echo("The paper's tables and figures:")
    for item in items:
        click.echo("\n".join(item.lines()))
    for heading, experiment in (("Studies", False), ("experiments/", True)):
        listed = [(study, path) for study, path in studies if (path.name == EXPERIMENT) is experiment]
        click.echo(f"\n{heading}:" if listed else "", nl=bool(listed))
        for study, path in listed:
            click.echo(f"{study.name}: {study.description}")
            rows = len(study.rows_at(next(iter(study.scales))))
            click.echo(f"  scales {', '.join(study.scales)}; {rows} rows; {path}")


@sweep.command(short_help="Show a study's rows, columns and sizes.")
@study_argument
@scale_option
@set_option
@json_option
def show(study: str, scale: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Show a study's rows, the fields that each sets, and the columns at a scale.

    \b
    Example:
      titans sweep show ablation --scale 340M
    """
    from titans_platform.study.grid import expand, load_study

    file = load_study(study)
    scale = file.scale_name(scale)
    cells = expand(file, scale, overrides=overrides)
    size, configs = file.scales[scale], {cell.row: cell.config for cell in cells}
    if as_json:
        rows = {row: config.model_dump(mode="json") for row, config in configs.items()}
        return echo_json({"study": file.name, "scale": scale, "seeds": size.seeds, "rows": rows})
    console = plain_console()
    console.print(f"{file.name} at {scale}: {size.about} Seeds {', '.join(map(str, size.seeds))}.")
    for key, column in file.columns_at(scale).items():
        console.print(f"  {key}: {column.heading}")
    for row in file.rows_of(scale):
        console.print(f"  {row.name:30} {_changes(row.set) or 'the base'}")
        for key, expected in row.expected.items():
            direction = "better" if expected.better else "worse"
            console.print(f"    {key} should be {direction}. {expected.because}")
    for name, axis in file.axes_at(scale).items():
        console.print(f"{'one run of each for every' if axis.across else 'each at every'} {name}:")
        for value, sets in axis.steps():
            console.print(f"  {value!s:30} {_changes(sets)}")


def _changes(sets: Mapping[str, Any]) -> str:
    """Fields and values, without the long ones of LONG."""
    shown = {field: value for field, value in flatten(dict(sets)).items() if not field.startswith(LONG)}
    return ", ".join(f"{field}={value}" for field, value in shown.items())


@sweep.command(short_help="Run the cells that have no result, then write table and figures.")
@study_options
@click.option("--rerun-stale", is_flag=True, help="Also rerun cells that were trained at another commit.")
@click.option("--concurrency", type=click.IntRange(1), help="Cells in parallel  [default: all that fit]")
@checkpoint_option
@cluster_option
@dry_run_option
@click.option("--for", "gpus", metavar="NxGPU", help="Dry run: plan for these, e.g. 16xA100  [the scale's]")
@click.option("--price", type=click.FloatRange(0), help="Dry run: dollars of a GPU hour.")
@json_option
def run(
    rerun_stale: bool, concurrency: int | None, cluster: str | None, dry_run: bool, gpus: str | None,
    price: float | None, as_json: bool, **chosen: Any,
) -> int:  # fmt: skip
    """Run the cells of STUDY (a name, or a YAML file) that have no result, then write its table and figures.

    Idempotent: a cell is named by a hash of its config, data and defaults version; running the command again
    skips finished cells and resumes interrupted ones from their last checkpoints. Exit code 4: some of the
    requested cells have no result; the table always shows the whole study.

    \b
    Example:
      titans sweep run ablation --scale laptop --dry-run
      titans sweep run ablation --rows "LMM, w/o Momentum" --seeds 0-4
      titans sweep run ablation --scale 340M --dry-run --for 16xA100 --price 1.80
      titans sweep run ablation --scale 340M --cluster lab
    """
    from titans_platform.runs.ray_session import joined
    from titans_platform.study.plan import check_without_data, place, prepare

    # the current stream: while Ray runs, sys.stdout is a log file
    console, study = plain_console(file=sys.stderr if as_json else sys.stdout), _opened(**chosen)
    if cluster not in (None, "local"):
        from titans_platform.cli.cluster import run_study_on

        return run_study_on(cluster, click.get_current_context(), study)
    if dry_run:
        return _dry_run(study, rerun_stale, concurrency, gpus, price, console, as_json)
    if gpus or price is not None:
        raise UsageError(f"{'--for' if gpus else '--price'}: works only with --dry-run")
    # half a second of imports that a plan need not wait for
    from titans_platform.cli import live
    from titans_platform.report.publish import make as report_study
    from titans_platform.runs.reporter import send_left
    from titans_platform.study.run import run_cells, run_search, session
    from titans_platform.study.search import search_lines
    from titans_platform.tracking import check_store

    with joined(study.root):
        study, warning = place(study, rerun_stale, concurrency)
        check_without_data(study)
        for line in filter(None, [*study.restarts, warning]):
            console.print(line, soft_wrap=True)
        if study.todo:
            # refused before time is spent on data
            check_store(study.root)
            send_left(study.root)
        with study.lock():
            with live.preparing(console) as progress:
                study = prepare(study, progress)
            if study.todo or study.searching:
                with session(study) as opened:
                    if opened.searching:
                        with live.searching(opened, console):
                            study = opened = prepare(run_search(opened))
                    with live.running(opened, console):
                        run_cells(opened)
            table = report_study(study, console, link=bool(study.todo))
        state = search_lines(study.search.record()) if study.search else []
        for line in [*state, *(send_left(study.root) if study.todo else ())]:
            console.print(line, soft_wrap=True)
    return _exit_code(table, as_json)


def _dry_run(
    study: StudyRun, stale: bool, concurrency: int | None, gpus: str | None, price: float | None,
    console: Console, as_json: bool,
) -> int:  # fmt: skip
    """Print what would run, where, and what it may take; write nothing. Raises what a run would raise."""
    from titans_platform.runs.check import sizes
    from titans_platform.runs.ray_session import in_job
    from titans_platform.runs.spec import Machine
    from titans_platform.study.plan import MFU, check_without_data, costs, estimate, place

    refusal, warning, seconds, basis = None, "", None, ""
    planned = Machine.described(gpus, "--for") if gpus else study.scale.machine
    study = replace(study, machine=planned if gpus or not in_job() else None)
    with console.status("estimating what each row takes"):
        try:
            study, warning = place(study, stale, concurrency)
            check_without_data(study)
            seconds, basis = estimate(study)
        except TitansError as error:
            # the rest is worth seeing all the same; a cluster that is only described has not failed
            refusal, basis = UsageError(str(error)) if study.machine else error, str(error)
        rows = costs(study)
    todo = study.todo
    cells = [{
        "cell": cell.name, "row": cell.row, "seed": cell.seed,
        "parameters": sizes(cell.config)["parameters"], "tokens": cell.config.tokens,
        "state": "stale" if cell in study.stale else cell.folder(study.root).state(), "runs": cell in todo,
    } for cell in study.cells]  # fmt: skip
    trials = (search := study.search) and {
        "trials": search.search.trials, "finished": search.finished, "rungs": search.milestones,
        "tokens_at_most": search.tokens_of_grid,
        "tokens_least": search.tokens_per_step * search.milestones[0] * search.search.trials,
        "space": search.search.model_dump(mode="json")["space"],
    }  # fmt: skip
    record = {
        "study": study.study.name, "scale": study.scale_name, "cells": cells, "to_run": len(todo),
        "concurrency": study.concurrency, "resources": study.scale.resources.model_dump(), "search": trials,
        "machine": study.machine and asdict(study.machine), "mfu": MFU, "costs": rows, "price": price,
        "estimate_seconds": seconds, "estimate_basis": basis, "warning": warning or None,
        "restarts": study.restarts, "refused": str(refusal) if refusal else None,
    }  # fmt: skip
    if as_json:
        echo_json(record)
    else:
        _print_plan(record, console)
    if refusal:
        raise refusal
    return 0


def _print_plan(record: dict[str, Any], console: Console) -> None:
    """Print the plan as text."""
    grid = table("cell", "row", "seed", "parameters", "tokens", "state", left=2, **PLAIN)
    grid.columns[-1].justify = "left"
    for cell in record["cells"]:
        numbers = [str(cell["seed"]), count(cell["parameters"]), count(cell["tokens"])]
        grid.add_row(cell["cell"] or NONE, cell["row"], *numbers, cell["state"])
    console.print(grid)
    lines = []
    if costs := {cost["row"]: cost for cost in record["costs"]}:
        console.print(_costs_table(costs.values()))
        gpu, gpus = record["machine"]["gpu"], record["machine"]["gpus"]
        lines += [
            f"For {gpus:g}x{gpu['name']} of {gpu['memory']:g} GiB; estimates: tokens/s from FLOPs at an",
            f"assumed MFU of {record['mfu']:.0%}, memory from what torch.compile saves for a backward pass.",
        ]
        left = [costs[cell["row"]] for cell in record["cells"] if cell["runs"]]
        if all(cost["gpu_hours"] for cost in left):
            hours = sum(cost["gpu_hours"] for cost in left)
            dollars = f", ${record['price'] * hours:,.0f}" if record["price"] is not None else ""
            lines.append(f"Training takes about {hours:,.0f} GPU hours{dollars}.")
    if not all(cell["cell"] for cell in record["cells"]):
        lines.append("Cells are named once the data are prepared; the run does that first.")
    if search := record["search"]:
        low, high = (count(search[key]) for key in ("tokens_least", "tokens_at_most"))
        lines.append(
            f"First a search: {search['trials']} trials ({search['finished']} finished), rungs after "
            f"{', '.join(map(str, search['rungs']))} steps, {low} to {high} tokens; the best trial becomes "
            "a row and runs with the same seeds."
        )
    resources, workers = record["resources"], record["resources"]["workers"]
    least, most = (workers, workers) if isinstance(workers, int) else workers
    each = plural(most, "worker") if least == most else f"{least} to {most} workers"
    each += ", each" if most > 1 else ""
    lines.append(
        f"{record['to_run']} of {len(record['cells'])} cells to run, {record['concurrency']} at once, "
        f"each on {each} with {resources['cpus_per_worker']} CPU and {resources['gpus_per_worker']:g} GPU."
    )
    lines += filter(None, [*record["restarts"], record["warning"]])
    if not record["refused"]:
        guess = "unknown" if record["estimate_seconds"] is None else clock(record["estimate_seconds"])
        lines.append(f"Time: about {guess} (from {record['estimate_basis']}).")
    for line in lines:
        console.print(line, soft_wrap=True)


def _costs_table(costs: Iterable[Mapping[str, Any]]) -> RichTable:
    """Lay out what a cell of each row takes on GPUs."""
    grid = table("row", "GiB a GPU", "state, MB", "tokens/s", "hours", "GPU hours", **PLAIN)
    for cost in costs:
        numbers = [NONE if cost[key] is None else short(cost[key], 1) for key in ("hours", "gpu_hours")]
        gib, state = short(cost["gpu_bytes"] / 2**30, 1), short(cost["state_bytes"] / 1e6, 1)
        grid.add_row(cost["row"], gib, state, count(cost["tokens_per_second"]), *numbers)
    return grid


@sweep.command(short_help="Show a study's progress, whether or not its driver is alive.")
@click.argument("study", required=False, shell_complete=complete_study)
@scale_option
@root_option
@json_option
def status(study: str | None, scale: str, root: Path, as_json: bool) -> None:
    """Show the progress of a study, or of all of them, from the files under --root alone.

    Works on any machine that mounts the folder, while the study runs or after its driver died.

    \b
    Example:
      titans sweep status ablation --scale laptop
    """
    from titans_platform.cli.live import running_line
    from titans_platform.study.search import search_lines
    from titans_platform.study.status import counted, labels_of, read_status

    root = root.resolve()
    studies = [read_status(root, study, scale)] if study else [read_status(root, x) for x in labels_of(root)]
    if as_json:
        records = [each | {"cells": [cell._asdict() for cell in each["cells"]]} for each in studies]
        return echo_json(records[0] if study else records)
    console = plain_console()
    for each in studies:
        driver = "a sweep run is working on it" if each["running"] else "no sweep run is working on it"
        cells = f"{len(each['cells'])} cells, {counted(each['counts'])}"
        console.print(f"{each['study']}: {cells}; {driver}", style="bold")
        grid, lines = RichTable.grid(padding=(0, 2, 0, 0)), search_lines(each["search"])
        for item in each["cells"]:
            progress, seed = item.progress, f"seed {item.seed}"
            if item.state == "running":
                grid.add_row("running", *running_line(item), f"{clock(progress.get('age'))} ago")
            elif item.state == "interrupted":
                reached = f"{progress.get('step', 0)}/{progress.get('steps', '?')}"
                grid.add_row("interrupted", item.row, seed, reached)
            elif item.state == "failed":
                lines.append(f"failed  {item.row}, {seed} ({item.cell}): {item.reason}")
        if grid.rows:
            console.print(grid)
        for line in lines:
            console.print(line, soft_wrap=True)
    if not studies:
        click.echo(f"no study has run under {root}")


@sweep.command(short_help="Write a study's report: page, tables, figures.")
@study_options
@click.option("--ui", metavar="ADDRESS", help="MLflow UI for the page's links, e.g. http://127.0.0.1:5001.")
@json_option
def report(ui: str | None, as_json: bool, **chosen: Any) -> int:
    """Rewrite the report of a study: a self-contained HTML page, and the table as Markdown, LaTeX and CSV.

    The table is the whole study's; exit code 4: some of the requested cells have no result.

    \b
    Example:
      titans sweep report ablation --scale laptop
    """
    from titans_platform.report.publish import make as report_study

    return _exit_code(report_study(_opened(**chosen), plain_console(stderr=as_json), address=ui), as_json)


def _opened(study: str, scale: str, root: Path, **chosen: Any) -> StudyRun:
    """Open the study that a command's options select."""
    from titans_platform.study.plan import open_study

    overrides = chosen["overrides"] + chosen.get("checkpoint_every", ())
    seeds = parse_seeds(chosen["seeds"])
    return open_study(study, scale, root, rows=chosen["rows"], seeds=seeds, overrides=overrides)


def _exit_code(table: Table, as_json: bool) -> int:
    from titans_platform.report.publish import as_record

    if as_json:
        echo_json(as_record(table))
    return 4 if table.unfinished else 0


MAX_SEEDS = 10_000
"""Most seeds of one command."""


def parse_seeds(text: str | None) -> list[int]:
    """`0,2,5-7` as a list. Raises UsageError."""
    if text is None:
        return []
    parts = [part.partition("-") for part in text.split(",")]
    try:
        ranges = [range(int(low), int(high if dash else low) + 1) for low, dash, high in parts]
    except ValueError:
        raise UsageError(f"--seeds {text}: should be whole numbers, e.g. 0,1,2 or 0-4") from None
    count = sum(max(0, seeds.stop - seeds.start) for seeds in ranges)
    if count > MAX_SEEDS:
        raise UsageError(f"--seeds {text}: {count:,} seeds; give at most {MAX_SEEDS:,}")
    seeds = list(chain.from_iterable(ranges))
    if not seeds:
        raise UsageError(f"--seeds {text}: names no seed; give e.g. 0,1,2 or 0-4, the lower one first")
    return seeds
