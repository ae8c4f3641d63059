"""Read one long text with trained models: does the loss stay where it was, and the memory within bounds?

    python experiments/carried/long_read.py --text FILE [--tokens N] RUN ...
    python experiments/carried/long_read.py --stress RUN ...

Perplexity per token of each tenth of the text, with the state carried from its start and with a new state
every training row, and the largest weight norm and mean surprise of the memories over pieces of 8,192 tokens.
`--stress` makes a text of a million bytes: 100,000 each of lines of `=`, of a table, of base64 and of one
byte, with 150,000 of prose before each; it is read with the state carried alone.
"""

from __future__ import annotations

import base64
import math
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import torch

from titans_core.telemetry import record
from titans_platform.config import SourceConfig
from titans_platform.data.sources import SOURCES
from titans_platform.errors import UsageError
from titans_platform.runs.load import load_run

PIECE = 8192
PARTS = 10


def stress_text(prose: str) -> str:
    """Return a million bytes: 600,000 of prose, and 100,000 each of four kinds of repetition and noise."""
    draw = random.Random(0)
    rows = "".join(f"| {i:5d} | {draw.random():.4f} | {draw.random():.4f} |\n" for i in range(4000))
    kinds = ("=" * 78 + "\n", rows, base64.b64encode(draw.randbytes(75_000)).decode(), "a")
    text = ""
    for i, kind in enumerate(kinds):
        text += prose[150_000 * i : 150_000 * (i + 1)]
        text += (kind * (100_000 // len(kind) + 1))[:100_000]
    return text


@torch.no_grad()
def read(run: str, text: str, tokens: int | None, fresh: bool = True) -> dict[str, Any]:
    """Read a text with one run; ``fresh``: read it again with a new state every training row."""
    model, tokenizer, cfg = load_run(run)
    if tokenizer is None:
        raise UsageError(f"{run}: does not train on text")
    ids = torch.tensor([tokenizer.bos, *tokenizer.encode(text)][: tokens and tokens + 1])
    row, state = cfg.data.sequence_length, None
    if PIECE % row:
        raise UsageError(f"{run}: data.sequence_length {row} does not divide the pieces of {PIECE:,} tokens")
    carried, norms, surprises = [], [0.0], [0.0]
    pieces = range(0, (len(ids) - 1) // PIECE * PIECE, PIECE)
    for at in pieces:
        piece, targets = ids[None, at : at + PIECE], ids[None, at + 1 : at + 1 + PIECE]
        with record(model) as telemetry:
            out = model(piece, state, targets_BT=targets)
        state = out.state
        carried.append(out.losses)
        seen = telemetry.summary()
        norms.append(seen.get("weight_norm", 0.0))
        surprises.append(seen.get("surprise", 0.0))
        if not math.isfinite(norms[-1] + surprises[-1]):
            break
    losses = {"carried": torch.cat(carried, 1)[0]}
    if fresh:
        anew = []
        for at in pieces:
            rows = ids[at : at + PIECE].view(-1, row), ids[at + 1 : at + 1 + PIECE].view(-1, row)
            anew.append(model(rows[0], targets_BT=rows[1]).losses.flatten())
        losses["fresh"] = torch.cat(anew)
    parts = {way: [part.mean().exp().item() for part in loss.chunk(PARTS)] for way, loss in losses.items()}
    return {**parts, "norm": max(norms), "surprise": max(surprises), "tokens": len(losses["carried"])}


@click.command()
@click.argument("runs", nargs=-1, required=True)
@click.option("--text", "files", multiple=True, help="A text file, .jsonl, also .gz or .xz.")
@click.option("--tokens", type=int, help="Read no more of it.")
@click.option("--stress", is_flag=True, help="Repetition and noise between prose, a million bytes.")
def main(runs: tuple[str, ...], files: tuple[str, ...], tokens: int | None, stress: bool) -> None:
    """Print a table, one line a run."""
    torch.set_num_threads(1)
    sources = [SourceConfig(kind="files", path=file) for file in files] or [SourceConfig(kind="corpus")]
    documents: list[str] = []
    with TemporaryDirectory() as cache:
        for source in sources:
            read_documents = SOURCES[source.kind](source, "--text", Path(cache)).documents()
            documents += [document.text for document in read_documents]
    text = "".join(documents)
    text = stress_text(text) if stress else text
    click.echo("| run | tokens | carried, by tenths | fresh | largest norm | largest surprise |")
    click.echo("|:--|--:|:--|:--|--:|--:|")
    for run in runs:
        result = read(run, text, tokens, fresh=not stress)
        shown = [" ".join(f"{x:.3f}" for x in result.get(way, ())) for way in ("carried", "fresh")]
        numbers = f"{result['norm']:.2f} | {result['surprise']:.3f}"
        click.echo(f"| {Path(run).name} | {result['tokens']:,} | {' | '.join(shown)} | {numbers} |")


if __name__ == "__main__":
    main()
