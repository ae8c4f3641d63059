"""A study from the command line's point of view: open, plan, run, report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from titans_platform.config import DataConfig, RunConfig
from titans_platform.errors import TitansError, UsageError, within
from titans_platform.loading import nearest
from titans_platform.study import render
from titans_platform.study.cells import CellFolder, read_json
from titans_platform.study.ledger import Marks, account, ledger_line, write_ledger
from titans_platform.study.plan import Plan, estimate, make_plan, this_machine, train_tokens
from titans_platform.study.progress import clock, look
from titans_platform.study.report import FIGURE, TABLE, log_views, write_views
from titans_platform.study.run import (
    MANIFEST,
    StudyRun,
    aside,
    execute,
    naming,
    only_driver,
    ray_of,
    write_manifest,
)
from titans_platform.study.search import (
    FOUND,
    Searched,
    check_space,
    execute_search,
    followed,
    read_search,
    search_line,
    set_line,
    trial_row,
    write_search,
)
from titans_platform.study.space import Search
from titans_platform.study.spec import Cell, expand, load_study, resolve
from titans_platform.study.table import Table, build_table

if TYPE_CHECKING:
    from titans_core import LanguageModel


@dataclass(frozen=True)
class Opened:
    """A study at a scale with the cells asked for, every config and task checked."""

    run: StudyRun
    cells: tuple[Cell, ...]
    whole: tuple[Cell, ...]
    """All cells of the table: the scale's own, those asked for, and those of other seeds that have begun."""

    @property
    def named(self) -> bool:
        """Whether the data are prepared, so that cells have names."""
        return all(cell.name for cell in self.cells)

    @property
    def unfinished(self) -> int:
        """Cells asked for that have no result."""
        root = self.run.root
        return sum(not (cell.name and cell.folder(root).shown_result()) for cell in self.cells)


def open_study(
    study: str,
    scale: str,
    root: Path,
    *,
    rows: Sequence[str] = (),
    seeds: Sequence[int] = (),
    overrides: Sequence[str] = (),
) -> Opened:
    """Read and check a study; cells get their names where the data are prepared already."""
    from titans_platform.provenance import commit

    found = load_study(study)
    run = StudyRun(found, found.scale_name(scale), root.resolve(), commit(), tuple(overrides))
    search = read_search(run)
    if search:
        _check_search(run, search.search)
        run = _with_found(run, search)
    found = run.study
    cells = expand(found, scale, rows=rows, seeds=seeds, overrides=overrides)
    whole = expand(found, scale, overrides=overrides)
    check(whole)
    others = {**_keyed(_begun(run, whole)), **_keyed(cells)}
    whole += [cell for key, cell in others.items() if key not in _keyed(whole)]
    return _named(Opened(run, tuple(cells), tuple(whole)))


def _check_search(run: StudyRun, search: Search) -> None:
    for config in check_space(run, search):
        _check_model(config)


def _with_found(run: StudyRun, searched: Searched) -> StudyRun:
    """The study with the best trial as a row, where there is one yet and the search is over."""
    if not searched.over or (best := searched.best) is None:
        return run
    rows = [row for row in run.study.rows if row.name != FOUND]
    study = run.study.model_copy(update={"rows": (*rows, trial_row(run, best.params))})
    return replace(run, study=study)


def _keyed(cells: Iterable[Cell]) -> dict[tuple[str, int], Cell]:
    return {(cell.row, cell.seed): cell for cell in cells}


def _begun(run: StudyRun, whole: Sequence[Cell]) -> list[Cell]:
    """Cells of other seeds that earlier runs were asked for and that have left something."""
    configs = {cell.row: cell.config for cell in whole}
    manifest = read_json(run.folder / MANIFEST) or {"cells": []}
    return [
        Cell(entry["row"], entry["seed"], configs[entry["row"]].model_copy(update={"seed": entry["seed"]}))
        for entry in manifest["cells"]
        if entry["row"] in configs
        and entry["cell"]
        # under this name or an older one: its number was wanted
        and CellFolder(run.root, entry["cell"]).state() != "missing"
    ]


def check(cells: Sequence[Cell]) -> None:
    """Find a wrong variant, task or option before anything runs."""
    for row, config in {cell.row: cell.config for cell in cells}.items():
        try:
            _check_model(config)
            _check_tasks(config)
        except UsageError as error:
            raise UsageError(f"row {row!r}: {error}") from None


def _check_model(config: RunConfig) -> None:
    """Build the model, without memory for its weights: what its parts refuse is refused here."""
    from titans_core import BLOCKS

    variant = config.model.variant
    if variant not in BLOCKS:
        raise UsageError(f"model.variant: no {variant!r}; {nearest(variant, BLOCKS)}")
    try:
        _empty_model(config)
    except ValueError as error:
        raise UsageError(f"model.{error}") from None


def _check_tasks(config: RunConfig) -> None:
    from titans_platform.evals import build_generated, build_task

    for column, tasks in config.eval.columns.items():
        for i, task in enumerate(tasks):
            with within(f"eval.columns.{column}.{i}"):
                build_task(task)
    for i, source in enumerate(config.data.sources):
        for j, task in enumerate(source.tasks):
            with within(f"data.sources.{i}.tasks.{j}"):
                build_generated(task)


def _empty_model(config: RunConfig) -> LanguageModel:
    """The model without memory for its weights."""
    import torch

    from titans_core import LanguageModel

    with torch.device("meta"):
        return LanguageModel(config.model)


def _named(opened: Opened, prepared: Any = None) -> Opened:
    """Names for the cells asked for, by ``prepared``, and for all whose data are there."""
    from titans_platform.data import open_prepared

    at_hand = naming(lambda data: open_prepared(data, opened.run.root))
    asked = naming(prepared) if prepared else at_hand
    return replace(opened, cells=_with_names(opened.cells, asked), whole=_with_names(opened.whole, at_hand))


def _with_names(cells: Iterable[Cell], name: Callable[[RunConfig], str]) -> tuple[Cell, ...]:
    from titans_platform.data import NotPrepared

    named = []
    for cell in cells:
        with suppress(NotPrepared):
            cell = replace(cell, name=name(cell.config))
        named.append(cell)
    return tuple(named)


def plan_study(opened: Opened, rerun_stale: bool, asked: int | None) -> Plan:
    """What is to do; UsageError for what cannot be placed on this machine."""
    resources = opened.run.study.scales[opened.run.scale_name].resources
    return make_plan(
        opened.cells,
        opened.run.root,
        opened.run.commit,
        resources=resources,
        machine=this_machine(resources),
        asked=asked,
        rerun_stale=rerun_stale,
    )


def dry_run(opened: Opened, plan: Plan, console: Console, quiet: bool = False) -> dict[str, Any]:
    """Show what would run; nothing is written. The same as a dict."""
    guess = estimate(plan, opened.run.root)
    record = {
        "study": opened.run.study.name,
        "scale": opened.run.scale_name,
        "cells": [_planned(opened, plan, cell) for cell in opened.cells],
        "to_run": len(plan.todo),
        "concurrency": plan.concurrency,
        "resources": plan.resources.model_dump(),
        "estimate_seconds": guess.seconds,
        "estimate_basis": guess.basis,
    }
    if not quiet:
        _print_plan(record, opened, console)
    return record


def _planned(opened: Opened, plan: Plan, cell: Cell) -> dict[str, Any]:
    state = cell.folder(opened.run.root).state() if cell.name else "missing"
    if cell in plan.stale:
        state = "stale"
    return {
        "cell": cell.name,
        "row": cell.row,
        "seed": cell.seed,
        "parameters": _empty_model(cell.config).num_parameters(),
        "tokens": train_tokens(cell.config),
        "state": state,
    }


def _print_plan(record: dict[str, Any], opened: Opened, console: Console) -> None:
    from rich.table import Table as RichTable

    grid = RichTable(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name, justify in (("cell", "left"), ("row", "left"), ("seed", "right"), ("parameters", "right")):
        grid.add_column(name, justify=justify)  # pyright: ignore[reportArgumentType]
    grid.add_column("tokens", justify="right")
    grid.add_column("state")
    for cell in record["cells"]:
        sizes = [render.count(cell["parameters"]), render.count(cell["tokens"])]
        grid.add_row(cell["cell"] or "—", cell["row"], str(cell["seed"]), *sizes, cell["state"])
    console.print(grid)
    if not opened.named:
        console.print("Cells get their names once the data are prepared; the run does that first.")
    r = record["resources"]
    console.print(
        f"{record['to_run']} of {len(record['cells'])} cells to run, {record['concurrency']} at once, "
        f"each on {r['workers']} worker with {r['cpus_per_worker']} CPU and {r['gpus_per_worker']:g} GPU.",
        highlight=False,
    )
    guess = "unknown" if record["estimate_seconds"] is None else clock(record["estimate_seconds"])
    console.print(f"Time: about {guess} (from {record['estimate_basis']}).", highlight=False)


def run_study(
    opened: Opened, console: Console, *, rerun_stale: bool = False, concurrency: int | None = None
) -> Table:
    """Prepare data, run what is missing, draw the views. The whole table, complete or not."""
    marks = Marks()
    marks.mark("data")
    # what cannot be placed, or logged, is refused before time goes into data
    if plan_study(opened, rerun_stale, concurrency).todo:
        from titans_platform.tracking import check_store

        check_store(opened.run.root)
    with only_driver(opened.run), ExitStack() as stack:
        opened = _prepare(opened, console)
        plan = plan_study(opened, rerun_stale, concurrency)
        if searching(opened.run):
            # one Ray for the search and for the cells after it
            stack.enter_context(ray_of(plan))
            with _resumable(opened, console):
                opened = _searched(opened, plan, console)
            plan = plan_study(opened, rerun_stale, concurrency)
            marks = Marks()
            marks.mark("data")
        write_manifest(opened.run, opened.whole)
        if plan.todo:
            with _resumable(opened, console):
                execute(opened.run, plan, console, marks)
        table = report_study(opened, console, link=bool(plan.todo))
        if found := read_search(opened.run):
            _print_search(found, console)
        if plan.todo:
            _close_ledger(opened.run, plan, marks, console)
        return table


def searching(run: StudyRun) -> bool:
    """Whether the study has a search that is not over."""
    found = read_search(run)
    return found is not None and not found.over


def _searched(opened: Opened, plan: Plan, console: Console) -> Opened:
    """Run the study's search; the study with what it found as a row more."""
    found = read_search(opened.run)
    assert found is not None
    write_manifest(opened.run, opened.whole)
    tokens = f"{found.search.trials} trials, rungs at {_steps(found)} steps"
    with console.status(f"searching: {tokens}") as status, aside(opened.run.folder / "search.log"):

        def tell(line: str) -> None:
            status.update(line)
            if not console.is_terminal:
                console.print(line, highlight=False, soft_wrap=True)

        data = _data_fingerprint(opened)
        with followed(opened.run, tell):
            execute_search(opened.run, found.search, data, plan.resources, plan.concurrency)
    return _with_found_row(opened)


def _steps(found: Searched) -> str:
    return "/".join(map(str, found.search.milestones(found.steps)))


def _data_fingerprint(opened: Opened) -> str:
    from titans_platform.data import open_prepared

    return open_prepared(opened.cells[0].config.data, opened.run.root).fingerprint


def _with_found_row(opened: Opened) -> Opened:
    """The best trial's parameters, run with the seeds that were asked for."""
    found = read_search(opened.run)
    assert found is not None
    if found.best is None:
        raise TitansError(f"{opened.run.label}: no trial came to its end; {search_line(found)}")
    run = _with_found(opened.run, found)
    config = resolve(run.study, run.scale_name, trial_row(run, found.best.params), run.overrides)
    seeds = dict.fromkeys(cell.seed for cell in opened.cells)
    new = tuple(Cell(FOUND, seed, config.model_copy(update={"seed": seed})) for seed in seeds)
    write_search(run, found)
    return _named(replace(opened, run=run, cells=opened.cells + new, whole=opened.whole + new))


def _print_search(found: Searched, console: Console) -> None:
    console.print(search_line(found), highlight=False, soft_wrap=True)
    if found.best:
        console.print(f"Found: {set_line(found.best.params)}", highlight=False, soft_wrap=True)


def _close_ledger(run: StudyRun, plan: Plan, marks: Marks, console: Console) -> None:
    record = account(marks, plan.todo, run.root, plan.concurrency)
    write_ledger(run.folder, record)
    console.print(ledger_line(record), highlight=False, soft_wrap=True)


def _prepare(opened: Opened, console: Console) -> Opened:
    from titans_platform.data import prepare

    with console.status("preparing data") as status:

        def told(label: str, documents: int, tokens: int, done: float | None) -> None:
            share = "" if done is None else f" ({done:.0%})"
            status.update(f"preparing data: {label}: {documents:,} documents, {tokens:,} tokens{share}")

        def once(data: DataConfig) -> Any:
            return prepare(data, opened.run.root, progress=told)

        named = _named(opened, once)
        status.update("checking every row against the data")
        _check_against_data(named)
        return named


def _check_against_data(opened: Opened) -> None:
    """What a cell would find out on a worker, found here: one line, and no cell is begun."""
    from titans_platform.data import open_prepared
    from titans_platform.training.cell import check as check_run

    workers = opened.run.study.scales[opened.run.scale_name].resources.workers
    for row, config in {cell.row: cell.config for cell in opened.cells}.items():
        try:
            check_run(config, open_prepared(config.data, opened.run.root), workers)
        except UsageError as error:
            raise UsageError(f"row {row!r}: {error}") from None


@contextmanager
def _resumable(opened: Opened, console: Console) -> Iterator[None]:
    """Say, when interrupted, what is safe and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        done = sum(item.state == "done" for item in look(opened.cells, opened.run.root))
        console.print(
            f"{done} of {len(opened.cells)} cells are done and kept",
            highlight=False,
        )
        raise


def report_study(opened: Opened, console: Console, link: bool = True) -> Table:
    """Draw the table and the figure from what is there; with ``link`` put them on the MLflow run too."""
    run = opened.run
    if not any(cell.name for cell in opened.whole):
        raise UsageError(f"{run.label}: nothing has run under {run.root}; start with titans sweep run")
    table = build_table(run.study, run.scale_name, opened.whole, run.root, run.commit)
    paths = write_views(table, run.folder)
    if link and any(row.results for row in table.rows):
        from titans_platform.tracking import open_store

        log_views(open_store(run.root), table, run.label, paths)
    console.print(render.terminal(table, console.width))
    for name in (TABLE, FIGURE):
        console.print(f"{name.split('.')[0]:7}{_near(paths[name])}", highlight=False, soft_wrap=True)
    return table


def _near(path: Path) -> str:
    """The path as a person here would type it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
