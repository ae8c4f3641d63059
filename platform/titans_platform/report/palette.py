"""How figures look: one set of colour names with values for light and dark, and matplotlib's settings."""

from __future__ import annotations

from pathlib import Path

from matplotlib.colors import LinearSegmentedColormap, ListedColormap, to_hex

COLOURS = {
    "page": ("#ffffff", "#14171b"),
    "ink": ("#1f2328", "#e4e7ea"),
    "muted": ("#57606a", "#9da7b2"),
    "faint": ("#dbe0e6", "#343b44"),
    "ghost": ("#c3cad2", "#4a535e"),
    "accent": ("#1a5fb4", "#7db8ff"),
    "paper": ("#8f5f00", "#dba63c"),
    "reference": ("#79828d", "#8b949f"),
    "heat": ("#0b4f9e", "#8cc4ff"),
    "a": ("#1b69c8", "#6cb0fe"),
    "b": ("#c2410d", "#ff9b6b"),
    "c": ("#0e7a5e", "#4cc9a3"),
    "d": ("#8a3eb4", "#cf9bf1"),
    "e": ("#996600", "#e0b041"),
    "f": ("#bf257d", "#ff8ac5"),
    "s1": ("#4a8fce", "#3d7fc1"),
    "s2": ("#2e77c3", "#66a7e5"),
    "s3": ("#1b549b", "#9ccbf6"),
    "s4": ("#0d3165", "#dbeefe"),
}
LIGHT, DARK = ({name: pair[i] for name, pair in COLOURS.items()} for i in (0, 1))
KINDS, STEPS = ("a", "b", "c", "d", "e", "f"), ("s1", "s2", "s3", "s4")
MARKERS = ("o", "s", "^", "D", "v", "P")
SMALL, TEXT = 7.0, 7.6

PERCENT = range(5, 93)
"""Shares of the heat colour in a tile, from the worst to the best."""
_MIXED = LinearSegmentedColormap.from_list("mixed", [LIGHT["page"], LIGHT["heat"]], 101)(PERCENT)
HEAT = ListedColormap(_MIXED, "heat")
NAMES = {
    to_hex(colour): f"color-mix(in srgb, var(--heat) {percent}%, var(--page))"
    for colour, percent in zip(_MIXED, PERCENT, strict=True)
} | {value: f"var(--{name})" for name, value in LIGHT.items()}
"""What each drawn colour is called on the page, which has another value for it in dark mode."""

STYLE = Path(__file__).parent / "templates" / "figures.mplstyle"
"""Matplotlib's settings; the colours in it are those above."""


def ordered(count: int) -> tuple[str, ...]:
    """Names of colours for values that have an order, pale to dark; as many as asked, at most four."""
    picks = {1: (2,), 2: (0, 3), 3: (0, 2, 3)}.get(count, range(4))
    return tuple(STEPS[i] for i in picks)
