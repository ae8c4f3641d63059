"""`python -m experiments.stream.stream`: speed, memory and decoding of each variant on a long text.

Each variant reads in a process of its own: this module, run with a job, which answers ``read N`` and
``decode N`` with a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from matplotlib.axes import Axes
from rich.console import Console

from titans_core import LanguageModel, ModelState
from titans_core.config import ModelConfig
from titans_core.generation import prefill
from titans_core.presets import preset as sized
from titans_kernels.bench.process import Answering, peak_bytes
from titans_kernels.bench.timing import Failed
from titans_platform import cli
from titans_platform.cli import FiniteFloat, echo_json, json_option
from titans_platform.data import load_tokenizer
from titans_platform.errors import UsageError
from titans_platform.report.picture import KINDS, LIGHT, Line, Picture, panel, save

Progress = Callable[[str], None]
PIECE = 1024
"""Tokens of a call."""
DECODED = 64
"""Single tokens of which a decoding step is the median."""
SLOW = 20.0
"""A variant is left when it reads so many times slower than at the start."""
TIMED_AT = (1024, 1_000_000)
"""Positions at which decoding is timed."""


@dataclass
class Place:
    """Number of tokens of the text read so far, and the model's state after them."""

    at: int = 0
    state: ModelState | None = None


class Reader:
    """A model at some place of an endless text; the CPU seconds it takes."""

    def __init__(self, job: dict[str, Any]):
        torch.manual_seed(0)
        torch.set_num_threads(job["threads"])
        self.model = LanguageModel(ModelConfig.model_validate_json(json.dumps(job["model"]))).eval()
        self.text = _tokens([Path(name) for name in job["text"]], self.model.config.vocab_size)
        self.place = Place()
        self.early: Place | None = None

    def read(self, count: int) -> dict[str, float]:
        """Read so many tokens on: their seconds, and the process's memory at its peak, in bytes."""
        return {"seconds": sum(self._pieces(self.place, count)), "peak_bytes": peak_bytes()}

    def again(self, count: int) -> dict[str, float]:
        """Read on from here and, in turn, piece by piece, as many tokens from the start of the text.

        A busy machine slows both alike. `first_seconds` are for the start.
        """
        pairs = zip(self._pieces(self.place, count), self._pieces(Place(), count), strict=True)
        late, early = map(sum, zip(*pairs, strict=True))
        return {"seconds": late, "first_seconds": early, "peak_bytes": peak_bytes()}

    def decode(self, count: int) -> dict[str, float]:
        """Seconds of a token's step from here, the median of ``count``; the place stays.

        From the second call on also, in turn, from the place of the first: `first_seconds`.
        """
        self.early = self.early or replace(self.place)
        places = {"seconds": replace(self.place)}
        if self.early.at != self.place.at:
            places["first_seconds"] = replace(self.early)
        steps = [{name: sum(self._pieces(place, 1)) for name, place in places.items()} for _ in range(count)]
        return {name: median(step[name] for step in steps) for name in places}

    def _pieces(self, place: Place, count: int) -> Iterator[float]:
        """Read so many tokens on from a place, which moves; the seconds of each piece."""
        end = place.at + count
        while place.at < end:
            piece = self._piece(place.at, min(PIECE, end - place.at))
            began = time.process_time()
            _, place.state = prefill(self.model, piece, place.state)
            place.at += piece.shape[1]
            yield time.process_time() - began

    def _piece(self, first: int, count: int) -> torch.Tensor:
        """[1, count] tokens of the text, which begins again after its end."""
        return self.text[torch.arange(first, first + count) % len(self.text)][None].long()


def _tokens(paths: Sequence[Path], vocabulary: int) -> torch.Tensor:
    """Return the files' bytes, one after the other; without files, random tokens."""
    if not paths:
        return torch.randint(vocabulary, (2**20,), generator=torch.Generator().manual_seed(0))
    parts = load_tokenizer("byte").encode_batch([path.read_text("utf-8", "replace") for path in paths])
    return torch.cat([torch.from_numpy(part.astype("int32")) for part in parts])


def run(
    models: dict[str, ModelConfig], tokens: int, every: int, *, text: Sequence[Path] = (), threads: int = 1,
    memory: float = 8 * 2**30, progress: Progress = lambda message: None,
) -> dict[str, Any]:  # fmt: skip
    """Read ``tokens`` of the text by each model, and look every ``every`` tokens.

    What is compared is measured in turn: the last look with the start of the text read again, the later
    decoding with that at the earlier place.

    A model that reads `SLOW` times slower than at the start, or takes more than ``memory`` bytes, is left
    there: `ended` says why. Raises UsageError: a file of the text is missing.
    """
    if missing := next((path for path in text if not path.is_file()), None):
        raise UsageError(f"--text: no file {missing}")
    rows = [
        _one(name, model, tokens, every, list(text), threads, memory, progress)
        for name, model in models.items()
    ]
    return {"tokens": tokens, "every": every, "piece": PIECE, "threads": threads, "rows": rows}


def _one(
    name: str, model: ModelConfig, tokens: int, every: int, text: list[Path], threads: int, memory: float,
    progress: Progress,
) -> dict[str, Any]:  # fmt: skip
    job = {"model": model.model_dump(mode="json"), "text": [str(path) for path in text], "threads": threads}
    row: dict[str, Any] = {"row": name, "looks": [], "decode": {}, "ended": None}
    row |= {"rate_ratio": None, "peak_ratio": None, "decode_ratio": None}
    stops = sorted({*range(every, tokens + 1, every), tokens, *(at for at in TIMED_AT if at <= tokens)})
    with Answering(["-m", "experiments.stream.stream", json.dumps(job)], threads, name) as reader:
        at, begun, seconds = 0, 0, 0.0
        for stop in stops:
            progress(f"{name}: {at:,} of {tokens:,} tokens")
            try:
                last = stop == tokens and row["looks"]
                seen = reader.ask(f"{'again' if last else 'read'} {stop - at}")
                at, seconds = stop, seconds + seen["seconds"]
                if last:
                    row["rate_ratio"] = seen["first_seconds"] / seen["seconds"]
                if stop in TIMED_AT:
                    timed = reader.ask(f"decode {DECODED}")
                    row["decode"][str(stop)] = timed["seconds"]
                    if "first_seconds" in timed:
                        row["decode_ratio"] = timed["seconds"] / timed["first_seconds"]
            except Failed as error:
                row["ended"] = f"after {at:,} tokens: {error}"
                break
            if stop % every and stop != tokens:
                continue
            rate, begun, seconds = (stop - begun) / seconds, stop, 0.0
            row["looks"].append({"tokens": stop, "rate": rate, "peak_bytes": seen["peak_bytes"]})
            if reason := _enough(row["looks"], memory):
                row["ended"] = f"after {at:,} tokens: {reason}"
                break
    if row["looks"]:
        row["peak_ratio"] = row["looks"][-1]["peak_bytes"] / row["looks"][0]["peak_bytes"]
    return row


def _enough(looks: list[dict[str, float]], memory: float) -> str | None:
    """Return the reason for which a model is not read on, or None."""
    if looks[-1]["peak_bytes"] > memory:
        return f"more than {memory / 2**30:g} GiB"
    slower = looks[0]["rate"] / looks[-1]["rate"]
    return f"{slower:.0f} times slower than at the start" if slower > SLOW else None


def picture(result: dict[str, Any], folder: Path) -> Path:
    """Draw speed and memory against the tokens read; the PNG, a PDF lies beside it."""
    shown = zip(result["rows"], KINDS * len(result["rows"]), strict=False)
    lines = [(row, Line(row["row"], {}, kind)) for row, kind in shown]

    def draw(axis: Axes, key: str, scale: float) -> None:
        for row, line in lines:
            x, y = zip(*((look["tokens"], look[key] / scale) for look in row["looks"]), strict=True)
            axis.plot(x, y, "o-", color=LIGHT[line.colour], markersize=2.5, linewidth=1)
        axis.set(xscale="log", yscale="log")

    speed = panel("Tokens a second", draw, "tokens read", key="rate", scale=1)
    space = panel("Memory, MiB", draw, "tokens read", key="peak_bytes", scale=2**20)
    caption = "One CPU thread; the peak is of the whole process."
    legend = [line for _, line in lines]
    return save(Picture("stream", "A long text", caption, [speed, space], legend=legend), folder)[0]


@click.command()
@click.option("--preset", default="laptop", show_default=True, help="Size of the models.")
@click.option(
    "--variants", default="lmm,mac,mag,mal,transformer", show_default=True, help="Variants, with commas."
)
@click.option(
    "--tokens", type=click.IntRange(1), default=2_000_000, show_default=True, help="Tokens to read."
)
@click.option(
    "--every", type=click.IntRange(1), default=100_000, show_default=True, help="Tokens between two looks."
)
@click.option(
    "--text", type=click.Path(path_type=Path), multiple=True, metavar="FILE",
    help="Text to read, again and again. May be repeated.  [random bytes]",
)  # fmt: skip
@click.option(
    "--memory-gb",
    type=FiniteFloat(0, min_open=True),
    default=8,
    show_default=True,
    help="Memory at which one is left.",
)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Threads of torch.")
@click.option(
    "--figure", type=click.Path(path_type=Path), metavar="FOLDER", help="Draw it there, as PNG and PDF."
)
@json_option
def stream(
    preset: str, variants: str, text: tuple[Path, ...], memory_gb: float, figure: Path | None, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Read a very long text: does speed or memory depend on how much was read?

    Each variant reads in a process of its own, with weights at their initial values. Times are of
    the CPU; the first tokens are read again in turn with the last, so that a busy machine slows both. Reading
    ends early for a variant that gets 20 times slower or takes too much memory.

    \b
    Example:
      python -m experiments.stream.stream --tokens 2000000 --text book.txt --figure experiments/stream
    """
    try:
        models = {name: sized(preset, name, vocab_size=260) for name in variants.split(",")}
    except ValueError as error:
        raise UsageError(f"--{error}") from None
    with Console(stderr=True).status("starting") as status:
        result = run(models, text=text, memory=memory_gb * 2**30, progress=status.update, **options)
    drawn = picture(result, figure) if figure else None
    if as_json:
        echo_json(result)
        return
    click.echo("\n".join(lines_of_stream(result)))
    if drawn:
        click.echo(drawn)


def lines_of_stream(result: dict[str, Any]) -> list[str]:
    """Return a line for each variant: its first look, its last, and their ratio."""
    lines = [
        f"{result['tokens']:,} tokens read; the first {result['every']:,} and the last; "
        f"threads: {result['threads']}.",
        _STREAM.format("", "tokens/s", "last", "ratio", "MiB", "last", "ratio", "decode", "ratio"),
    ]
    for row in result["rows"]:
        if row["looks"]:
            first, last = row["looks"][0], row["looks"][-1]
            decode = next(iter(row["decode"].values()), None)
            cells = [
                f"{first['rate']:,.0f}", f"{last['rate']:,.0f}", _times(row["rate_ratio"]),
                f"{first['peak_bytes'] / 2**20:,.0f}", f"{last['peak_bytes'] / 2**20:,.0f}",
                _times(row["peak_ratio"]), f"{1e3 * decode:.2f} ms" if decode else "-",
                _times(row["decode_ratio"]),
            ]  # fmt: skip
            lines.append(_STREAM.format(row["row"], *cells))
        if row["ended"]:
            lines.append(f"  {row['row']} left {row['ended']}")
    return lines


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


_STREAM = "{:<12} {:>9} {:>8} {:>5} {:>6} {:>6} {:>5} {:>9} {:>5}"


def main() -> None:
    """Answer until the input ends."""
    reader = Reader(json.loads(sys.argv[1]))
    asks = {"read": reader.read, "again": reader.again, "decode": reader.decode}
    for line in sys.stdin:
        command, count = line.split()
        print(json.dumps(asks[command](int(count))), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        main()
    else:
        sys.exit(cli.run(sys.argv[1:], stream))
