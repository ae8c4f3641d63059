"""Figures of a report: panels, lines and colours, and their export as SVG, PNG and PDF."""

from __future__ import annotations

import io
import math
import os
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib import style
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, to_hex
from matplotlib.figure import Figure, FigureBase
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from titans_platform.text import short

COLOURS = {
    "page": ("#ffffff", "#14171b"), "ink": ("#1f2328", "#e4e7ea"), "muted": ("#57606a", "#9da7b2"),
    "faint": ("#dbe0e6", "#343b44"), "ghost": ("#c3cad2", "#4a535e"), "accent": ("#1a5fb4", "#7db8ff"),
    "paper": ("#8f5f00", "#dba63c"), "reference": ("#79828d", "#8b949f"), "heat": ("#0b4f9e", "#8cc4ff"),
    "a": ("#1b69c8", "#6cb0fe"), "b": ("#c2410d", "#ff9b6b"), "c": ("#0e7a5e", "#4cc9a3"),
    "d": ("#8a3eb4", "#cf9bf1"), "e": ("#996600", "#e0b041"), "f": ("#bf257d", "#ff8ac5"),
    "s1": ("#4a8fce", "#3d7fc1"), "s2": ("#2e77c3", "#66a7e5"), "s3": ("#1b549b", "#9ccbf6"),
    "s4": ("#0d3165", "#dbeefe"),
}  # fmt: skip
LIGHT, DARK = ({name: pair[i] for name, pair in COLOURS.items()} for i in (0, 1))
KINDS, STEPS = ("a", "b", "c", "d", "e", "f"), ("s1", "s2", "s3", "s4")
MARKERS = ("o", "s", "^", "D", "v", "P")
SMALL, TEXT = 7.0, 7.6

PERCENT = range(5, 93)
"""Percentages of the heat colour in a tile, from worst to best."""
_MIXED = LinearSegmentedColormap.from_list("mixed", [LIGHT["page"], LIGHT["heat"]], 101)(PERCENT)
HEAT = ListedColormap(_MIXED, "heat")
NAMES = {
    to_hex(colour): f"color-mix(in srgb, var(--heat) {percent}%, var(--page))"
    for colour, percent in zip(_MIXED, PERCENT, strict=True)
} | {value: f"var(--{name})" for name, value in LIGHT.items()}
"""CSS variable of each drawn colour; the page has another value for it in dark mode."""

STYLE: list[Any] = [
    Path(__file__).with_name("report.mplstyle"),
    {"text.color": LIGHT["ink"], "axes.edgecolor": LIGHT["ghost"], "grid.color": LIGHT["faint"]},
    dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), LIGHT["muted"]),
]
"""Style sheet and colours of every panel."""

WIDE, NARROW = (3.5, 2.3), (1.9, 1.4)
"""Width and height of a panel in inches."""
ACROSS_WIDE, ACROSS_NARROW = 3, 5
"""Panels per row in a PNG or PDF."""
ANY = (-math.inf, math.inf)
MAX_DESCRIBED = 8
"""Maximum lines that a text alternative describes."""


def ordered(count: int) -> tuple[str, ...]:
    """``count`` (at most four) colour names for ordered values, light to dark."""
    picks = {1: (2,), 2: (0, 3), 3: (0, 2, 3)}.get(count, range(4))
    return tuple(STEPS[i] for i in picks)


@dataclass(frozen=True)
class Panel:
    """One panel in any format; ``alt`` is its text alternative."""

    alt: str
    draw: Callable[[FigureBase], None]


@dataclass(frozen=True)
class Line:
    """One line of a panel: its values for each seed, and its style."""

    label: str
    points: Mapping[float, tuple[float, ...]]
    colour: str = "accent"
    marker: str = "o"
    runs: Sequence[Sequence[tuple[float, float]]] = ()
    """Curves of single runs, drawn thin below the mean."""
    printed: Mapping[float, float] = field(default_factory=dict)
    """The paper's numbers by x, drawn dashed."""
    spread: bool = True
    """Whether the standard deviation over seeds is shown."""
    bounds: tuple[float, float] = ANY
    """Range of the measure, to which the spread is clipped."""

    @property
    def means(self) -> dict[float, float]:
        """The mean over seeds by x, sorted."""
        return {x: statistics.fmean(self.points[x]) for x in sorted(self.points)}


@dataclass(frozen=True)
class Picture:
    """A figure of the report: panels of equal size under one caption."""

    key: str
    title: str
    caption: str
    panels: Sequence[Panel]
    size: tuple[float, float] = WIDE
    legend: Sequence[Line] = ()


def ends(lines: Sequence[Line], decimals: int) -> str:
    """First and last value of each line in words, for a text alternative."""
    found = [(line.label, list(line.means.values())) for line in lines if line.points]
    words = [
        f"{name} from {short(means[0], decimals)} to {short(means[-1], decimals)}"
        for name, means in found[:MAX_DESCRIBED]
    ]
    words += [f"and {len(found) - MAX_DESCRIBED} more"] if len(found) > MAX_DESCRIBED else []
    return "; ".join(words) or "nothing measured yet"


def panel(title: str, alt: str, draw: Callable[..., object], x: str = "", y: str = "", **drawn: Any) -> Panel:
    """A panel with one set of axes and its labels; calls ``draw(axes, **drawn)``."""

    def paint(figure: FigureBase) -> None:
        axis = figure.subplots()
        draw(axis, **drawn)
        # 13 characters of a title fit into an inch; a longer one would run into the next panel's
        inches = figure.get_window_extent().width / figure.figure.dpi
        axis.set(title=fill(title, max(10, round(13 * inches))), xlabel=x, ylabel=y)

    return Panel(alt, paint)


def svg(panel: Panel, size: tuple[float, float], ident: str) -> str:
    """One panel as inline SVG with the page's font, its CSS colour variables and a text alternative."""
    # ids come from the salt: unique on a page, the same in every run
    with style.context([*STYLE, {"svg.hashsalt": ident}]):
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02, wspace=0.04))
        panel.draw(figure)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    head, _, body = out.getvalue().partition("<svg")[2].partition(">")
    view = re.findall(r'viewBox="[^"]+"', head)[0]
    body = re.sub(r"<metadata>.*?</metadata>|font-family: [^;\"]*; ?", "", body, flags=re.S)
    # ids of groups are the same in every drawing, so they are removed
    for pattern, new in ((r'<g id="[^"]*"', "<g"), (r"xlink:href=", "href="), (r">\s+<", "><")):
        body = re.sub(pattern, new, body)
    body = re.sub("#[0-9a-f]{6}", lambda match: NAMES.get(match[0], match[0]), body).strip()
    title = f'<title id="{ident}-t">{escape(panel.alt)}</title>'
    return f'<svg {view} role="img" aria-labelledby="{ident}-t">{title}{body}'


def save(picture: Picture, folder: Path) -> list[Path]:
    """Write the figure with its legend as PNG and PDF, named by its key, atomically; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{picture.key}.{kind}" for kind in ("png", "pdf")]
    with style.context(STYLE):
        figure = _composed(picture)
        for path in paths:
            temporary = path.with_name(f".{os.getpid()}.{path.name}")
            # no date, so that the same table gives the same bytes
            metadata: dict[str, Any] = {"CreationDate": None} if path.suffix == ".pdf" else {}
            figure.savefig(temporary, dpi=140, facecolor="white", metadata=metadata)
            os.replace(temporary, path)
            # the layout is computed once for both formats
            figure.set_layout_engine("none")
    return paths


def _composed(picture: Picture) -> Figure:
    count, (width, height) = len(picture.panels), picture.size
    across = min(count, ACROSS_NARROW if width < 3 else ACROSS_WIDE)
    # inches of the longest entry: its mark, and letters of 7.5 points
    entry = 0.5 + 0.065 * max((len(line.label) for line in picture.legend), default=0)
    columns = max(1, min(6, int(width * across / entry)))
    down, below = math.ceil(count / across), 0.35 * math.ceil(len(picture.legend) / columns)
    figure = Figure(figsize=(width * across, height * down + below), layout="constrained")
    parts = figure.subfigures(down, across, squeeze=False).flatten()
    for part, panel in zip(parts, picture.panels, strict=False):
        panel.draw(part)
    if picture.legend:
        handles = [
            Line2D([], [], color=LIGHT[line.colour], marker=line.marker, label=line.label)
            for line in picture.legend
        ]
        figure.legend(handles=handles, loc="outside lower left", ncols=columns)
    return figure
