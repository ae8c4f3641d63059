"""Sizes of a call, and the offset of each layer in the flat state of a head."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from titans_kernels.memory.forms.triton.launch import Card
from titans_kernels.memory.forms.triton.tables import Tables

MOST_STREAMED = 512
"""Widest hidden layer of a memory that one program reads a document with; heads are at most half as wide."""


class Layer(NamedTuple):
    """One layer of the memory, [D, F]: its weights, then its momentum, start at ``at`` in the flat state."""

    number: int
    D: int
    F: int
    at: int


class Shape(NamedTuple):
    """Sizes of a call."""

    N: int
    """documents"""
    shared: bool
    """whether all documents start from the same state"""
    H: int
    tokens: int
    M: int
    """number of chunks, or an upper bound"""
    b: int
    layers: tuple[Layer, ...]
    size: int
    """number of elements in the flat state of a head"""
    activation: str
    bound: float
    """0 for none"""
    precision: str
    """precision of float32 products: tf32x3, as exact as float32, or tf32"""
    float32: bool
    """whether operands are float32"""
    tables: Tables
    card: Card

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def documents(self) -> tuple[Tensor | None, int]:
        """Kernel arguments that locate a document."""
        return self.tables.documents, self.tables.length

    @property
    def chunks(self) -> tuple[Tensor | None, int]:
        """Kernel arguments that locate a chunk."""
        return self.tables.chunks, self.tables.length

    @property
    def widths(self) -> dict[str, int]:
        """L, and the widths of keys, hidden layers and values."""
        first, last = self.layers[0], self.layers[-1]
        return {"L": self.depth, "D": first.D, "F": first.F, "V": last.F}

    @property
    def path(self) -> str:
        """Name of the write kernels."""
        widths = [layer.D for layer in self.layers] + [self.layers[-1].F]
        return path(widths, self.b, self.bound, self.card.arch, self.float32)

    @property
    def tile(self) -> int:
        """Widest tile of features in kernels with many products.

        Ampere's products take their operands from registers: with tiles of 64 it spills 2.2 KB a thread.
        """
        return 64 if self.card.arch >= 90 else 32

    @property
    def narrow_tile(self) -> int:
        """Widest tile in streamed writes and in backward passes: `tile`, but 16 in float32.

        A product of float32 is three of tf32, so that on Hopper, with tiles of 32, the writes spill 0.7 KB a
        thread and their backward pass 2 KB.
        """
        return 16 if self.float32 else self.tile

    @property
    def read_tile(self) -> int:
        """Widest tile of the forward reads; in float32 they spill 13 KB a thread on Ampere with 64."""
        return 32 if self.float32 else 64

    @property
    def warps(self) -> int:
        """Number of warps for a program with tiles [b, b] and [b, 64]."""
        return 8 if self.b == 128 else 4


def padded(width: int) -> int:
    """Width in the kernels: the next power of 2, at least 16; above 256 the next multiple of 64."""
    return -(-width // 64) * 64 if width > 256 else max(16, 1 << (width - 1).bit_length())


def widened(x: Tensor, *sizes: int) -> Tensor:
    """Return x with its last dimensions padded with zeros to ``sizes``."""
    from torch.nn.functional import pad

    more = [size - have for size, have in zip(sizes, x.shape[-len(sizes) :], strict=True)]
    return pad(x, [n for extra in reversed(more) for n in (0, extra)]) if any(more) else x


def path(widths: Sequence[int], b: int, bound: float | None, arch: int = 90, float32: bool = False) -> str:
    """Name of the write kernels for widths of keys, hidden layers and values.

    In float32 a state in registers spills 0.6 KB a thread with chunks of 64 at width 32, 1.6 at 64.
    """
    resident = min(32, 1024 // b) if float32 else 64
    if max(widths) > MOST_STREAMED or max(widths[0], widths[-1]) > MOST_STREAMED // 2:
        return "stepped"
    if len(widths) == 2 and max(widths) <= 128 and (not bound or widths[1] <= 64):
        return "columns"
    if len(widths) == 3 and max(widths) <= resident and b <= 64 and arch >= 90:
        return "resident"
    return "streamed"


def layers_of(widths: tuple[int, ...]) -> tuple[tuple[Layer, ...], int]:
    """Layers between successive ``widths``, and the size of the flat state."""
    layers, at = [], 0
    for number, (D, F) in enumerate(pairwise(widths)):
        layers.append(Layer(number, D, F, at))
        at += 2 * D * F
    return tuple(layers), at


def flatten(weights: tuple[Tensor, ...], momentum: tuple[Tensor, ...]) -> Tensor:
    """[N, H, size] of layers [N, H, D, F]."""
    from torch import cat

    pairs = zip(weights, momentum, strict=True)
    return cat([x.flatten(2) for pair in pairs for x in pair], -1)


def flat_base(base: tuple[Tensor, ...]) -> Tensor:
    """[H, size / 2] of layers [H, D, F]."""
    from torch import cat

    return cat([B.flatten(1) for B in base], -1)


def unflatten(state: Tensor, layers: tuple[Layer, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Inverse of `flatten`: weights and momentum."""
    sizes = [layer.D * layer.F for layer in layers for _ in range(2)]
    parts = state.split(sizes, -1)
    shaped = [part.unflatten(-1, (layers[i // 2].D, -1)) for i, part in enumerate(parts)]
    return tuple(shaped[::2]), tuple(shaped[1::2])
