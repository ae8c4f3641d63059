"""`titans generate`: generate text with a trained run; save and restore its state as memory files."""

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
@click.option("--prompt", default="", metavar="TEXT", help="Prompt; appended to the text of --read.")
@click.option("--read", "file", metavar="FILE", help="Text file to read first; - is stdin.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(0),
    default=200,
    show_default=True,
    help="Maximum number of new tokens; 0 only reads.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    default=0.8,
    show_default=True,
    help="Sampling temperature; 0 is greedy decoding.",
)
@click.option("--top-k", type=click.IntRange(1), help="Sample from the K most likely tokens.")
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    help="Nucleus sampling: sample from the most likely tokens of this total probability.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Sampling seed.")
@click.option(
    "--stream/--no-stream",
    default=True,
    show_default=True,
    help="Print tokens as they are generated, or all at the end.",
)
@click.option("--memory-in", type=click.Path(path_type=Path), help="Resume from this memory file.")
@click.option("--memory-out", type=click.Path(path_type=Path), help="Save the final state here.")
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
    """Generate text with RUN's model; prints the prompt and its continuation.

    RUN is a run's name (or a prefix of it), its folder, its MLflow run id, or the folder of one checkpoint.
    The text is read once, into the model's state, which --memory-out saves and --memory-in restores. A memory
    file works only with the checkpoint that wrote it.

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
            raise UsageError(
                f"--prompt: missing: the text in {memory_in} has ended; give a prompt to continue with"
            )
        began = time.perf_counter()
        reading = model.read(tokens, start)
        report = [_rate("read", len(tokens), began)]
        if prompt and max_new_tokens:
            # print the prompt but not the text of --read, which may be long
            click.echo(prompt, nl=False)
        if max_new_tokens:
            began = time.perf_counter()
            reading, written = _write(model, tokenizer, reading, tokens, max_new_tokens, sampling, stream)
            report.append(_rate("written", written, began))
    click.echo("; ".join(report), err=True)
    for line in _warnings(model, reading, cfg.trained_context):
        click.echo(line, err=True)
    if memory_out:
        _save(memory_out, reading, model)


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


def _warnings(model: LanguageModel, reading: Reading, context: int) -> Iterator[str]:
    """Reasons why the generated text may be worse than the model can do."""
    from titans_core.telemetry import healthy_limits, out_of_range, weight_norm

    if reading.tokens > context:
        yield beyond_training(reading.tokens, context)
    if reading.state and (message := out_of_range(weight_norm(model, reading.state), healthy_limits(model))):
        yield message


def beyond_training(tokens: int, context: int) -> str:
    """A warning for a text longer than the longest context that training carried a state over."""
    return (
        f"{tokens:,} tokens exceed the context that training carried a state over, about {context:,}: the "
        "loss may be higher than with a fresh state (docs/training.md, Streams; titans eval RUN "
        "--by-position measures it)"
    )


def _model(run: str, root: Path) -> tuple[LanguageModel, Tokenizer, RunConfig]:
    """The run's model on the fastest device, its tokenizer and its config."""
    import torch

    from titans_core import LanguageModel
    from titans_platform.runs.load import load_run

    model, tokenizer, cfg = load_run(run, root)
    if tokenizer is None or not isinstance(model, LanguageModel):
        raise UsageError(
            f"{run}: its objective is {cfg.objective.kind}; only next_token models generate text"
        )
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
    max_new_tokens: int,
    sampling: Sampling,
    stream: bool,
) -> tuple[Reading, int]:
    """Generate and print; returns the final state and the number of new tokens."""
    from titans_platform.data.tokenizer import TextStream

    writing = model.stream(
        [[]], max_new_tokens, start=reading, sampling=sampling, stop=[tokenizer.bos, tokenizer.pad]
    )
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


def _save(path: Path, reading: Reading, model: LanguageModel) -> None:
    from titans_core.memory_file import save_memory

    try:
        size = save_memory(path, reading, model)
    except OSError as error:
        raise TitansError(f"--memory-out {path}: cannot be written: {error.strerror}") from None
    click.echo(f"memory {path}: {size:,} bytes after {reading.tokens:,} tokens", err=True)
