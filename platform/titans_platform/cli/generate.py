"""`titans generate`: text from a trained run, and memory files: what it has read, kept and gone on from."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from titans_platform.cli import root_option
from titans_platform.errors import TitansError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from titans_core import LanguageModel, Reading, Sampling
    from titans_platform.config import RunConfig
    from titans_platform.data import Tokenizer


@click.command()
@click.argument("run")
@click.option("--prompt", default="", metavar="TEXT", help="What the text begins with; after --read's.")
@click.option("--read", "file", metavar="FILE", help="A text to read first; - is standard input.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(0),
    default=200,
    show_default=True,
    help="Tokens to write at most; 0 only reads.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    default=0.8,
    show_default=True,
    help="0 writes the likeliest token.",
)
@click.option("--top-k", type=click.IntRange(1), help="Draw from the K likeliest tokens only.")
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    help="Draw from the likeliest tokens that together reach this probability.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Same seed, same text.")
@click.option(
    "--stream/--no-stream",
    default=True,
    show_default=True,
    help="Print tokens as they come, or at the end.",
)
@click.option("--memory-in", type=click.Path(path_type=Path), help="Go on from this memory file.")
@click.option("--memory-out", type=click.Path(path_type=Path), help="Keep what was read and written here.")
@root_option
def generate(
    run: str,
    prompt: str,
    file: str | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    stream: bool,
    memory_in: Path | None,
    memory_out: Path | None,
    root: Path,
) -> None:
    """Continue a text with RUN's model, and print the prompt and what it writes.

    RUN is a run's name (or how it begins), its folder, its MLflow run id, or the folder of one checkpoint.
    The text is read once, into the model's state. --memory-out keeps that state: a book is read once and gone
    on from any day. A memory file fits the checkpoint that wrote it. Copy the file to fork it; leave out
    --memory-in to begin anew.

    \b
    Example:
      titans generate 3f2a91c0 --read book.txt --max-new-tokens 0 --memory-out book.memory
      titans generate 3f2a91c0 --memory-in book.memory --prompt "Call me" --top-p 0.95
    """
    from titans_platform.training.loop import deterministic

    sampling = _sampling(temperature, top_k, top_p, seed)
    text = _text(file) + prompt
    model, tokenizer, cfg = _model(run, root)
    with deterministic(seed, cfg.threads):
        start = _start(memory_in, model)
        tokens = tokenizer.encode(text) if memory_in else [tokenizer.bos, *tokenizer.encode(text)]
        if not (tokens or start.ahead):
            raise UsageError(f"--prompt: the text in {memory_in} has ended; give some to go on from")
        began = time.perf_counter()
        reading = model.read(tokens, start)
        report = [_rate("read", len(tokens), began)]
        if prompt and max_new_tokens:
            # the text from its beginning; what --read gave is long, and known
            click.echo(prompt, nl=False)
        if max_new_tokens:
            began = time.perf_counter()
            reading, written = _write(model, tokenizer, reading, tokens, max_new_tokens, sampling, stream)
            report.append(_rate("written", written, began))
    click.echo("; ".join(report), err=True)
    for line in _doubts(model, reading, cfg.trained_context):
        click.echo(line, err=True)
    if memory_out:
        _keep(memory_out, reading, model)


def _sampling(temperature: float, top_k: int | None, top_p: float | None, seed: int) -> Sampling:
    from pydantic import ValidationError

    from titans_core import Sampling

    try:
        return Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    except ValidationError as error:  # what click lets pass: nan, inf, a seed too large
        first = error.errors(include_url=False)[0]
        raise UsageError(f"--{str(first['loc'][0]).replace('_', '-')}: {first['msg']}") from None


def _text(file: str | None) -> str:
    if file is None:
        return ""
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return content.decode("utf-8")
    except OSError as error:
        raise UsageError(f"--read {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"--read {file}: not UTF-8 at byte {error.start}") from None


def _doubts(model: LanguageModel, reading: Reading, context: int) -> Iterator[str]:
    """Why what is written may not be what the model can do."""
    from titans_core.telemetry import healthy_limits, out_of_range, weight_norm

    if reading.tokens > context:
        yield beyond_training(reading.tokens, context)
    if reading.state and (message := out_of_range(weight_norm(model, reading.state), healthy_limits(model))):
        yield message


def beyond_training(tokens: int, context: int) -> str:
    """One line on a text that is longer than what training carried a state over."""
    return (
        f"{tokens:,} tokens are more than training carried a state over, about {context:,}: it may read them "
        "worse than with a new state (docs/training.md, Streams; titans eval RUN --by-position measures it)"
    )


def _model(run: str, root: Path) -> tuple[LanguageModel, Tokenizer, RunConfig]:
    """The run's model where it computes fastest, its tokenizer, its config."""
    import torch

    from titans_core import LanguageModel
    from titans_platform.runs.load import load_run

    model, tokenizer, cfg = load_run(run, root)
    if tokenizer is None or not isinstance(model, LanguageModel):
        raise UsageError(f"{run}: its objective is {cfg.objective.kind}; only next_token writes text")
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer, cfg


def _start(memory: Path | None, model: LanguageModel) -> Reading:
    from titans_core import Reading

    if memory is None:
        return Reading()
    from titans_core.memory_file import load_memory

    try:
        return load_memory(memory, model)
    except ValueError as error:
        raise UsageError(f"--memory-in {error}") from None


def _write(
    model: LanguageModel,
    tokenizer: Tokenizer,
    reading: Reading,
    tokens: list[int],
    most: int,
    sampling: Sampling,
    stream: bool,
) -> tuple[Reading, int]:
    """Print what follows; the sequence with it, and the tokens written."""
    from titans_platform.data.tokenizer import TextStream

    writing = model.stream([[]], most, start=reading, sampling=sampling, stop=[tokenizer.bos, tokenizer.pad])
    text, written, held = TextStream(tokenizer, tokens or reading.ahead), 0, ""
    for _, token in writing:
        held, written = held + text.add(token), written + 1
        if stream:
            click.echo(held, nl=False)
            held = ""
    click.echo(held + text.end())
    ended = writing.readings[0]
    assert ended is not None
    return ended, written


def _rate(what: str, tokens: int, began: float) -> str:
    return f"{tokens:,} tokens {what}, {tokens / max(1e-9, time.perf_counter() - began):,.0f} a second"


def _keep(path: Path, reading: Reading, model: LanguageModel) -> None:
    from titans_core.memory_file import save_memory

    try:
        size = save_memory(path, reading, model)
    except OSError as error:
        raise TitansError(f"--memory-out {path}: cannot be written: {error.strerror}") from None
    click.echo(f"memory {path}: {size:,} bytes after {reading.tokens:,} tokens", err=True)
