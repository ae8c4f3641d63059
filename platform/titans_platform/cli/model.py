"""`titans generate`, `titans export`, `titans inspect`: what to do with the language model of a run."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from contextlib import nullcontext
from lzma import LZMAError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from titans_platform.cli import OSPath, beyond_training, file_type, from_options, root_option
from titans_platform.errors import TitansError, UsageError
from titans_platform.text import plain, render

if TYPE_CHECKING:
    from titans_core import LanguageModel
    from titans_platform.config import RunConfig
    from titans_platform.data import Tokenizer
    from titans_platform.data.tokenizer import TextStream


@click.command()
@click.argument("run")
@click.option(
    "--prompt", default="", show_default=False, metavar="TEXT", help="Prompt, after the text of --read."
)
@click.option("--read", "file", metavar="FILE", help="Text file to read first; - is stdin.")
@click.option(
    "--max-new-tokens", type=click.IntRange(0), default=200, help="Maximum new tokens; 0 only reads."
)
@click.option(
    "--temperature", type=click.FloatRange(0), default=0.8, help="Sampling temperature; 0 is greedy."
)
@click.option("--top-k", type=click.IntRange(1), help="Sample from the K most likely tokens.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="Nucleus sampling probability.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Sampling seed.")
@click.option("--memory-in", type=OSPath(path_type=Path), help="Resume from this memory file.")
@click.option("--memory-out", type=file_type, help="Save the final state here.")
@root_option
def generate(
    run: str, prompt: str, file: str | None, max_new_tokens: int, memory_in: Path | None,
    memory_out: Path | None, root: Path, **sampled: Any,
) -> None:  # fmt: skip
    """Generate text with RUN's model; prints the prompt and its continuation.

    RUN is a run's name (or a prefix of it), its folder, its MLflow run id, the folder of one checkpoint, or a
    model of `titans adapt`. The text is read once, into the model's state, which --memory-out saves and
    --memory-in restores. A memory file works only with the checkpoint that wrote it.

    \b
    Example:
      titans generate 3f2a91c0 --read book.txt --max-new-tokens 0 --memory-out book.memory
      titans generate 3f2a91c0 --memory-in book.memory --prompt "Call me" --top-p 0.95
    """
    import torch

    from titans_core import Reading, Sampling
    from titans_core.memory_file import load_memory, save_memory
    from titans_core.telemetry import weight_norm
    from titans_platform.data.tokenizer import TextStream
    from titans_platform.training.loop import deterministic

    sampling = from_options(Sampling, **sampled)
    text = plain((_read_text("--read", file) if file else "") + prompt)
    model, tokenizer, cfg = _reader(run, root, "generate text")
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    with deterministic(sampling.seed, cfg.threads):
        try:
            start = load_memory(memory_in, model) if memory_in else Reading()
        except ValueError as error:
            raise UsageError(f"--memory-in {error}") from None
        tokens = tokenizer.encode(text) if memory_in else [tokenizer.bos, *tokenizer.encode(text)]
        if not (tokens or start.ahead):
            ended = f"the text in {memory_in} has ended"
            raise UsageError(f"--prompt: missing: {ended}; give a prompt to continue with")
        began = time.perf_counter()
        reading = model.read(tokens, start)
        report = [_rate("read", len(tokens), began)]
        if prompt and max_new_tokens:
            # print the prompt but not the text of --read, which may be long
            click.echo(prompt, nl=False)
        if max_new_tokens:
            began, stop = time.perf_counter(), [tokenizer.bos, tokenizer.pad]
            writing = model.stream([[]], max_new_tokens, start=reading, sampling=sampling, stop=stop)
            written = _print(writing, TextStream(tokenizer, tokens or reading.ahead))
            report.append(_rate("written", written, began))
            reading = writing.readings[0] or reading
    click.echo("; ".join(report), err=True)
    norms = weight_norm(model, reading.state) if reading.state else {}
    _warn(model, reading.tokens, cfg.trained_context, norms)
    if memory_out:
        try:
            size = save_memory(memory_out, reading, model)
        except OSError as error:
            raise TitansError(f"--memory-out {memory_out}: cannot be written: {error.strerror}") from None
        click.echo(f"memory {memory_out}: {size:,} bytes after {reading.tokens:,} tokens", err=True)


def _warn(model: LanguageModel, tokens: int, context: int, norms: dict[str, float]) -> str:
    """Print why results on a text may be worse than the model can do; returns the warning on the norms."""
    from titans_core.telemetry import healthy_limits, out_of_range

    message = out_of_range(norms, healthy_limits(model)) or ""
    for line in (beyond_training(tokens, context) if tokens > context else "", message):
        if line:
            click.echo(line, err=True)
    return message


def _print(tokens: Iterable[tuple[int, int]], text: TextStream) -> int:
    """Print the text of new tokens as they come; returns their number."""
    written = 0
    for _, token in tokens:
        click.echo(text.add(token), nl=False)
        written += 1
    click.echo(text.end())
    return written


def _rate(action: str, tokens: int, began: float) -> str:
    return f"{tokens:,} tokens {action}, {tokens / max(1e-9, time.perf_counter() - began):,.0f} a second"


@click.command()
@click.argument("run")
@click.argument("folder", type=OSPath(file_okay=False, path_type=Path))
@root_option
def export(run: str, folder: Path, root: Path) -> None:
    """Write RUN's model, tokenizer and model card to FOLDER, as Hugging Face lays them out.

    After `import titans_core.huggingface`, AutoModelForCausalLM.from_pretrained(FOLDER) loads it. RUN is a
    run's name (or a prefix of it), its folder, its MLflow run id, or the folder of one checkpoint.

    \b
    Example:
      titans export 3f2a91c0 my-model
    """
    from titans_core.pretrained import save_folder
    from titans_platform.data.tokenizer import write_tokenizer
    from titans_platform.report import TEMPLATES
    from titans_platform.runs.folder import RunFolder
    from titans_platform.runs.load import find_checkpoint

    model, tokenizer, cfg = _language_model(run, root, "can be exported")
    if model.added:
        kind = cfg.objective.kind
        raise UsageError(f"{run}: its objective is {kind}; only next_token models can be exported")
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"{folder}: is not empty; give another folder")
    special = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.bos, "pad_token_id": tokenizer.pad}
    try:
        save_folder(folder, model, special)
        write_tokenizer(tokenizer, folder)
        values = {"model": model, "cfg": cfg, "tokenizer": tokenizer.fingerprint}
        result = RunFolder.at(find_checkpoint(run, root).parents[1]).result()
        card = render(TEMPLATES / "model_card.md", **values, result=result)
        (folder / "README.md").write_text(card, encoding="utf-8")
    except OSError as error:
        raise TitansError(f"{folder}: cannot be written: {error.strerror}") from None
    for path in sorted(folder.iterdir()):
        click.echo(f"{path}  {path.stat().st_size:,} bytes")


@click.command()
@click.argument("run")
@click.option("--text", "file", required=True, type=OSPath(path_type=Path), help="Text file to read.")
@click.option("--out", type=file_type, default=Path("inspect.html"), help="The HTML page to write.")
@click.option("--arrow", type=file_type, help="Also write the numbers to this Arrow file.")
@click.option("--tokens", type=click.IntRange(2), default=2048, help="Maximum number of tokens to read.")
@root_option
def inspect(run: str, file: Path, out: Path, arrow: Path | None, tokens: int, root: Path) -> None:
    """Show what RUN's memory does while it reads a text: one self-contained HTML page.

    The page shows surprise over the text, gates, the norm of the state, what each token retrieves, and what
    is forgotten or kept. RUN is a run's name (or a prefix of it), its folder, its MLflow run id, or the
    folder of one checkpoint; or a model of `titans adapt`, whose page shows what memory and kept tokens bring
    to each token.

    \b
    Example:
      titans inspect 3f2a91c0 --text needle.txt --out needle.html --arrow needle.arrow
    """
    from titans_platform.files import write_text
    from titans_platform.report.inspect import inspect_text, page, write_arrow
    from titans_platform.training.loop import deterministic

    paths = [path.resolve() for path in (file, out, arrow) if path]
    if len(set(paths)) < len(paths):
        raise UsageError("--text, --out, --arrow: two of them are one file; give different ones")
    text = _read_text("--text", str(file))
    model, tokenizer, cfg = _reader(run, root, "read text")
    with deterministic(cfg.seed, cfg.threads):
        inspected = inspect_text(model, tokenizer, text, Path(run).name, tokens)
    message = _warn(model, len(inspected.tokens), cfg.trained_context, inspected.largest())
    write_text(out, page(inspected, file.name, message))
    if arrow:
        write_arrow(inspected, arrow)
    for path in filter(None, (out, arrow)):
        click.echo(f"{path}  {path.stat().st_size:,} bytes")


def _read_text(option: str, file: str) -> str:
    """Read the text of a file, of stdin for `-`. Raises UsageError."""
    from titans_platform.files import opened

    try:
        with nullcontext(sys.stdin.buffer) if file == "-" else opened(file) as stream:
            return plain(stream.read().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{option} {file}: not UTF-8 at byte {error.start}") from None
    except (OSError, EOFError, LZMAError) as error:
        raise UsageError(f"{option} {file}: {getattr(error, 'strerror', None) or error}") from None


def _reader(run: str, root: Path, can: str) -> tuple[Any, Tokenizer, RunConfig]:
    """Load a model of `titans adapt`, or the language model of a run. Raises UsageError."""
    if not (Path(run) / "tune.yaml").is_file():
        return _language_model(run, root, can)
    from titans_platform.objectives.adapt import load_adapted

    return load_adapted(Path(run))


def _language_model(run: str, root: Path, can: str) -> tuple[LanguageModel, Tokenizer, RunConfig]:
    """Load the model of a run on the CPU, its tokenizer and its config. Raises UsageError."""
    from titans_core import LanguageModel
    from titans_platform.runs.load import load_run

    model, tokenizer, cfg = load_run(run, root)
    if tokenizer is None or not isinstance(model, LanguageModel):
        raise UsageError(f"{run}: its objective is {cfg.objective.kind}; only next_token models {can}")
    return model, tokenizer, cfg
