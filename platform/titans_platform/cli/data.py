"""`titans data`: sources into shards, and what the shards hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from titans_platform.cli import config_options, echo_json, json_option
from titans_platform.errors import UsageError

if TYPE_CHECKING:
    from titans_platform.config import DataConfig
    from titans_platform.data import PreparedData
    from titans_platform.data.prepare import Progress


@click.group()
def data() -> None:
    """Turn sources into token shards, and look at them."""


@data.command(short_help="Tokenise sources into shards.")
@config_options
@json_option
def prepare(config: Path, overrides: tuple[str, ...], root: Path, as_json: bool) -> None:
    """Tokenise the sources under `data` of CONFIG (a run's YAML file) into shards.

    What is prepared already stays; damaged shards are made anew.

    \b
    Example:
      titans data prepare run.yaml --set data.sequence_length=1024
    """
    from titans_platform.data.prepare import prepare as prepare_data

    loaded = _load(config, overrides)
    with _progress_bars() as progress:
        prepared = prepare_data(loaded, root, progress=progress, repair=True)
    _show(prepared, as_json)


@data.command(short_help="Show documents, tokens, rows, fingerprint.")
@config_options
@click.option("--verify", is_flag=True, help="Read every shard and compare its hash.")
@json_option
def info(config: Path, overrides: tuple[str, ...], root: Path, verify: bool, as_json: bool) -> None:
    """Show the prepared sources of CONFIG: documents, tokens, rows, fingerprint.

    \b
    Example:
      titans data info run.yaml --json
    """
    from titans_platform.data import open_prepared

    _show(open_prepared(_load(config, overrides), root, verify=verify), as_json)


def _load(config: Path, overrides: tuple[str, ...]) -> DataConfig:
    """The `data` of a run on text. Raises UsageError, also where the run's objective takes no text."""
    from titans_platform.loading import load_config
    from titans_platform.objectives import build_objective

    cfg = load_config(config, overrides)
    if (kind := build_objective(cfg).data_kind) != "tokens":
        raise UsageError(
            f"objective.kind: {cfg.objective.kind} trains on {kind}, which titans train prepares by itself; "
            "titans data is for text"
        )
    return cfg.data


@contextmanager
def _progress_bars() -> Iterator[Progress | None]:
    """A callback that draws a bar for each source on a terminal; None where there is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    numbers = TextColumn(
        "{task.fields[documents]:,} documents, {task.fields[rate]:,.0f}/s, {task.fields[tokens]:,} tokens"
    )
    about, times = TextColumn("{task.description}"), (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(about, BarColumn(), numbers, *times, console=console) as bars:
        tasks: dict[str, Any] = {}

        def show(label: str, documents: int, tokens: int, done: float | None) -> None:
            if label not in tasks:
                tasks[label] = bars.add_task(label, total=None, documents=0, tokens=0, rate=0.0)
            task = next(one for one in bars.tasks if one.id == tasks[label])
            rate = documents / max(task.elapsed or 0, 1e-3)
            shown: dict[str, Any] = {"documents": documents, "tokens": tokens, "rate": rate}
            bars.update(tasks[label], total=done and 1.0, completed=done or 0.0, **shown)

        yield show


def describe(prepared: PreparedData) -> dict[str, Any]:
    """What prepared data hold, as JSON."""
    sources = {}
    for label, source in zip(prepared.labels, prepared.sources, strict=True):
        train, validation = source.train, source.validation
        sources[label] = {
            "weight": source.weight,
            "documents": train.info.documents + validation.info.documents,
            "tokens": train.info.tokens + validation.info.tokens,
            "train_tokens": train.info.tokens,
            "validation_tokens": validation.info.tokens,
            "train_rows": len(train),
            "validation_rows": len(validation),
            "bytes": sum(file.bytes for file in source.manifest.files),
            "fingerprint": source.manifest.content,
            "folder": str(source.place),
        }
    return {
        "fingerprint": prepared.fingerprint,
        "tokenizer": prepared.tokenizer.fingerprint,
        "vocab_size": prepared.tokenizer.vocab_size,
        "sequence_length": prepared.config.sequence_length,
        "sources": sources,
    }


def _show(prepared: PreparedData, as_json: bool) -> None:
    described = describe(prepared)
    if as_json:
        echo_json(described)
        return
    table = Table()
    table.add_column("source", overflow="fold", min_width=12)
    for column in ("weight", "docs", "tokens", "rows", "val rows"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("fingerprint", no_wrap=True)
    for label, source in described["sources"].items():
        counts = (source[key] for key in ("documents", "tokens", "train_rows", "validation_rows"))
        table.add_row(label, f"{source['weight']:g}", *(f"{n:,}" for n in counts), source["fingerprint"])
    console = Console()
    console.print(table)
    console.print(
        f"fingerprint {described['fingerprint']}, tokenizer {described['tokenizer']} with "
        f"{described['vocab_size']:,} ids, rows of {described['sequence_length']:,} tokens",
        highlight=False,
        soft_wrap=True,
    )
