"""A long text read by each variant in a process of its own: speed, memory, decoding. `titans bench stream`.

Run as a module with a job it is that process: it answers ``read N`` and ``decode N`` with a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.axes import Axes

from titans_core import LanguageModel
from titans_core.config import ModelConfig
from titans_core.generation import read_pieces
from titans_kernels.bench.process import Answering, peak_bytes
from titans_kernels.bench.timing import Failed
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


class Reader:
    """A model at some place of an endless text; the CPU seconds it takes."""

    def __init__(self, job: dict[str, Any]):
        torch.manual_seed(0)
        torch.set_num_threads(job["threads"])
        self.model = LanguageModel(ModelConfig.model_validate_json(json.dumps(job["model"]))).eval()
        self.text = _tokens([Path(name) for name in job["text"]], self.model.config.vocab_size)
        self.at, self.state = 0, None

    def read(self, count: int) -> dict[str, float]:
        """Read so many tokens on: their seconds, and the process's memory at its peak, in bytes."""
        began = time.process_time()
        for first in range(self.at, self.at + count, PIECE):
            piece = self._piece(first, min(PIECE, self.at + count - first))
            _, self.state = read_pieces(self.model, piece, self.state)
        self.at += count
        return {"seconds": time.process_time() - began, "peak_bytes": peak_bytes()}

    def decode(self, count: int) -> dict[str, float]:
        """Seconds of a token's step from here, the median of ``count``; the place stays."""
        state, seconds = self.state, []
        for i in range(count):
            token = self._piece(self.at + i, 1)
            began = time.process_time()
            _, state = read_pieces(self.model, token, state)
            seconds.append(time.process_time() - began)
        return {"seconds": median(seconds)}

    def _piece(self, first: int, count: int) -> torch.Tensor:
        """[1, count] tokens of the text, which begins again after its end."""
        return self.text[torch.arange(first, first + count) % len(self.text)][None].long()


def _tokens(paths: Sequence[Path], vocabulary: int) -> torch.Tensor:
    """The files' bytes, one after the other; random tokens where there are none."""
    if not paths:
        return torch.randint(vocabulary, (2**20,), generator=torch.Generator().manual_seed(0))
    parts = load_tokenizer("byte").encode_batch([path.read_text("utf-8", "replace") for path in paths])
    return torch.cat([torch.from_numpy(part.astype("int32")) for part in parts])


def run(
    models: dict[str, ModelConfig], tokens: int, every: int, *, text: Sequence[Path] = (), threads: int = 1,
    memory: float = 8 * 2**30, progress: Progress = lambda message: None,
) -> dict[str, Any]:  # fmt: skip
    """Read ``tokens`` of the text by each model, and look every ``every`` tokens.

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
    stops = sorted({*range(every, tokens + 1, every), tokens, *(at for at in TIMED_AT if at <= tokens)})
    with Answering(["-m", __name__, json.dumps(job)], threads, name) as reader:
        at, begun, seconds = 0, 0, 0.0
        for stop in stops:
            progress(f"{name}: {at:,} of {tokens:,} tokens")
            try:
                seen = reader.ask(f"read {stop - at}")
                at, seconds = stop, seconds + seen["seconds"]
                if stop in TIMED_AT:
                    row["decode"][str(stop)] = reader.ask(f"decode {DECODED}")["seconds"]
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
    return row | _summary(row)


def _enough(looks: list[dict[str, float]], memory: float) -> str | None:
    """Why a model is not read on, if it is not."""
    if looks[-1]["peak_bytes"] > memory:
        return f"more than {memory / 2**30:g} GiB"
    slower = looks[0]["rate"] / looks[-1]["rate"]
    return f"{slower:.0f} times slower than at the start" if slower > SLOW else None


def _summary(row: dict[str, Any]) -> dict[str, float | None]:
    """Of the last look over the first, and of the later decoding over the earlier."""
    looks, decode = row["looks"], [row["decode"].get(str(at)) for at in TIMED_AT]
    if not looks:
        return {"rate_ratio": None, "peak_ratio": None, "decode_ratio": None}
    first, last = looks[0], looks[-1]
    return {
        "rate_ratio": last["rate"] / first["rate"],
        "peak_ratio": last["peak_bytes"] / first["peak_bytes"],
        "decode_ratio": decode[1] / decode[0] if None not in decode else None,
    }


def picture(result: dict[str, Any], folder: Path) -> Path:
    """Draw speed and memory against the tokens read; the PNG, a PDF lies beside it."""
    shown = zip(result["rows"], KINDS * len(result["rows"]), strict=False)
    lines = [(row, Line(row["row"], {}, kind)) for row, kind in shown]

    def draw(axis: Axes, key: str, scale: float) -> None:
        for row, line in lines:
            x, y = zip(*((look["tokens"], look[key] / scale) for look in row["looks"]), strict=True)
            axis.plot(x, y, "o-", color=LIGHT[line.colour], markersize=2.5, linewidth=1)
        axis.set(xscale="log", yscale="log")

    speed = panel("Tokens a second", "speed against tokens read", draw, "tokens read", key="rate", scale=1)
    space = panel(
        "Memory, MiB", "memory against tokens read", draw, "tokens read", key="peak_bytes", scale=2**20
    )
    caption = "One CPU thread; the peak is of the whole process."
    legend = [line for _, line in lines]
    return save(Picture("stream", "A long text", caption, [speed, space], legend=legend), folder)[0]


def main() -> None:
    """Answer until the input ends."""
    reader = Reader(json.loads(sys.argv[1]))
    for line in sys.stdin:
        what, count = line.split()
        print(json.dumps({"read": reader.read, "decode": reader.decode}[what](int(count))), flush=True)


if __name__ == "__main__":
    main()
