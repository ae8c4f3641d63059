"""Tasks of key-value pairs in blocks, after `titans_platform.tasks.recall`.

- `Composition`: zoology's compositional recall (Arora et al. 2023, arXiv 2312.04927).
- `Episodes`: several blocks in one row, without a mark between them.
- `Resets`: blocks on lines of their own, `-` for a key that the line does not bind.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import product
from typing import Annotated, Any

from pydantic import Field, model_validator

from titans_core.config import PositiveInt
from titans_platform.config import Fraction
from titans_platform.tasks import Heuristic, recall
from titans_platform.tasks.recall import (
    KEYS,
    VALUES,
    Block,
    QueryOptions,
    Recall,
    Values,
    key_and_pairs,
    spread,
    symbols,
)


class PairOptions(recall.PairOptions):
    """Number of pairs, and the alphabets of keys and values."""

    @property
    def characters(self) -> int:
        """Characters of a block's pairs, questions and answers."""
        width = 2 + (self.keys > len(KEYS)) + (self.values > len(VALUES))
        return width * (self.pairs + (self.queries or self.pairs))


class Associative(Recall):
    """Blocks of pairs, each followed by questions; subclasses define the blocks."""

    version = 1


class KeyValue(Associative):
    """An associative task over one alphabet of keys and one of values."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._keys = symbols(KEYS, self.options.keys)
        self._values = symbols(VALUES, self.options.values)


def paired(keys: Iterable[str], values: Iterable[str]) -> Block:
    """Return a block of keys, each followed by its value."""
    bound = dict(zip(keys, values, strict=True))
    return "".join(key + value for key, value in bound.items()), bound


class GridOptions(QueryOptions):
    """Size of the grid of keys."""

    side: Annotated[int, Field(ge=2, le=6)] = 2
    """Number of first and of second letters; side x side keys are bound."""
    values: Values = 16

    @model_validator(mode="after")
    def _different_values(self) -> GridOptions:
        if self.values < self.side**2:
            raise ValueError(f"values: {self.values} are fewer than the {self.side**2} keys of the grid")
        return self


class Composition(Associative):
    """The value of a key of two letters; every first letter occurs with every second letter.

    A model that binds one of the letters alone gets 1 / side, the floor.
    """

    name = "composition"
    Options = GridOptions

    @property
    def bound(self) -> int:
        """Cells of the grid."""
        return self.options.side**2

    @property
    def heuristics(self) -> Mapping[str, Heuristic]:
        """Also guesses from one letter of the key."""
        letters = enumerate(("first", "second"))
        same = {f"any value of the same {name} letter": partial(sharing, place) for place, name in letters}
        return {**super().heuristics, **same}

    def blocks(self, rng: random.Random, length: int) -> list[Block]:
        """Generate all keys of a grid, in random order."""
        halves = string.ascii_uppercase[:13], string.ascii_uppercase[13:]
        keys = ["".join(key) for key in product(*(rng.sample(half, self.options.side) for half in halves))]
        rng.shuffle(keys)
        return [paired(keys, spread(rng, symbols(VALUES, self.options.values), len(keys)))]


def sharing(place: int, before: str) -> list[str]:
    """Values of the keys with the same letter at ``place`` as the queried key."""
    key, bound = key_and_pairs(before)
    return [value for other, value in bound.items() if other[place] == key[place]]


class EpisodeOptions(PairOptions):
    """Length of an episode, and its share of new keys."""

    tokens: PositiveInt = 20
    """Tokens of an episode; a row has as many episodes as fit."""
    renewed: Fraction = 0.0
    """Share of an episode's keys that the previous one did not have; 0: the same keys throughout."""

    @model_validator(mode="after")
    def _long_enough(self) -> EpisodeOptions:
        if self.tokens < (needed := self.characters):
            raise ValueError(f"tokens: {self.tokens} are fewer than the {needed} of an episode")
        if self.pairs + round(self.renewed * self.pairs) > self.keys:
            raise ValueError(f"renewed: an episode of {self.pairs} pairs needs more than {self.keys} keys")
        return self


class Episodes(KeyValue):
    """The value of each key in the latest of several blocks; `recall` with `rebind` is its control.

    A block's values are drawn anew: what a key had before is no more likely to be right than another value.
    """

    name = "episodes"
    Options = EpisodeOptions

    def blocks(self, rng: random.Random, length: int) -> list[Block]:
        """Generate as many blocks as fit."""
        pairs, new = self.options.pairs, round(self.options.renewed * self.options.pairs)
        keys = rng.sample(self._keys, pairs)
        blocks = []
        for _ in range(max(1, (length - 1) // self.options.tokens)):
            rng.shuffle(keys)
            text, bound = paired(keys, spread(rng, self._values, pairs))
            blocks.append((text, bound))
            keys = keys[new:] + rng.sample([key for key in self._keys if key not in bound], new)
        return blocks


MARK, NO_VALUE = "\n", "-"


class ResetOptions(PairOptions):
    """Length of a block."""

    tokens: PositiveInt = 24
    """Tokens from one mark to the next; a row has as many blocks as fit."""

    @model_validator(mode="after")
    def _long_enough(self) -> ResetOptions:
        if 2 * self.pairs > self.keys:
            raise ValueError(f"pairs: of {self.keys} keys at most half are bound at a time, not {self.pairs}")
        if self.tokens < (needed := 1 + self.characters):
            raise ValueError(f"tokens: {self.tokens} are fewer than the {needed} of a block and its queries")
        return self


class Resets(KeyValue):
    """The value of a key in this block, or `-`: a mark unbinds all keys.

    Half of the questions ask for a key of the previous block, and the answer is `-`; in the first block they
    ask for keys that were never bound. After the continual Reber grammar, whose state has to be reset between
    strings (Gers, Schmidhuber and Cummins 2000, "Learning to forget").
    """

    name = "resets"
    Options = ResetOptions

    @property
    def chance(self) -> float:
        """Guessing `-` for a random half of the questions and values for the others."""
        return (1 + 1 / self.options.values) / 4

    @property
    def heuristics(self) -> Mapping[str, Heuristic]:
        """Guesses that bind no value to a key, and one that never forgets."""

        def by_membership(before: str) -> list[str]:
            key, bound = key_and_pairs(before.rpartition(MARK)[2])
            return list(bound.values()) if key in bound else [NO_VALUE]

        def newest_of_key(before: str) -> list[str]:
            key, bound = key_and_pairs(before)
            return [bound.get(key, NO_VALUE)]

        return {
            "always -": lambda before: [NO_VALUE],
            "any value of this block if it has the key, else -": by_membership,
            "the newest value of the key, in any block": newest_of_key,
        }

    def blocks(self, rng: random.Random, length: int) -> list[Block]:
        """Generate as many blocks as fit; consecutive blocks share no key."""
        pairs = self.options.pairs
        drawn = rng.sample(self._keys, 2 * pairs)
        keys, over = drawn[:pairs], drawn[pairs:]
        blocks = []
        for _ in range(max(1, (length - 1) // self.options.tokens)):
            text, bound = paired(keys, spread(rng, self._values, pairs))
            blocks.append((MARK + text, bound | dict.fromkeys(over, NO_VALUE)))
            over, keys = keys, rng.sample([key for key in self._keys if key not in bound], pairs)
        return blocks
