"""Draw docs/designs.svg, the memory's update and the designs MAC, MAG and MAL: `python tools/figure_designs.py`."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

TARGET = Path(__file__).resolve().parents[1] / "docs/designs.svg"
INK, MUTED = "#1f2430", "#5b6472"
MEMORY, MOMENTUM, SURPRISE = "#ffd9a8", "#fff1dc", "#f6c6c6"
ATTENTION, TOKEN, PERSISTENT = "#cfe0f5", "#7fa8d9", "#8cc29a"
STYLE = {
    "font.family": "DejaVu Sans", "font.size": 9, "mathtext.fontset": "dejavusans", "text.color": INK,
    "svg.hashsalt": "designs", "svg.fonttype": "path",
}  # fmt: skip
SQUARE = 0.27


def box(ax: Axes, x: float, y: float, text: str, width: float, color: str, height: float = 0.78) -> None:
    """Draw a rounded box around its centre."""
    corner = (x - width / 2, y - height / 2)
    style = "round,pad=0,rounding_size=0.12"
    ax.add_patch(FancyBboxPatch(corner, width, height, boxstyle=style, facecolor=color, edgecolor=INK, lw=0.9))
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


def label(ax: Axes, x: float, y: float, text: str, ha: str = "center", color: str = INK) -> None:
    """Write a label."""
    ax.text(x, y, text, ha=ha, va="center", color=color)


def strip(ax: Axes, x: float, y: float, *parts: tuple[str, int, str]) -> list[float]:
    """Draw a sequence of tokens around x as squares, each part with its name below; return the parts' centres."""
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
    ax.text(0, 6.0, "The memory M", weight="bold", fontsize=10.5)
    ax.text(2.35, 6.0, "is an MLP; each token changes its weights by one step of gradient descent", fontsize=9)
    top, middle, bottom = 5.0, 3.1, 1.2
    box(ax, 1.0, top, "$S_{t-1}$", 1.3, MOMENTUM)
    arrow(ax, (1.65, top), (6.13, top))
    label(ax, 3.6, top + 0.3, r"$\times\ \eta_t$  momentum")
    circle(ax, 6.4, top, "+")
    arrow(ax, (6.67, top), (8.6, top))
    box(ax, 9.25, top, "$S_t$", 1.3, MOMENTUM)
    label(ax, 11.4, top, r"$S_t = \eta_t S_{t-1} - \theta_t \nabla_t$", ha="left")
    label(ax, 15.95, top, "(14)", ha="right", color=MUTED)

    box(ax, 1.0, middle, "$x_t$", 1.3, ATTENTION)
    arrow(ax, (1.65, middle), (4.1, middle))
    label(ax, 2.85, middle + 0.3, "$k_t,\\ v_t$")
    box(ax, 6.4, middle, r"surprise  $\nabla_t = \nabla \| M_{t-1}(k_t) - v_t \|^2$", 4.6, SURPRISE)
    label(ax, 8.75, middle - 0.65, "(12)", ha="right", color=MUTED)
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
    label(ax, 12.0, bottom, r"$M_t = (1-\alpha_t) M_{t-1} + S_t$", ha="left")
    label(ax, 15.95, bottom - 0.42, "(13)", ha="right", color=MUTED)
    arrow(ax, (11.05, bottom + 0.39), (11.05, middle - 0.39))
    box(ax, 11.05, middle, "read", 1.3, "white")
    label(ax, 9.78, middle + 0.3, "$q_t$")
    arrow(ax, (9.6, middle), (10.4, middle))
    arrow(ax, (11.7, middle), (12.5, middle))
    label(ax, 12.6, middle, "$y_t = M_t(q_t)$", ha="left")
    label(ax, 15.95, middle, "(15)", ha="right", color=MUTED)


def title(ax: Axes, name: str, meaning: str) -> None:
    ax.text(0.1, 7.15, name, weight="bold", fontsize=10.5)
    ax.text(1.0, 7.15, meaning, fontsize=9)


def draw_mac(ax: Axes) -> None:
    """Draw memory as context (eqs. 21 to 25)."""
    title(ax, "MAC", "memory as context")
    _, h, z = strip(ax, 2.9, 2.75, ("p", 2, PERSISTENT), ("h", 4, MEMORY), ("Z", 4, TOKEN))
    strip(ax, z, 0.45, ("segment Z", 4, TOKEN))


def figure() -> Figure:
    """Draw the figure, 800 px wide at 100 dpi."""
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(8, 6.9), facecolor="white")
        whole = fig.add_axes((0, 0, 1, 1))
        whole.set(xlim=(0, 16.4), ylim=(0, 14.1))
    return fig


def main() -> None:
    """Write the figure."""
    with matplotlib.rc_context(STYLE):
        figure().savefig(TARGET, metadata={"Date": None})


if __name__ == "__main__":
    main()
