"""The colours of figures and page: one set of names, two sets of values, for light and for dark."""

from __future__ import annotations

from dataclasses import dataclass, field

LIGHT = {
    "page": "#ffffff",
    "ink": "#1f2328",
    "muted": "#57606a",
    "faint": "#dbe0e6",
    "ghost": "#c3cad2",
    "accent": "#1a5fb4",
    "paper": "#8f5f00",
    "reference": "#79828d",
    "heat": "#0b4f9e",
    "a": "#1b69c8",
    "b": "#c2410d",
    "c": "#0e7a5e",
    "d": "#8a3eb4",
    "e": "#996600",
    "f": "#bf257d",
    "s1": "#4a8fce",
    "s2": "#2e77c3",
    "s3": "#1b549b",
    "s4": "#0d3165",
}
DARK = {
    "page": "#14171b",
    "ink": "#e4e7ea",
    "muted": "#9da7b2",
    "faint": "#343b44",
    "ghost": "#4a535e",
    "accent": "#7db8ff",
    "paper": "#dba63c",
    "reference": "#8b949f",
    "heat": "#8cc4ff",
    "a": "#6cb0fe",
    "b": "#ff9b6b",
    "c": "#4cc9a3",
    "d": "#cf9bf1",
    "e": "#e0b041",
    "f": "#ff8ac5",
    "s1": "#3d7fc1",
    "s2": "#66a7e5",
    "s3": "#9ccbf6",
    "s4": "#dbeefe",
}
KINDS = ("a", "b", "c", "d", "e", "f")
STEPS = ("s1", "s2", "s3", "s4")
MARKERS = ("o", "s", "^", "D", "v", "P")


def ordered(count: int) -> tuple[str, ...]:
    """Names of colours for values that have an order, pale to dark; as many as asked, or fewer."""
    picks = {1: (2,), 2: (0, 3), 3: (0, 2, 3)}.get(count, range(4))
    return tuple(STEPS[i] for i in picks)


@dataclass
class Ink:
    """Colours for drawing, and what each is called on the page."""

    names: dict[str, str] = field(
        default_factory=lambda: {value: f"var(--{key})" for key, value in LIGHT.items()}
    )

    def __getitem__(self, name: str) -> str:
        return LIGHT[name]

    def heat(self, share: float) -> str:
        """A tile's colour, from the page's (0) to the strongest (1)."""
        percent = round(5 + 87 * share)
        channels = (
            round(int(LIGHT["heat"][i : i + 2], 16) * percent / 100 + 255 * (1 - percent / 100))
            for i in (1, 3, 5)
        )
        colour = "#{:02x}{:02x}{:02x}".format(*channels)
        self.names[colour] = f"color-mix(in srgb, var(--heat) {percent}%, var(--page))"
        return colour

    def on_heat(self, share: float) -> str:
        """A colour that can be read on such a tile."""
        return self["page"] if share > 0.68 else self["ink"]
