"""Recall between resets: pairs of a key and a value that hold until the next mark.

A row has a line for each block: `KvJw...`, then filler with questions. Half of the questions ask for a key of
this line, whose value is the answer; the others for a key of the previous line, and the answer is `-`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from pydantic import model_validator

from titans_core.config import PositiveInt
from titans_platform.evals.registry import Heuristic, register
from titans_platform.evals.tasks.recall import Block, KeyValue, PairOptions, key_and_pairs, spread

MARK, NO_VALUE = "\n", "-"


class ResetOptions(PairOptions):
    """Length of a block."""

    tokens: PositiveInt = 24
    """Tokens from one mark to the next; a row has as many blocks as fit."""

    @model_validator(mode="after")
    def _long_enough(self) -> ResetOptions:
        if 2 * self.pairs > self.keys:
            raise ValueError(f"pairs: of {self.keys} keys at most half are bound at a time, not {self.pairs}")
        needed = 1 + self.characters
        if self.tokens < needed:
            raise ValueError(f"tokens: {self.tokens} are fewer than the {needed} of a block and its queries")
        return self


@register
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
        return {
            "always -": lambda before: [NO_VALUE],
            "any value of this block if it has the key, else -": self._by_membership,
            "the newest value of the key, in any block": lambda before: _newest_of_key(before),
        }

    def _by_membership(self, before: str) -> list[str]:
        key, bound = key_and_pairs(before.rpartition(MARK)[2])
        return list(bound.values()) if key in bound else [NO_VALUE]

    def blocks(self, rng: random.Random, length: int) -> list[Block]:
        """As many blocks as fit; consecutive blocks share no key."""
        pairs = self.options.pairs
        drawn = rng.sample(self._keys, 2 * pairs)
        keys, over = drawn[:pairs], drawn[pairs:]
        found = []
        for _ in range(max(1, (length - 1) // self.options.tokens)):
            bound = dict(zip(keys, spread(rng, self._values, pairs), strict=True))
            text = MARK + "".join(key + value for key, value in bound.items())
            found.append((text, bound | dict.fromkeys(over, NO_VALUE)))
            over, keys = keys, rng.sample([key for key in self._keys if key not in bound], pairs)
        return found


def _newest_of_key(before: str) -> list[str]:
    key, bound = key_and_pairs(before)
    return [bound[key]] if key in bound else [NO_VALUE]
