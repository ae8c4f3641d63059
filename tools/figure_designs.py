"""Draw the memory's update and the designs MAC, MAG and MAL: `python tools/figure_designs.py`."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

TARGET = Path(__file__).resolve().parents[1] / "docs/designs.svg"
INK, MUTED = "#1f2430", "#5b6472"
MEMORY, MOMENTUM, SURPRISE = "#ffcf94", "#ffeed3", "#f6c6c6"
ATTENTION, TOKEN, PERSISTENT = "#d9e6f7", "#9dbfe8", "#8cc29a"
STYLE = {
    "font.family": "DejaVu Sans", "font.size": 9, "mathtext.fontset": "dejavusans", "text.color": INK,
    "svg.hashsalt": "designs", "svg.fonttype": "path",
}  # fmt: skip
SQUARE = 0.27


def box(ax: Axes, x: float, y: float, text: str, width: float, color: str, height: float = 0.78) -> None:
    """Draw a rounded box around its centre."""
    corner = (x - width / 2, y - height / 2)
    style = "round,pad=0,rounding_size=0.12"
    ax.add_patch(
        FancyBboxPatch(corner, width, height, boxstyle=style, facecolor=color, edgecolor=INK, lw=0.9)
    )
    ax.text(x, y, text, ha="center", va="center")


def circle(ax: Axes, x: float, y: float, sign: str) -> None:
    """Draw an operation on the arrows that meet there."""
    ax.plot(x, y, "o", ms=15, mfc="white", mec=INK, mew=0.9)
    ax.text(x, y, sign, ha="center", va="center_baseline", fontsize=11)


def arrow(ax: Axes, *points: tuple[float, float], dashed: bool = False) -> None:
    """Draw a line through points, with a head at the last."""
    style = {"color": INK, "lw": 1.1, "linestyle": (0, (3, 2)) if dashed else "-"}
    if len(points) > 2:
        ax.plot(*zip(*points[:-1], strict=True), solid_capstyle="butt", **style)
    head = {"arrowstyle": "-|>,head_length=0.45,head_width=0.2", "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", points[-1], points[-2], arrowprops=head | style)


def label(ax: Axes, x: float, y: float, text: str, *, ha: str = "center", color: str = INK) -> None:
    """Write a label."""
    ax.text(x, y, text, ha=ha, va="center", color=color)


def strip(ax: Axes, x: float, y: float, *parts: tuple[str, int, str]) -> list[float]:
    """Draw tokens around x as squares, the name of each part below it; return the parts' centres."""
    count = sum(n for _, n, _ in parts)
    left, centres = x - count * SQUARE / 2, []
    for name, n, color in parts:
        for i in range(n):
            corner = (left + i * SQUARE, y - SQUARE / 2)
            ax.add_patch(Rectangle(corner, SQUARE, SQUARE, facecolor=color, edgecolor="white", lw=1.2))
        centres.append(left + n * SQUARE / 2)
        label(ax, centres[-1], y - 0.36, name)
        left += n * SQUARE
    return centres


def draw_memory(ax: Axes) -> None:
    """Draw the update of the memory with one token (eqs. 11 to 15)."""
    ax.text(0.3, 6.15, "Memory M", weight="bold", fontsize=10.5)
    ax.text(2.45, 6.15, "an MLP; each token moves its weights by one step of gradient descent with momentum")
    top, middle, bottom = 5.0, 3.1, 1.2
    box(ax, 1.0, top, "$S_{t-1}$", 1.3, MOMENTUM)
    arrow(ax, (1.65, top), (6.13, top))
    label(ax, 3.6, top + 0.3, r"$\times\ \eta_t$  momentum")
    circle(ax, 6.4, top, "+")
    arrow(ax, (6.67, top), (8.6, top))
    box(ax, 9.25, top, "$S_t$", 1.3, MOMENTUM)
    label(ax, 10.15, top, r"$S_t = \eta_t S_{t-1} - \theta_t \nabla_t$", ha="left")
    label(ax, 15.75, top, "(14)", ha="right", color=MUTED)

    box(ax, 1.0, middle, "$x_t$", 1.3, TOKEN)
    arrow(ax, (1.65, middle), (4.1, middle))
    label(ax, 2.85, middle + 0.3, "$k_t,\\ v_t$")
    box(ax, 6.4, middle, r"surprise  $\nabla_t = \nabla \| M_{t-1}(k_t) - v_t \|^2$", 4.6, SURPRISE)
    label(ax, 8.7, middle - 0.65, "(12)", ha="right", color=MUTED)
    label(
        ax,
        0.35,
        0.25,
        "The tokens of a chunk take their surprise at the weights the chunk starts from (16).",
        ha="left",
    )
    arrow(ax, (6.4, middle + 0.39), (6.4, top - 0.27))
    label(ax, 6.55, (middle + top) / 2 + 0.1, r"$\times\ (-\theta_t)$  step", ha="left")

    box(ax, 1.0, bottom, "$M_{t-1}$", 1.3, MEMORY)
    arrow(ax, (1.65, bottom), (8.98, bottom))
    arrow(ax, (4.9, bottom), (4.9, middle - 0.39))
    label(ax, 7.0, bottom + 0.3, r"$\times\ (1 - \alpha_t)$  forgetting")
    circle(ax, 9.25, bottom, "+")
    arrow(ax, (9.25, top - 0.39), (9.25, bottom + 0.27))
    arrow(ax, (9.52, bottom), (10.4, bottom))
    box(ax, 11.05, bottom, "$M_t$", 1.3, MEMORY)
    label(ax, 11.9, bottom, r"$M_t = (1-\alpha_t) M_{t-1} + S_t$", ha="left")
    label(ax, 15.75, bottom, "(13)", ha="right", color=MUTED)
    arrow(ax, (11.05, bottom + 0.39), (11.05, middle - 0.39))
    box(ax, 11.05, middle, "read", 1.3, "white")
    label(ax, 9.78, middle + 0.3, "$q_t$")
    arrow(ax, (9.6, middle), (10.4, middle))
    arrow(ax, (11.7, middle), (12.5, middle))
    label(ax, 12.6, middle, "$y_t = M_t(q_t)$", ha="left")
    label(ax, 15.75, middle, "(15)", ha="right", color=MUTED)


def draw_mac(ax: Axes) -> None:
    """Draw memory as context (eqs. 21 to 25)."""
    title(ax, "MAC", "memory as context")
    _, h, z = strip(ax, 2.6, 2.85, ("p", 2, PERSISTENT), ("h", 4, MEMORY), ("Z", 4, TOKEN))
    strip(ax, z, 0.6, ("segment Z", 4, TOKEN))
    arrow(ax, (z, 0.8), (z, 2.3))
    box(ax, h - 0.2, 1.55, "read $M_{t-1}$", 1.7, MEMORY)
    arrow(ax, (z - 2.1 * SQUARE, 0.6), (h - 0.2, 0.6), (h - 0.2, 1.16))
    arrow(ax, (h - 0.2, 1.94), (h - 0.2, 2.3))
    box(ax, 2.6, 3.95, "attention in the segment", 3.7, ATTENTION)
    arrow(ax, (2.6, 3.05), (2.6, 3.56))
    box(ax, 1.55, 5.15, "write, read $M_t$", 2.1, MEMORY)
    arrow(ax, (1.55, 4.34), (1.55, 4.76))
    label(ax, 1.7, 4.53, "y", ha="left")
    gate(ax, (1.55, 5.54), (3.9, 4.34))
    arrow(ax, (h - 1.05, 1.55), (0.2, 1.55), (0.2, 5.15), (0.5, 5.15), dashed=True)
    numbers(ax, (1.55, "(21)"), (2.85, "(22)"), (3.95, "(23)"), (5.15, "(24)"), (6.1, "(25)"))


def draw_mag(ax: Axes) -> None:
    """Draw memory as a gate (eqs. 26 to 28)."""
    title(ax, "MAG", "memory as a gate")
    strip(ax, 2.4, 1.2, ("p", 2, PERSISTENT), ("tokens x", 8, TOKEN))
    box(ax, 1.1, 3.6, "memory M", 1.75, MEMORY, height=1.1)
    box(ax, 3.35, 3.6, "sliding-window\nattention", 2.2, ATTENTION, height=1.1)
    arrow(ax, (2.1, 1.4), (2.1, 2.2), (1.1, 2.2), (1.1, 3.05))
    arrow(ax, (2.7, 1.4), (2.7, 2.2), (3.35, 2.2), (3.35, 3.05))
    label(ax, 3.5, 4.6, "y", ha="left")
    gate(ax, (1.1, 4.15), (3.35, 4.15))
    numbers(ax, (1.2, "(26)"), (3.6, "(27)"), (6.1, "(28)"))
    note = "p: persistent tokens (19). h: what M recalls. Norms and residuals are not drawn."
    ax.text(0.3, 0.2, note, va="center", color=MUTED, clip_on=False)


def draw_mal(ax: Axes) -> None:
    """Draw memory as a layer (eqs. 29 to 31)."""
    title(ax, "MAL", "memory as a layer")
    strip(ax, 2.4, 1.2, ("p", 2, PERSISTENT), ("tokens x", 8, TOKEN))
    arrow(ax, (2.4, 1.4), (2.4, 2.25))
    box(ax, 2.4, 2.65, "memory M", 1.75, MEMORY)
    arrow(ax, (2.4, 3.04), (2.4, 4.05))
    label(ax, 2.55, 3.5, "y", ha="left")
    box(ax, 2.4, 4.6, "sliding-window\nattention", 2.2, ATTENTION, height=1.1)
    arrow(ax, (2.4, 5.15), (2.4, 6.75))
    label(ax, 2.55, 6.6, "o", ha="left")
    numbers(ax, (1.2, "(29)"), (2.65, "(30)"), (4.6, "(31)"))


def title(ax: Axes, name: str, meaning: str) -> None:
    """Write a design's name and what it stands for."""
    ax.text(0.3, 7.1, name, weight="bold", fontsize=10.5)
    ax.text(1.25, 7.1, meaning)


def gate(ax: Axes, memory: tuple[float, float], attention: tuple[float, float]) -> None:
    """Draw the product of the memory's output and attention's from their points, and the block's output o."""
    x, y = (memory[0] + attention[0]) / 2, 6.1
    arrow(ax, memory, (memory[0], y), (x - 0.27, y))
    arrow(ax, attention, (attention[0], y), (x + 0.27, y))
    circle(ax, x, y, r"$\times$")
    arrow(ax, (x, y + 0.27), (x, 6.75))
    label(ax, x + 0.15, 6.6, "o", ha="left")


def numbers(ax: Axes, *rows: tuple[float, str]) -> None:
    """Write equation numbers at the right edge."""
    for y, number in rows:
        label(ax, 5.08, y, number, ha="right", color=MUTED)


def figure() -> Figure:
    """Draw the figure, 800 px wide at 100 dpi; one unit of an axis is half an inch."""
    fig = Figure(figsize=(8, 7.3), facecolor="white")
    panels = [(draw_memory, 0.0, 7.9, 16.0, 6.7)]
    panels += [(draw, 5.33 * i, 0.0, 5.33, 7.6) for i, draw in enumerate((draw_mac, draw_mag, draw_mal))]
    for draw, x, y, width, height in panels:
        ax = fig.add_axes((x / 16, y / 14.6, width / 16, height / 14.6))
        ax.set(xlim=(0, width), ylim=(0, height))
        ax.axis("off")
        draw(ax)
    return fig


def main() -> None:
    """Write docs/designs.svg."""
    with matplotlib.rc_context(STYLE):
        figure().savefig(TARGET, metadata={"Date": None})


if __name__ == "__main__":
    main()
