"""`titans data`: tokenise sources into shards, and inspect them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from titans_platform import text
from titans_platform.cli import OSPath, cluster_option, config_options, dry_run_option, echo_json, json_option
from titans_platform.errors import UsageError

if TYPE_CHECKING:
    from titans_platform.data import PreparedData
    from titans_platform.objectives import Objective


@click.group()
def data() -> None:
    """Tokenise sources into shards, and inspect them."""


@data.command(short_help="Tokenise sources into shards.")
@config_options
@click.option("--processes", type=click.IntRange(1), help="Processes that tokenise  [default: all cores]")
@cluster_option
@dry_run_option
@json_option
def prepare(
    config: Path, overrides: tuple[str, ...], root: Path, processes: int | None, cluster: str | None,
    dry_run: bool, as_json: bool,
) -> int:  # fmt: skip
    """Tokenise the sources under `data` of CONFIG (a run's YAML file) into shards.

    Idempotent: prepared sources and finished parts of a large source are skipped, corrupt shards are rebuilt.
    On a cluster the parts are Ray Data tasks. --dry-run shows the job, or without --cluster what is missing.

    \b
    Example:
      titans data prepare run.yaml --set data.sequence_length=1024
      titans data prepare run.yaml --set data.store=/mnt/shards --cluster lab
    """
    from titans_platform.cli.live import preparing
    from titans_platform.data import NotPrepared, open_prepared
    from titans_platform.data.parts import by_processes
    from titans_platform.data.prepare import prepare as prepare_data
    from titans_platform.objectives import check_vocabulary
    from titans_platform.objectives.next_token import NextToken
    from titans_platform.runs.ray_session import in_job, joined

    objective = _text_objective(config, overrides)
    loaded = objective.cfg.data
    if isinstance(objective, NextToken):
        check_vocabulary(objective.cfg, objective.tokenizer())
    if cluster not in (None, "local"):
        from titans_platform.cli.cluster import prepare_on

        return prepare_on(cluster, click.get_current_context(), loaded)
    if dry_run:
        try:
            _show(open_prepared(loaded, root), as_json)
        except NotPrepared as error:
            if as_json:
                echo_json({"prepared": False})
            else:
                click.echo(str(error))
        return 0
    run = by_processes(processes) if processes and not in_job() else None
    with joined(root), preparing(text.plain_console(stderr=True)) as progress:
        prepared = prepare_data(loaded, root, progress=progress, repair=True, run=run)
    _show(prepared, as_json)
    return 0


@data.command(short_help="Show documents, tokens, rows, fingerprint.")
@config_options
@click.option("--verify", is_flag=True, help="Verify the checksum of every shard.")
@json_option
def info(config: Path, overrides: tuple[str, ...], root: Path, verify: bool, as_json: bool) -> None:
    """Show the prepared sources of CONFIG: documents, tokens, rows, fingerprint.

    \b
    Example:
      titans data info run.yaml --verify
    """
    from titans_platform.data import open_prepared

    _show(open_prepared(_text_objective(config, overrides).cfg.data, root, verify=verify), as_json)


@data.command(short_help="Train a tokenizer on a corpus.")
@click.argument("sources", nargs=-1, required=True)
@click.option("--size", type=click.IntRange(1, 2**20), default=4096, help="Vocabulary size.")
@click.option("--out", type=OSPath(path_type=Path), required=True, help="Output file, a tokenizer.json.")
def tokenizer(sources: tuple[str, ...], size: int, out: Path) -> None:
    """Train a byte-level BPE on SOURCES: files, folders, globs or URLs, as a `files` source takes them.

    Set data.tokenizer to the file and model.vocab_size to its size. Small models need a small vocabulary.

    \b
    Example:
      titans data tokenizer books.jsonl.xz data/babi --size 2048 --out tokenizer.json
      titans train run.yaml --set data.tokenizer=tokenizer.json --set model.vocab_size=2048
    """
    from titans_platform.config import SourceConfig
    from titans_platform.data.sources import FilesSource
    from titans_platform.data.tokenizer import load_tokenizer, train_tokenizer
    from titans_platform.files import write_text

    if out.suffix != ".json":
        raise UsageError(f"--out: {out} should end in .json")
    configs = [SourceConfig(kind="files", path=path) for path in sources]
    opened = [FilesSource(config, "SOURCES", Path()) for config in configs]
    texts = (document.text for source in opened for document in source.documents())
    write_text(out, train_tokenizer(texts, size))
    trained = load_tokenizer(str(out))
    click.echo(f"{out}: {trained.vocab_size:,} ids, {trained.fingerprint}")


def _text_objective(config: Path, overrides: tuple[str, ...]) -> Objective[Any]:
    """Load the objective of a run on text. Raises UsageError: it trains on other data."""
    from titans_platform.loading import load_config
    from titans_platform.objectives import build_objective

    objective = build_objective(load_config(config, overrides))
    if (kind := objective.data_kind) != "tokens":
        other = f"{objective.cfg.objective.kind} trains on {kind}, which titans train prepares"
        raise UsageError(f"objective.kind: {other}; titans data prepares text only")
    return objective


def _show(prepared: PreparedData, as_json: bool) -> None:
    """Print a summary of prepared data, as a table or as JSON."""
    sources = {}
    for label, source in zip(prepared.labels, prepared.sources, strict=True):
        manifest = source.manifest
        sources[label] = {
            "weight": source.weight, "documents": manifest.documents, "tokens": manifest.tokens,
            "train_tokens": manifest.train.tokens, "validation_tokens": manifest.validation.tokens,
            "train_rows": len(source.train), "validation_rows": len(source.validation),
            "bytes": sum(file.bytes for file in manifest.files), "fingerprint": manifest.content,
            "folder": str(source.files), "revision": manifest.revision,
        }  # fmt: skip
    ids, length = prepared.tokenizer.vocab_size, prepared.config.sequence_length
    if as_json:
        return echo_json({
            "fingerprint": prepared.fingerprint, "tokenizer": prepared.tokenizer.fingerprint,
            "vocab_size": ids, "sequence_length": length, "sources": sources,
        })  # fmt: skip
    table = text.table("source", "weight", "docs", "tokens", "rows", "val rows", "fingerprint")
    table.columns[0].min_width = 12
    for label, source in sources.items():
        counts = (source[key] for key in ("documents", "tokens", "train_rows", "validation_rows"))
        table.add_row(label, f"{source['weight']:g}", *(f"{n:,}" for n in counts), source["fingerprint"])
    text.plain_console().print(table)
    fingerprints = f"fingerprint {prepared.fingerprint}, tokenizer {prepared.tokenizer.fingerprint}"
    click.echo(f"{fingerprints} with {ids:,} ids, rows of {length:,} tokens")
