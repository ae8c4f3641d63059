"""The shapes that are measured, a line each, with what each is to reach on an H200; the work of a pass.

`flops` and `traffic` are the minimum work, floating-point operations and bytes per token and head. Counted
are the matrix products of the parallel form. With P = D F for a layer of D to F and chunks of b tokens, each
weight-sized product costs 2 P a token, each chunk-sized one 2 b D or 2 b F:

forward, a layer:
    z = X W                                              2 P
    reads: x W and x S                                   4 P
    reads: x X^T, then (C * that) d                      2 b D + 2 b F
    state: (c X)^T d and (n X)^T d                       4 P
    below the top layer, the error: d W^T                2 P
backward, a layer, states of the chunks found again from a few kept ones:
    z and the state's two products, again                6 P
    z and x X^T, again, in the chunk itself              2 P + 2 b D
    reads: dz W^T, dz S^T, and x^T dz for W and S        8 P
    reads: dz d^T, P^T dz, and (dP * C) with x and X     4 b F + 4 b D   (2 b F each, 2 b D each)
    state: X dW', X dS', d dW'^T, d dS'^T                8 P
    keys: dz W^T and X^T dz                              4 P
    below the top layer: d W^T twice again, and dE W, dE^T d of the second order   8 P

The coefficients (C = A N, 2 b^2) and all that is elementwise are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch

CHECKED_ELEMENTS = 2**26
"""A check at real size goes over as many tokens as keep a float64 tensor of them under half a GiB."""


class Target(NamedTuple):
    """Goal of a pass: at most ``value`` ns a token and head, or at least that share or ratio."""

    phase: str
    """forward, backward, or step: both."""
    unit: str
    """ns; share, of the measured matmul rate; or the name of the peer of a ratio of speeds."""
    value: float
    then: float | None = None
    """The next goal, once ``value`` is met."""

    @property
    def shown(self) -> str:
        """A format of one number in this target's unit."""
        return {"ns": "{:.3g} ns", "share": "{:.1%} of matmul"}.get(self.unit, "{:.3g} times " + self.unit)

    def __str__(self) -> str:
        edge = "most" if self.unit == "ns" else "least"
        then = "" if self.then is None else f", then {self.shown.format(self.then)}"
        return f"{self.phase} at {edge} {self.shown.format(self.value)}{then}"

    def verdict(self, reached: float | None) -> str:
        """Return the measured value and its verdict as text."""
        if reached is None:
            return "not measured"
        meets = lambda value: reached <= value if self.unit == "ns" else reached >= value  # noqa: E731
        met = "met" if meets(self.value) else "MISSED"
        met = "both met" if self.then is not None and meets(self.then) else met
        return f"{self.shown.format(reached)}, {met}"


FLA_SPEED = (Target("forward", "ns", 1.6, 0.75), Target("backward", "ns", 5.4, 2.4))
RESIDENT = (
    Target("forward", "share", 0.15, 0.30),
    Target("backward", "share", 0.12, 0.30),
    Target("step", "titans-pytorch", 20),
)
WIDE = (Target("forward", "share", 0.10, 0.30), Target("step", "titans-pytorch", 20))


@dataclass(frozen=True)
class BenchShape:
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
    budget: float | None = None
    small: tuple[int, int] = (1, 512)
    """Batch and length where there is no GPU."""
    targets: tuple[Target, ...] = ()
    beside: str | None = None
    """A shape with as many tokens, timed first, whose speed a target is compared with."""

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
        """Number of (token, head) pairs, by which times are divided."""
        return self.batch * self.length * self.heads

    def reduced(self) -> BenchShape:
        """Return a small shape of the same widths, for a machine without a GPU."""
        return replace(self, batch=self.small[0], length=self.small[1], heads=min(self.heads, 2))

    def short(self, heads: int = 2) -> BenchShape:
        """Return a short shape, for a check against the token-by-token recurrence.

        It has two whole chunks, or blocks of single tokens, and a ragged one. A shape of wide layers has one
        row, because the recurrence keeps the weights of every token for its gradients.
        """
        length = 67 if self.chunk_size == 1 else 2 * self.chunk_size + 3
        batch = 1 if max(self.widths) > 256 else 2
        return replace(self, batch=batch, heads=min(self.heads, heads), length=min(self.length, length))

    def checked(self) -> BenchShape:
        """Return a shape for a check at real size: only the length is cut, as far as memory requires."""
        most = CHECKED_ELEMENTS // (self.batch * self.heads * max(self.widths))
        # three tokens less, so that the last chunk is ragged
        return replace(self, length=max(1, min(self.length, most) - 3))

    def __str__(self) -> str:
        hidden = f", hidden {self.hidden}" if self.depth > 1 else ""
        bound = f", bound {self.bound:g}" if self.bound else ""
        bound += f", budget {self.budget:g}" if self.budget else ""
        memory = f"depth {self.depth}, d {self.head_dim}{hidden}, chunk {self.chunk_size}{bound}"
        return f"{memory}; B {self.batch}, T {self.length}, {self.heads} heads"


_ALL = (
    BenchShape("l1-d128", 1, 128, 0, 1, 32768, targets=FLA_SPEED),
    BenchShape("l1-d128-short", 1, 128, 0, 32, 4096, small=(8, 256)),
    BenchShape("l1-d128-long", 1, 128, 0, 1, 131072, small=(1, 2048),
          beside="l1-d128-short", targets=(Target("step", "l1-d128-short", 0.9),)),
    BenchShape("l1-d64-bound", 1, 64, 0, 1, 32768, heads=32, bound=0.5),
    BenchShape("l1-d32-c16", 1, 32, 0, 8, 4096, chunk_size=16),
    BenchShape("l1-d128-online", 1, 128, 0, 1, 32768, chunk_size=1, small=(1, 256)),
    BenchShape("l1-d64-online", 1, 64, 0, 16, 4096, chunk_size=1, small=(1, 256)),  # at 340M
    BenchShape("l2-d64-h64", 2, 64, 64, 8, 4096, targets=RESIDENT),
    BenchShape("l2-d64-h64-bound", 2, 64, 64, 8, 4096, bound=0.5),
    BenchShape("l2-d64-h64-budget", 2, 64, 64, 16, 4096, bound=1.0, budget=2.0),  # the 340M preset
    BenchShape("l2-d64-h256", 2, 64, 256, 8, 4096, targets=WIDE),
    BenchShape("l2-d64-h256-c128", 2, 64, 256, 8, 4096, chunk_size=128),
    BenchShape("l2-d128-h128", 2, 128, 128, 8, 4096),
    # one memory as wide as the model
    BenchShape("l2-d1024-one", 2, 1024, 1024, 16, 4096, heads=1, bound=1.0, budget=2.0, small=(1, 128)),
    BenchShape("l3-d64-h64", 3, 64, 64, 8, 4096),
    BenchShape("l4-d64-h64-bound", 4, 64, 64, 8, 4096, bound=0.5),
)  # fmt: skip
SHAPES = {shape.name: shape for shape in _ALL}


def chosen(names: list[str]) -> list[BenchShape]:
    """Return the shapes of these names, or all; each after the shape that it is judged beside."""
    wanted = set(names or SHAPES)
    wanted |= {shape.beside for shape in _ALL if shape.name in wanted and shape.beside}
    return [shape for shape in _ALL if shape.name in wanted]


PHASES = ("forward", "backward")
GATES = 3
GATE_BYTES = 4


def flops(pairs: Sequence[tuple[int, int]], chunk_size: int) -> dict[str, int]:
    """FLOPs of each pass per token and head, for layers of these input and output widths.

    `again` is the part of the backward that is recomputation.
    """
    total = {"forward": 0, "backward": 0, "again": 0}
    b = chunk_size
    for l, (D, F) in enumerate(pairs):
        P, hidden = D * F, l > 0
        total["forward"] += (10 + 2 * hidden) * P + 2 * b * (D + F)
        total["backward"] += (28 + 8 * hidden) * P + b * (6 * D + 4 * F)
        total["again"] += (8 + 4 * hidden) * P + 2 * b * D
    return total


def traffic(shape: BenchShape, dtype: torch.dtype) -> dict[str, float]:
    """Bytes of each pass per token and head: every input read once, every output written once.

    Chunk-start states that a form may write for its backward are its own choice, and not counted.
    """
    token = shape.head_dim * dtype.itemsize
    gates = GATES * GATE_BYTES
    # weights are read, weights and momentum written (or the gradient of the weights)
    weights = sum(D * F for D, F in shape.pairs) * 4 / shape.length
    return {
        "forward": 4 * token + gates + 3 * weights,  # q, k, v; y
        "backward": 7 * token + 2 * gates + 2 * weights,  # q, k, v, dy; dq, dk, dv
    }
