"""`titans eval --by-position`: what memory brings in long texts, as a table and a figure."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from titans_platform.cli import echo_json
from titans_platform.cli.generate import beyond_training
from titans_platform.errors import UsageError
from titans_platform.text import plural

if TYPE_CHECKING:
    from titans_platform.config import RunConfig
    from titans_platform.data import PreparedData
    from titans_platform.evals.tasks.by_position import ByPosition
    from titans_platform.objectives import Objective

ROWS = 64
"""Default length of a text in training rows; less if the texts are shorter."""
PLAIN_EVERY = 15.0
"""Seconds between progress lines when the output is not a terminal."""


@dataclass(frozen=True)
class Asked:
    """Options of the command."""

    rows: int | None
    file: str | None

    def check(self) -> None:
        """Raises UsageError: too few rows."""
        if self.rows is not None and self.rows < 2:
            raise UsageError(
                f"--rows: {self.rows} is too few: state is carried from the second row on; give 2 or more"
            )


def show(point: Path, cfg: RunConfig, asked: Asked, root: Path, as_json: bool, console: Console) -> None:
    """Evaluate the checkpoint ``point``, print the table and save the figure to the run's folder."""
    from titans_core import LanguageModel
    from titans_platform.runs.load import load_checkpoint
    from titans_platform.training.loop import deterministic

    asked.check()
    with deterministic(cfg.seed, cfg.threads):
        model, step, objective = load_checkpoint(point, cfg)
        if not isinstance(model, LanguageModel):
            raise UsageError(
                f"--by-position: objective {cfg.objective.kind} does not read text; next_token does"
            )
        with _data(objective, cfg, asked, root, console) as data:
            found = _read(model, data, cfg, asked, console)
    folder = point.parents[1]
    figures = _save(found, folder, asked)
    if as_json:
        echo_json(
            {"cell": folder.name, "step": step, **as_numbers(found), "figures": list(map(str, figures))}
        )
        return
    console.print(position_table(found))
    console.print(gain_line(found), highlight=False)
    if found.length > cfg.trained_context:
        console.print(beyond_training(found.length, cfg.trained_context), highlight=False)
    console.print(f"run {folder.name}, step {step:,}; figure {figures[0]}", highlight=False, soft_wrap=True)


@contextmanager
def _data(
    objective: Objective[Any], cfg: RunConfig, asked: Asked, root: Path, console: Console
) -> Iterator[PreparedData]:
    """The run's own data, or the user's text, held out whole and deleted afterwards."""
    if asked.file is None:
        yield objective.open(root)
        return
    from titans_platform.config import SourceConfig
    from titans_platform.data import prepare

    source = SourceConfig(kind="files", path=asked.file, weight=0, validation_fraction=1.0)
    fields = {"sources": (source,), "store": None}
    with TemporaryDirectory(prefix="titans-read-") as folder:
        try:
            with console.status(f"tokenising {asked.file}"):
                data = prepare(cfg.data.model_copy(update=fields), Path(folder))
        except UsageError as error:
            # the user wrote an option, not this field of a config
            raise UsageError(re.sub(r"^data\.sources\.0(\.path)?: ", "--read: ", str(error))) from None
        yield data


def _read(model: Any, data: PreparedData, cfg: RunConfig, asked: Asked, console: Console) -> ByPosition:
    import torch

    from titans_platform.evals.runner import evaluating
    from titans_platform.evals.scoring import Scorer
    from titans_platform.evals.tasks.by_position import (
        long_texts,
        longest_text,
        read_by_position,
        tokens_to_read,
    )

    row = cfg.data.sequence_length
    rows = asked.rows or max(2, min(ROWS, longest_text(data) // row))
    remedy = "give a longer text" if asked.file else "raise a text source's validation_fraction"
    field = "--rows" if asked.rows else "--read" if asked.file else "data.sources"
    texts = long_texts(data, rows, cfg.eval.perplexity_tokens, field, remedy)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scorer = Scorer(model.to(device), data.tokenizer, device, cfg.eval.batch_tokens)
    with evaluating(model), _progress(tokens_to_read(len(texts), rows, row), console) as report:
        return read_by_position(scorer, texts, row, report=report)


@contextmanager
def _progress(total: int, console: Console) -> Iterator[Callable[[int], None]]:
    """A bar of the tokens read; without a terminal, periodic lines."""
    columns = TextColumn("reading"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    done, printed = 0, time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task("", total=total)

        def report(tokens: int) -> None:
            nonlocal done, printed
            done += tokens
            bars.update(bar, completed=done)
            if not console.is_terminal and time.monotonic() - printed > PLAIN_EVERY:
                printed = time.monotonic()
                console.print(f"read {done:,} of {total:,} tokens", highlight=False)

        yield report


def _save(found: ByPosition, folder: Path, asked: Asked) -> list[Path]:
    from titans_platform.report.figures.buckets import loss_picture
    from titans_platform.report.figures.picture import save

    # the user's text must not overwrite the figure of the validation data
    name = "by-position" + (
        f"-{re.sub(r'[^A-Za-z0-9_-]+', '-', Path(asked.file).name)}" if asked.file else ""
    )
    return save(loss_picture(found, name, f"Loss by position, run {folder.name}"), folder)


def position_table(found: ByPosition) -> Table:
    """Perplexities by position; the gain with its standard error, from the second row on."""
    import math

    window = found.best_window
    of = f"\n({plural(int(window.partition('-')[2]), 'row')})" if window else ""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("position", "carried", "fresh", f"best window{of}", "gain ± s.e. (nats)"):
        table.add_column(heading, justify="right")
    for first, last in found.buckets():
        ppl = [
            f"{math.exp(found.loss(way, first, last)[0]):,.2f}" if way else "-"
            for way in ("carried", "fresh", window)
        ]
        mean, stderr = found.gain(first, last)
        gain = f"{mean:+.3f} ± {stderr:.3f}" if first > found.row else "-"
        table.add_row(f"{first:,}-{last:,}", *ppl, gain)
    return table


def gain_line(found: ByPosition) -> str:
    """The summary line: what memory brings."""
    mean, stderr = found.gain()
    texts = f"{plural(found.texts, 'text')} of {found.length:,} tokens"
    parts = "; s.e. over 16 parts of it" if found.texts == 1 else ""
    return (
        f"what memory brings: {mean:+.3f} ± {stderr:.3f} nats a token beyond the first row ({texts}{parts})"
    )


def as_numbers(found: ByPosition) -> dict[str, Any]:
    """The table as a JSON value; losses in nats."""
    ways = {way.partition("-")[0]: way for way in found.shown}
    buckets = []
    for first, last in found.buckets():
        losses = {name: found.loss(way, first, last)[0] for name, way in ways.items()}
        gain, stderr = found.gain(first, last)
        buckets.append({"first": first, "last": last, **losses, "gain": gain, "stderr": stderr})
    gain, stderr = found.gain()
    return {
        "gain": gain,
        "stderr": stderr,
        "texts": found.texts,
        "tokens": found.length,
        "row": found.row,
        "best_window": found.best_window and int(found.best_window.partition("-")[2]),
        "loss": {name: found.loss(way)[0] for name, way in ways.items()},
        "positions": buckets,
    }
