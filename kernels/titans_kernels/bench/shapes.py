"""The shapes that are measured, a line each, with what each is to reach on an H200."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

CHECKED_ELEMENTS = 2**26
"""A check at real size goes over as many tokens as keep a float64 tensor of them under half a GiB."""


class Target(NamedTuple):
    """What a pass is to reach: at most so many ns a token and head, or at least a share or a ratio."""

    phase: str
    """forward, backward, or step: both."""
    unit: str
    """ns; share, of the measured matmul rate; or the name of what to be so many times as fast as."""
    value: float
    then: float | None = None
    """What to go for once that is met."""

    @property
    def shown(self) -> str:
        """A format of one number in this target's unit."""
        return {"ns": "{:.3g} ns", "share": "{:.1%} of matmul"}.get(self.unit, "{:.3g} times " + self.unit)

    def __str__(self) -> str:
        edge = "most" if self.unit == "ns" else "least"
        then = "" if self.then is None else f", then {self.shown.format(self.then)}"
        return f"{self.phase} at {edge} {self.shown.format(self.value)}{then}"

    def verdict(self, found: float | None) -> str:
        """What was found, and whether it is enough."""
        if found is None:
            return "not measured"
        meets = lambda value: found <= value if self.unit == "ns" else found >= value  # noqa: E731
        met = "met" if meets(self.value) else "MISSED"
        met = "both met" if self.then is not None and meets(self.then) else met
        return f"{self.shown.format(found)}, {met}"


FLA_SPEED = (Target("forward", "ns", 1.6, 0.75), Target("backward", "ns", 5.4, 2.4))
RESIDENT = (
    Target("forward", "share", 0.15, 0.30),
    Target("backward", "share", 0.12, 0.30),
    Target("step", "titans-pytorch", 20),
)
WIDE = (Target("forward", "share", 0.10, 0.30), Target("step", "titans-pytorch", 20))


@dataclass(frozen=True)
class Shape:
    """A memory of ``depth`` layers a head, and the tokens that go through it."""

    name: str
    depth: int
    head_dim: int
    hidden: int
    batch: int
    length: int
    chunk_size: int = 64
    heads: int = 16
    bound: float | None = None
    small: tuple[int, int] = (1, 512)
    """Batch and length where there is no GPU."""
    targets: tuple[Target, ...] = ()
    beside: str | None = None
    """A shape of as many tokens, timed first, for a target that is to be so many times as fast as it."""

    @property
    def widths(self) -> list[int]:
        """Widths of a head's layers, input first."""
        return [self.head_dim, *[self.hidden] * (self.depth - 1), self.head_dim]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Width in and out of each layer."""
        return list(pairwise(self.widths))

    @property
    def token_heads(self) -> int:
        """What a time is divided by."""
        return self.batch * self.length * self.heads

    def reduced(self) -> Shape:
        """A small one of the same widths, for a machine without a GPU."""
        return replace(self, batch=self.small[0], length=self.small[1], heads=2)

    def short(self, heads: int = 2) -> Shape:
        """For a check against the token-by-token recurrence: two whole chunks and a ragged one."""
        return replace(self, batch=2, heads=heads, length=min(self.length, 2 * self.chunk_size + 3))

    def checked(self) -> Shape:
        """For a check at real size: batch, heads and widths are kept, the length as far as memory goes."""
        most = CHECKED_ELEMENTS // (self.batch * self.heads * max(self.widths))
        # three tokens less, so that the last chunk is ragged
        return replace(self, length=max(1, min(self.length, most) - 3))

    def __str__(self) -> str:
        hidden = f", hidden {self.hidden}" if self.depth > 1 else ""
        bound = f", bound {self.bound:g}" if self.bound else ""
        memory = f"depth {self.depth}, d {self.head_dim}{hidden}, chunk {self.chunk_size}{bound}"
        return f"{memory}; B {self.batch}, T {self.length}, {self.heads} heads"


_ALL = (
    Shape("l1-d128", 1, 128, 0, 1, 32768, targets=FLA_SPEED),
    Shape("l1-d128-short", 1, 128, 0, 32, 4096, small=(8, 256)),
    Shape("l1-d128-long", 1, 128, 0, 1, 131072, small=(1, 2048),
          beside="l1-d128-short", targets=(Target("step", "l1-d128-short", 0.9),)),
    Shape("l1-d64-bound", 1, 64, 0, 1, 32768, heads=32, bound=0.5),
    Shape("l1-d32-c16", 1, 32, 0, 8, 4096, chunk_size=16),
    Shape("l2-d64-h64", 2, 64, 64, 8, 4096, targets=RESIDENT),
    Shape("l2-d64-h64-bound", 2, 64, 64, 8, 4096, bound=0.5),
    Shape("l2-d64-h256", 2, 64, 256, 8, 4096, targets=WIDE),
    Shape("l2-d64-h256-c128", 2, 64, 256, 8, 4096, chunk_size=128),
    Shape("l2-d128-h128", 2, 128, 128, 8, 4096),
    Shape("l3-d64-h64", 3, 64, 64, 8, 4096),
    Shape("l4-d64-h64-bound", 4, 64, 64, 8, 4096, bound=0.5),
)  # fmt: skip
SHAPES = {shape.name: shape for shape in _ALL}


def chosen(names: list[str]) -> list[Shape]:
    """The shapes of these names, all without one; before a shape what it is judged beside."""
    wanted = set(names or SHAPES)
    wanted |= {shape.beside for shape in _ALL if shape.name in wanted and shape.beside}
    return [shape for shape in _ALL if shape.name in wanted]
