"""Pictures as files: SVG for the page, coloured by its style sheet, and PNG and PDF for everything else."""

from __future__ import annotations

import io
import math
import os
import re
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from titans_platform.report.palette import Ink
from titans_platform.report.picture import Panel, Picture

STYLE: Any = {
    "svg.fonttype": "none",
    # the same drawing gives the same file
    "svg.hashsalt": "titans",
    "font.family": "DejaVu Sans",
    "axes.unicode_minus": True,
    "hatch.linewidth": 0.4,
    "pdf.fonttype": 42,
}
COLUMNS_WIDE, COLUMNS_NARROW = 3, 5
KINDS = ("png", "pdf")


def svg(panel: Panel, size: tuple[float, float], ident: str) -> str:
    """One panel as inline SVG: text in the page's font, colours by the page's names, described in words."""
    ink = Ink()
    with matplotlib.rc_context(STYLE):
        tight = ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02, wspace=0.04)
        figure = Figure(figsize=size, layout=tight)
        panel.draw(figure, ink)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(out.getvalue(), panel, ink, ident)


def _inline(text: str, panel: Panel, ink: Ink, ident: str) -> str:
    body = text[text.index("<svg") :]
    head, _, body = body.partition(">")
    view = re.search(r'viewBox="[^"]+"', head)
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.S)
    # groups are named figure_1, text_3 ... in every drawing: on one page names must differ
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = re.sub(r'id="([^"]+)"', rf'id="{ident}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{ident}-\1)", body)
    body = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{ident}-\1"', body)
    body = re.sub(r"font-family: [^;\"]*; ?", "", body)
    body = re.sub(r"#[0-9a-f]{6}", lambda match: ink.names.get(match[0], match[0]), body)
    body = re.sub(r">\s+<", "><", body).strip()
    title = f'<title id="{ident}-t">{escape(panel.alt)}</title>'
    assert view is not None
    return f'<svg {view[0]} role="img" aria-labelledby="{ident}-t">{title}{body}'


def save(picture: Picture, folder: Path) -> list[Path]:
    """The whole picture with its legend as PNG and as PDF, named by its key; never seen half-written."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{picture.key}.{kind}" for kind in KINDS]
    with matplotlib.rc_context(STYLE):
        figure = _composed(picture)
        for path in paths:
            temporary = path.with_name(f".{os.getpid()}.{path.name}")
            # no date: the same table gives the same file
            metadata: dict[str, Any] = {"CreationDate": None} if path.suffix == ".pdf" else {}
            figure.savefig(temporary, dpi=140, facecolor="white", metadata=metadata)
            os.replace(temporary, path)
            # what has been laid out need not be again
            figure.set_layout_engine("none")
    return paths


def _composed(picture: Picture) -> Figure:
    ink = Ink()
    count, (width, height) = len(picture.panels), picture.size
    across = min(count, COLUMNS_NARROW if width < 3 else COLUMNS_WIDE)
    down = math.ceil(count / across)
    below = 0.35 * math.ceil(len(picture.legend) / 6)
    figure = Figure(figsize=(width * across, height * down + below), layout="constrained")
    parts = figure.subfigures(down, across, squeeze=False).flatten()
    for part, panel in zip(parts, picture.panels, strict=False):
        part.set_facecolor("none")
        panel.draw(part, ink)
    if picture.legend:
        handles = [
            Line2D([], [], color=ink[line.colour], marker=line.marker, label=line.label)
            for line in picture.legend
        ]
        figure.legend(handles=handles, loc="outside lower left", ncols=6, frameon=False, fontsize=7.5)
    return figure
