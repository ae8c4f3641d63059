"""`titans inspect`: the trace of a model's memories over a text, as a table and as an HTML page.

On the page a text is coloured by surprise, retention or loss, beside the keys that reads find.
Shapes: T tokens, H heads.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pandas import DataFrame, concat
from torch import Tensor
from torch.nn import functional as F

from titans_core import LanguageModel, MemoryTrace, Nearest, watch
from titans_platform.data import Tokenizer
from titans_platform.data.tokenizer import TextStream
from titans_platform.errors import UsageError, within
from titans_platform.files import write_bytes
from titans_platform.report import picture as plot
from titans_platform.report.picture import KINDS, NARROW, WIDE, Line, Picture, panel
from titans_platform.report.publish import figure, html
from titans_platform.text import count

NEAREST = 5
"""Nearest written keys that are kept for each read."""
POINTS = 60
"""Points of a line; each is a mean over neighbouring tokens."""
FAR_APART = 20.0
"""Ratio of largest to smallest value from which a scale is logarithmic."""
AROUND = 8
"""Tokens of context shown before and after a retrieved token."""
CHARTS = {
    "surprise": "Surprise", "alpha": "Forgetting alpha", "eta": "Momentum eta", "theta": "Step theta",
    "weight_norm": "Norm of the weights", "momentum_norm": "Norm of the momentum",
}  # fmt: skip

MEASURED = (
    "surprise", "written", "final", "alpha", "eta", "theta", "weight_norm", "momentum_norm", "coefficient",
)  # fmt: skip


@dataclass(frozen=True)
class Inspected:
    """A text, its losses, and the trace of each memory."""

    title: str
    variant: str
    tokens: list[int]
    """Document start included."""
    texts: list[str]
    """Text of each token; of a character of several tokens the last has it, the others are empty."""
    loss: Tensor
    """Nats of each token given those before it, [T]; NaN for the first."""
    traces: list[MemoryTrace]
    left_out: int = 0
    """Tokens of the text that were not read."""
    gain: Tensor | None = None
    """Of an adapted model, which has no trace: loss with the window alone less ``loss``, [T]."""

    def largest(self) -> dict[str, float]:
        """Return the largest weight norm and surprise of a token, as `titans_core.telemetry` has them."""
        if not self.traces:
            return {}
        norms = (trace.weight_norm.nan_to_num(0).square().sum(-1).sqrt() for trace in self.traces)
        largest = max(float(norm.max()) for norm in norms)
        return {"weight_norm": largest, "surprise": max(float(t.surprise.max()) for t in self.traces)}


def inspect_text(model: Any, tokenizer: Tokenizer, text: str, title: str, max_tokens: int) -> Inspected:
    """Read the first ``max_tokens`` tokens of ``text`` and record what each memory does.

    Of a model of `titans_core.adapt`, what memory and kept tokens bring to each token.

    Raises:
        UsageError: the text is empty, or the model has no neural memory.
    """
    ids = tokenizer.encode(text)
    if not ids:
        raise UsageError("--text: the file is empty; give one with something to read")
    tokens = [tokenizer.bos, *ids[: max_tokens - 1]]
    row, left = torch.tensor([tokens], device=next(model.parameters()).device), 1 + len(ids) - len(tokens)
    texts = token_texts(tokenizer, tokens)
    if not isinstance(model, LanguageModel):
        with within(f"{title}: ", ValueError, ""):  # such as a text longer than a table of positions
            both = [model.nats(row, far)[0] for far in ("memory", "window")]
        loss, window = (F.pad(nats, (1, 0), value=math.nan).cpu() for nats in both)
        return Inspected(title, model.config.model_type, tokens, texts, loss, [], left, window - loss)
    with watch(model) as seen, torch.no_grad():
        logits = model(row).logits[0]
    if not (traces := seen.traces(NEAREST)):
        variant = f"variant {model.config.variant} has no neural memory"
        raise UsageError(f"{title}: {variant}; inspect a run of lmm, mac, mag or mal")
    loss = F.cross_entropy(logits[:-1].float(), row[0, 1:], reduction="none").cpu()
    loss = F.pad(loss, (1, 0), value=math.nan)
    return Inspected(title, model.config.variant, tokens, texts, loss, traces, left)


def token_texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Text that each token adds; of a character of several tokens the last has it, the others ''."""
    stream = TextStream(tokenizer)
    texts = [stream.add(token) for token in tokens]
    return [*texts[:-1], texts[-1] + stream.end()]


def as_frame(inspected: Inspected) -> DataFrame:
    """Return a row for each memory, token and head, in this order; NaN for an unknown number.

    Of an adapted model a row for each token.
    """
    by_token: dict[str, Any] = {"position": range(len(inspected.tokens)), "token": inspected.tokens}
    by_token |= {"text": inspected.texts, "loss": inspected.loss}
    if inspected.gain is not None:
        return DataFrame(by_token | {"gain": inspected.gain})
    parts = []
    for trace in inspected.traces:
        T, H = trace.surprise.shape
        columns: dict[str, Any] = {key: np.repeat(np.asarray(x), H) for key, x in by_token.items()}
        columns |= {"memory": trace.name, "head": np.tile(np.arange(H), T)}
        columns |= {name: getattr(trace, name).flatten().numpy() for name in MEASURED}
        for name, near in (("read", trace.own), ("context", trace.context)):
            heads = near and [keys_of(near, head) for head in range(H)]
            columns[name] = heads and [heads[head][t] for t in range(T) for head in range(H)]
        parts.append(DataFrame(columns))
    return concat(parts, ignore_index=True)


def write_arrow(inspected: Inspected, path: Path) -> None:
    """Write the table as an Arrow IPC file, which `pandas.read_feather` and pyarrow read."""
    out = io.BytesIO()
    as_frame(inspected).to_feather(out)
    write_bytes(path, out.getvalue())


def keys_of(near: Nearest, head: int) -> list[list[dict[str, Any]]]:
    """Return the nearest written keys of one head for each token; an unknown share is None."""
    columns = (values[:, head].tolist() for values in near)
    return [
        [
            {"position": at, "similarity": cosine, "share": None if math.isnan(share) else share}
            for at, cosine, share in zip(*token, strict=True)
            if at >= 0
        ]
        for token in zip(*columns, strict=True)
    ]


def page(inspected: Inspected, source: str, warning: str = "") -> str:
    """Render the page, which needs no other file.

    Args:
        inspected: The text that was read.
        source: Name of the file.
        warning: Printed at the top, e.g. that the memory's norms are out of range.
    """
    reads = list(all_reads(inspected.traces))
    kept = kept_shares(inspected.traces).tolist() if reads else []
    shares = [round(x, 2) for x in kept]
    figures = [[*map(figure, charts(i, trace))] for i, trace in enumerate(inspected.traces)]
    gates, errors = zip(*figures, strict=True) if figures else ((), ())
    return html(
        "inspect.html", inspected=inspected, source=source, warning=warning, shades=shades(inspected),
        around=lambda i: (inspected.texts[max(0, i - AROUND) : i], inspected.texts[i + 1 : i + 1 + AROUND]),
        chosen=len(inspected.tokens) - 1, reads=reads, kept=kept, gates=gates, errors=errors, spread=AROUND,
        summary=[summary(trace) for trace in inspected.traces],
        data={"texts": inspected.texts, "kept": shares, "reads": reads},
    )  # fmt: skip


def kept_shares(traces: Sequence[MemoryTrace]) -> Tensor:
    """[T] share of each token's surprise that the final memory no longer has; mean over heads."""
    shares = [1 - trace.final / trace.surprise.clamp(min=1e-12) for trace in traces]
    return torch.cat([share.clamp(0, 1) for share in shares], 1).mean(1)


def shades(inspected: Inspected) -> list[dict[str, Any]]:
    """Return the quantities to colour tokens by, each as `_shade` has it; the page opens with the first."""
    loss = _shade("loss", "loss of the whole model in nats", inspected.loss)
    if inspected.gain is not None:
        gain = "nats by which memory and kept tokens lower the loss that the window alone has"
        return [_shade("gain", gain, inspected.gain), loss]
    surprise = torch.cat([trace.surprise for trace in inspected.traces], 1).mean(1)
    error = "squared error of the memory's prediction before the token is written, mean over heads"
    lost = "share of the surprise that the memory at the end of the text no longer has"
    memory = [_shade("surprise", error, surprise), _shade("kept", lost, kept_shares(inspected.traces))]
    return [*memory, loss]


def _shade(key: str, caption: str, values: Tensor) -> dict[str, Any]:
    """Scale values from the 2nd to the 98th percentile, at most Tukey's outer fence.

    A burst of large values thus leaves no other token pale. ``strength`` is each token's colour, 0 to 1,
    ``ends`` the values of the lightest and the strongest colour.
    """
    known = values[values.isfinite()].double()
    quantiles = [float(known.quantile(q)) for q in (0.02, 0.25, 0.75, 0.98)] if len(known) else [0.0] * 4
    low, first, third, high = quantiles
    if third > first and high > (fence := third + 3 * (third - first)):
        high, caption = fence, f"{caption}; the strongest colour: {rounded(fence)} and above"
    if 0 < FAR_APART * low < high:
        strength, caption = (values / low).log() / math.log(high / low), f"{caption}; logarithmic scale"
    else:
        strength = (values - low) / max(high - low, 1e-12)
    shown = [round(x, 2) for x in strength.clamp(0, 1).nan_to_num().tolist()]
    return {"key": key, "about": caption, "strength": shown, "ends": (rounded(low), rounded(high))}


def rounded(value: float) -> str:
    """Format a number in three digits: 0.0123, 241, 15.9K."""
    return count(value) if abs(value) >= 1e4 else f"{value:.3g}"


def all_reads(traces: Sequence[MemoryTrace]) -> Iterator[dict[str, Any]]:
    """Yield reads of each memory and head; in MAC, reads of segments before reads of single tokens.

    ``near`` has for each token position, cosine and share of each of the nearest keys.
    """
    for memory, trace in enumerate(traces):
        kinds = [("", trace.own)]
        if trace.context is not None:
            kinds = [(", segments before", trace.context), (", own read", trace.own)]
        for kind, near in kinds:
            for head in range(trace.alpha.shape[1]):
                keys = [
                    [(key["position"], round(key["similarity"], 2), key["share"] and round(key["share"], 3))
                     for key in token]
                    for token in keys_of(near, head)
                ]  # fmt: skip
                yield {"label": f"memory {memory}, head {head}{kind}", "near": keys}


def summary(trace: MemoryTrace) -> list[str]:
    """Return one memory's row: mean errors before, after and at the end, share kept, gates, final norms."""
    means = [getattr(trace, name).mean().item() for name in ("surprise", "written", "final")]
    gates = [getattr(trace, name).mean().item() for name in ("alpha", "eta", "theta")]
    norms = [getattr(trace, name)[-1].mean().item() for name in ("weight_norm", "momentum_norm")]
    kept = 100 * kept_shares([trace]).mean().item()
    return [trace.name, *map(rounded, means), f"{kept:.0f}%", *map(rounded, (*gates, *norms))]


def charts(memory: int, trace: MemoryTrace) -> list[Picture]:
    """Draw the figures of a memory: each quantity by head; the errors of a token's pair."""
    panels, heads = [], []
    for key, title in CHARTS.items():
        looks = zip(itertools.count(), getattr(trace, key).unbind(1), itertools.cycle(KINDS), strict=False)
        heads = [Line(f"head {i}", binned(x_T.numpy()), c, "") for i, x_T, c in looks]
        panels.append(panel(title, plot.lines, "token", shown=heads, log_y=_far_apart(heads)))
    errors = {"before": trace.surprise, "right after": trace.written, "at the end": trace.final}
    looks = zip(errors.items(), "acb", strict=True)
    lines = [Line(name, binned(x_TH.mean(1).numpy()), c, "") for (name, x_TH), c in looks]
    fates = panel("Error of a token's pair", plot.lines, "token", shown=lines, log_y=_far_apart(lines))
    return [
        Picture(f"memory-{memory}", f"{trace.name}: gates and state", "", panels, NARROW, heads),
        Picture(f"errors-{memory}", f"{trace.name}: errors", "", [fates], WIDE, lines),
    ]


def _far_apart(lines: Sequence[Line]) -> bool:
    """Return True if the lines need a logarithmic scale."""
    means = [mean for line in lines for mean in line.means.values()]
    return bool(means) and 0 < FAR_APART * min(means) < max(means)


def binned(values: NDArray[np.floating], points: int = POINTS) -> dict[float, tuple[float, ...]]:
    """Means over at most ``points`` equal bins, NaN left out, keyed by the last token of each bin."""
    at = np.flatnonzero(~np.isnan(values))
    parts = np.array_split(at, min(points, len(at))) if len(at) else []
    return {float(part[-1]): (float(values[part].mean()),) for part in parts}
