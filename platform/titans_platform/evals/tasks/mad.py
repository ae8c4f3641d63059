"""Fuzzy recall and memorisation, after MAD (Poli et al. 2024, arXiv 2403.17844)."""

from __future__ import annotations

import random
import string
from collections.abc import Mapping
from itertools import product
from typing import Annotated

from pydantic import Field, model_validator

from titans_core.config import PositiveInt
from titans_platform.evals.registry import Heuristic
from titans_platform.evals.tasks.recall import (
    KEYS,
    VALUES,
    Associative,
    Block,
    QueryOptions,
    Values,
    sharing,
    spread,
    symbols,
)

Short = Annotated[int, Field(ge=1, le=3)]


class FuzzyOptions(QueryOptions):
    """Length and alphabets of keys and values."""

    pairs: PositiveInt = 3
    symbols: Annotated[int, Field(ge=2, le=26)] = 2
    """Letters of the key alphabet; few, so that keys share first and last letters."""
    values: Annotated[int, Field(ge=2, le=len(VALUES))] = 16
    """Characters of the value alphabet."""
    key_length: Short = 2
    """Most letters of a key; all keys of up to this many letters are equally frequent."""
    value_length: Short = 2
    """Most characters of a value."""

    @model_validator(mode="after")
    def _enough_keys(self) -> FuzzyOptions:
        keys = sum(self.symbols**length for length in range(1, self.key_length + 1))
        if self.pairs > keys:
            raise ValueError(f"pairs: {self.pairs} exceed the {keys} keys of {self.symbols} symbols")
        return self


class FuzzyRecall(Associative):
    """The value of each key; keys and values have one or several symbols, without separators."""

    name = "fuzzy_recall"
    version = 2
    Options = FuzzyOptions

    def __init__(self, options: FuzzyOptions | None = None) -> None:
        super().__init__(options)
        letters, lengths = (
            string.ascii_uppercase[: self.options.symbols],
            range(1, self.options.key_length + 1),
        )
        self._keys = ["".join(key) for length in lengths for key in product(letters, repeat=length)]

    @property
    def chance(self) -> float:
        """Guessing all symbols of a value, averaged over the value lengths."""
        lengths = range(1, self.options.value_length + 1)
        return sum(self.options.values**-length for length in lengths) / len(lengths)

    @property
    def heuristics(self) -> Mapping[str, Heuristic]:
        """Also the value of a key with the same first or last letter."""
        ends = {
            "the newest key with the same first letter": 0,
            "the newest key with the same last letter": -1,
        }
        return {
            **super().heuristics,
            **{name: lambda before, end=end: sharing(end, before)[-1:] for name, end in ends.items()},
        }

    def blocks(self, rng: random.Random, length: int) -> list[Block]:
        """Distinct keys; the first symbols of the values are evenly distributed, the others random."""
        first = spread(rng, list(VALUES[: self.options.values]), self.options.pairs)
        bound: dict[str, str] = {}
        for key, start in zip(rng.sample(self._keys, len(first)), first, strict=True):
            rest = rng.choices(VALUES[: self.options.values], k=rng.randint(1, self.options.value_length) - 1)
            bound[key] = start + "".join(rest)
        return [("".join(key + value for key, value in bound.items()), bound)]


class MemorisationOptions(QueryOptions):
    """Size and seed of the dictionary."""

    entries: Annotated[int, Field(ge=2, le=len(KEYS) ** 2)] = 2048
    """Keys of the dictionary."""
    values: Values = 16
    queries: PositiveInt | None = 16
    """Distinct entries that a row asks for; None: all."""
    dictionary: int = 0
    """Seed of the dictionary; training and evaluation must use the same."""

    @model_validator(mode="after")
    def _enough_entries(self) -> MemorisationOptions:
        if (self.queries or 0) > self.entries:
            raise ValueError(f"queries: {self.queries} exceed entries: {self.entries}")
        return self


class Memorisation(Associative):
    """The values of a fixed dictionary that no row states: the weights have to learn it.

    Training and evaluation share it by design; rows not trained on ask for other sets of its keys.
    """

    name = "memorisation"
    Options = MemorisationOptions

    def __init__(self, options: MemorisationOptions | None = None) -> None:
        super().__init__(options)
        entries, rng = self.options.entries, random.Random(f"dictionary {self.options.dictionary}")
        values = spread(rng, symbols(VALUES, self.options.values), entries)
        self.dictionary = dict(zip(symbols(KEYS, entries), values, strict=True))

    @property
    def bound(self) -> int:
        """Number of entries."""
        return self.options.entries

    def ask(self, rng: random.Random, keys: list[str]) -> list[str]:
        """Distinct keys, so that no answer in the row helps with another."""
        return rng.sample(keys, self.options.queries or len(keys))

    def blocks(self, rng: random.Random, length: int) -> list[Block]:
        """A block without pairs."""
        return [("", self.dictionary)]
