"""The page of `titans inspect`: a text coloured by surprise, retention or loss, and the keys that reads find.

Shapes: T tokens, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from markupsafe import Markup
from numpy.typing import NDArray
from torch import Tensor

from titans_core import MemoryTrace, Nearest
from titans_platform.report.figures import plot
from titans_platform.report.figures.picture import KINDS, NARROW, WIDE, Line, Panel, panel, svg
from titans_platform.report.numbers.inspected import Inspected
from titans_platform.report.render.html import render
from titans_platform.text import count

PAGE = "inspect.html"
POINTS = 60
"""Points of a line; each is a mean over neighbouring tokens."""
FAR_APART = 20.0
"""Ratio of largest to smallest value from which a scale is logarithmic."""
AROUND = 8
"""Tokens of context shown before and after a retrieved token."""
CHARTS = {
    "surprise": "Surprise",
    "alpha": "Forgetting alpha",
    "eta": "Momentum eta",
    "theta": "Step theta",
    "weight_norm": "Norm of the weights",
    "momentum_norm": "Norm of the momentum",
}


@dataclass(frozen=True)
class Shade:
    """A quantity that tokens are coloured by."""

    key: str
    title: str
    about: str
    strength: list[float]
    """Strength of each token's colour, 0 to 1."""
    ends: tuple[str, str]
    """Values of the lightest and the strongest colour."""


@dataclass(frozen=True)
class Read:
    """Reads of one head: for each token, position, cosine and share of each of the nearest keys."""

    label: str
    near: list[list[tuple[int, float, float | None]]]


def page(found: Inspected, source: str, position: int | None = None, warning: str = "") -> str:
    """The page, which needs no other file.

    Args:
        found: The text that was read.
        source: Name of the file.
        position: The token whose reads are shown first; None: the last.
        warning: Printed at the top, e.g. that the memory's norms are out of range.
    """
    chosen, reads = len(found.tokens) - 1 if position is None else position, list(all_reads(found.traces))
    kept = kept_shares(found.traces).tolist()
    data = {
        "texts": found.texts,
        "kept": [round(x, 2) for x in kept],
        "reads": [vars(read) for read in reads],
    }
    return render(
        PAGE,
        found=found,
        source=source,
        warning=warning,
        shades=shades(found),
        chosen=chosen,
        around=lambda i: (found.texts[max(0, i - AROUND) : i], found.texts[i + 1 : i + 1 + AROUND]),
        reads=reads,
        kept=kept,
        summary=[summary(trace) for trace in found.traces],
        memories=[charts(i, trace) for i, trace in enumerate(found.traces)],
        heads=[
            (head, KINDS[head % len(KINDS)]) for head in range(max(t.alpha.shape[1] for t in found.traces))
        ],
        data=data,
        spread=AROUND,
    )


def kept_shares(traces: Sequence[MemoryTrace]) -> Tensor:
    """[T] share of each token's surprise that the final memory no longer has; mean over heads."""
    shares = [1 - trace.final / trace.surprise.clamp(min=1e-12) for trace in traces]
    return torch.cat([share.clamp(0, 1) for share in shares], 1).mean(1)


def shades(found: Inspected) -> list[Shade]:
    """The quantities to colour by; the page opens with the first."""
    surprise = torch.cat([trace.surprise for trace in found.traces], 1).mean(1)
    kept = kept_shares(found.traces)
    return [
        _shade(
            "surprise",
            "surprise",
            "squared error of the memory's prediction before the token is written, mean over heads",
            surprise,
        ),
        _shade(
            "kept", "kept", "share of the surprise that the memory at the end of the text no longer has", kept
        ),
        _shade("loss", "loss", "loss of the whole model in nats", found.loss),
    ]


def _shade(key: str, title: str, about: str, values: Tensor) -> Shade:
    """From the 2nd to the 98th percentile, at most Tukey's outer fence, so that a burst leaves no token pale.

    Logarithmic where these are far apart: where all tokens after a burst have large values.
    """
    known = values[values.isfinite()].double()
    quantiles = [float(known.quantile(q)) for q in (0.02, 0.25, 0.75, 0.98)] if len(known) else [0.0] * 4
    low, first, third, high = quantiles
    if third > first and high > (fence := third + 3 * (third - first)):
        high, about = fence, f"{about}; the strongest colour: {rounded(fence)} and above"
    if 0 < FAR_APART * low < high:
        strength, about = (values / low).log() / math.log(high / low), f"{about}; logarithmic scale"
    else:
        strength = (values - low) / max(high - low, 1e-12)
    shown = [round(x, 2) for x in strength.clamp(0, 1).nan_to_num().tolist()]
    return Shade(key, title, about, shown, (rounded(low), rounded(high)))


def rounded(value: float) -> str:
    """A number in three digits: 0.0123, 241, 15.9K."""
    return count(value) if abs(value) >= 1e4 else f"{value:.3g}"


def all_reads(traces: Sequence[MemoryTrace]) -> Iterator[Read]:
    """Reads of each memory and head; in MAC, those of segments before those of single tokens."""
    for memory, trace in enumerate(traces):
        for near, kind in ((trace.context, ", segments before"), (trace.own, ", own read")):
            for head in range(trace.alpha.shape[1] if near is not None else 0):
                label = f"memory {memory}, head {head}{kind if trace.context is not None else ''}"
                yield Read(label, _near(near, head))


def _near(near: Nearest | None, head: int) -> list[list[tuple[int, float, float | None]]]:
    assert near is not None
    return [
        [
            (at, round(cosine, 2), None if share != share else round(share, 3))
            for at, cosine, share in zip(*line, strict=True)
            if at >= 0
        ]
        for line in zip(*(x[:, head].tolist() for x in near), strict=True)
    ]


def summary(trace: MemoryTrace) -> list[str]:
    """One memory's row: mean errors before, after and at the end, share kept, mean gates, final norms."""
    means = [getattr(trace, name).mean().item() for name in ("surprise", "written", "final")]
    gates = [getattr(trace, name).mean().item() for name in ("alpha", "eta", "theta")]
    norms = [getattr(trace, name)[-1].mean().item() for name in ("weight_norm", "momentum_norm")]
    kept = 100 * kept_shares([trace]).mean().item()
    return [
        trace.name,
        *map(rounded, means),
        f"{kept:.0f}%",
        *map(rounded, (*gates, *norms)),
    ]


def charts(memory: int, trace: MemoryTrace) -> dict[str, Any]:
    """A memory's panels as SVG: each quantity by head, then the errors."""
    drawn = [_by_head(title, getattr(trace, key)) for key, title in CHARTS.items()]
    drawn.append(_fates(trace))
    sizes = [NARROW] * len(CHARTS) + [WIDE]
    sized = enumerate(zip(drawn, sizes, strict=True))
    panels = [Markup(svg(each, size, f"m{memory}-{i}")) for i, (each, size) in sized]
    return {"name": trace.name, "panels": panels[:-1], "fates": panels[-1]}


def _by_head(title: str, values_TH: Tensor) -> Panel:
    lines = [
        Line(f"head {head}", binned(values.numpy()), KINDS[head % len(KINDS)], spread=False)
        for head, values in enumerate(values_TH.unbind(1))
    ]
    means = values_TH.nanmean(0).tolist()
    alt = f"{title} by token: " + ", ".join(f"head {i} {mean:.3g} on average" for i, mean in enumerate(means))
    return panel(title, alt, partial(plot.lines, log_y=_far_apart(lines)), "token", shown=lines)


def _far_apart(lines: Sequence[Line]) -> bool:
    """Whether the lines need a logarithmic scale."""
    means = [mean for line in lines for mean in line.means.values()]
    return bool(means) and 0 < FAR_APART * min(means) < max(means)


def _fates(trace: MemoryTrace) -> Panel:
    named = {"before": ("surprise", "a"), "right after": ("written", "c"), "at the end": ("final", "b")}
    lines = [
        Line(name, binned(getattr(trace, key).mean(1).numpy()), colour, spread=False)
        for name, (key, colour) in named.items()
    ]
    ends = ", ".join(f"{name} {getattr(trace, key).mean().item():.3g}" for name, (key, _) in named.items())
    alt, draw = f"Error by token, on average {ends}", partial(plot.lines, log_y=_far_apart(lines))
    return panel("Error of a token's pair", alt, draw, "token", shown=lines)


def binned(values: NDArray[np.floating], points: int = POINTS) -> dict[float, tuple[float, ...]]:
    """Means over at most ``points`` equal bins, NaN left out, keyed by the last token of each bin."""
    at = np.flatnonzero(~np.isnan(values))
    parts = np.array_split(at, min(points, len(at))) if len(at) else []
    return {float(part[-1]): (float(values[part].mean()),) for part in parts}
