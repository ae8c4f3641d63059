"""`titans inspect`: a page that shows what a run's memory does while it reads a text."""

from __future__ import annotations

from pathlib import Path

import click

from titans_platform.cli import root_option
from titans_platform.errors import UsageError


@click.command()
@click.argument("run")
@click.option("--text", "file", required=True, type=click.Path(path_type=Path), help="Text file to read.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("inspect.html"),
    show_default=True,
    help="The HTML page to write.",
)
@click.option(
    "--arrow",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the numbers to this Arrow file.",
)
@click.option(
    "--tokens",
    type=click.IntRange(2),
    default=2048,
    show_default=True,
    help="Maximum number of tokens to read.",
)
@click.option(
    "--position",
    type=click.IntRange(0),
    help="Token whose retrieval the page shows first  [default: the last]",
)
@root_option
def inspect(
    run: str, file: Path, out: Path, arrow: Path | None, tokens: int, position: int | None, root: Path
) -> None:
    """Show what RUN's memory does while it reads a text: one self-contained HTML page.

    The page shows surprise over the text, gates, the norm of the state, what each token retrieves, and what
    is forgotten or kept. RUN is a run's name (or a prefix of it), its folder, its MLflow run id, or the
    folder of one checkpoint.

    \b
    Example:
      titans inspect 3f2a91c0 --text needle.txt --out needle.html --arrow needle.arrow
    """
    from titans_core import LanguageModel
    from titans_core.telemetry import healthy_limits, out_of_range
    from titans_platform.cli.generate import beyond_training
    from titans_platform.files import write_text
    from titans_platform.report.inspect import inspect_text, page, write_arrow
    from titans_platform.runs.load import load_run
    from titans_platform.training.loop import deterministic

    text = _read(file)
    model, tokenizer, cfg = load_run(run, root)
    if tokenizer is None or not isinstance(model, LanguageModel):
        raise UsageError(f"{run}: its objective is {cfg.objective.kind}; only next_token models read text")
    with deterministic(cfg.seed, cfg.threads):
        found = inspect_text(model, tokenizer, text, Path(run).name, tokens)
    if len(found.tokens) > cfg.trained_context:
        click.echo(beyond_training(len(found.tokens), cfg.trained_context), err=True)
    message = out_of_range(found.largest(), healthy_limits(model))
    if message:
        click.echo(message, err=True)
    if position is not None and position >= len(found.tokens):
        raise UsageError(
            f"--position: {position} is out of range: {len(found.tokens)} tokens were read, counted from 0"
        )
    write_text(out, page(found, file.name, position, message or ""))
    if arrow:
        write_arrow(found, arrow)
    for path in (out, *([arrow] if arrow else [])):
        click.echo(f"{path}  {path.stat().st_size:,} bytes")


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--text {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"--text {file}: not UTF-8 at byte {error.start}") from None
