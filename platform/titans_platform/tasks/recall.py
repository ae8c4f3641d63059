"""Associative recall: key-value pairs, then keys whose values are the answers.

A row is a block of pairs `KvJw...`, then filler in which keys come up, each followed by its value. Keys are
capital letters and marks, values digits and small letters; of larger alphabets two characters each.

`recall` is multi-query recall of zoology (Arora et al. 2023, arXiv 2312.04927); with more pairs than a state
has dimensions, recall beyond its capacity.

The values of a block are as evenly distributed as possible, and every question draws its key independently.
So answers carry no information about later ones.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Mapping
from functools import lru_cache
from itertools import product
from typing import Annotated, Literal

from pydantic import Field, model_validator

from titans_core.config import Frozen, PositiveInt
from titans_platform.config import Fraction
from titans_platform.tasks import GeneratedTask, Heuristic
from titans_platform.tasks.items import Item, ItemTokenizer, Piece, fill, make_item, scatter
from titans_platform.tasks.story import commonest

BLANK = "."
NOISE = ".,;:-+*/"
KEYS = string.ascii_uppercase + "".join(mark for mark in string.punctuation if mark not in NOISE)
VALUES = string.digits + string.ascii_lowercase

Keys = Annotated[int, Field(ge=1, le=len(KEYS) ** 2)]
Values = Annotated[int, Field(ge=2, le=len(VALUES) ** 2)]
Block = tuple[str, dict[str, str]]
"""Pairs as text, and the answer for each key that a question may ask for."""


class QueryOptions(Frozen):
    """Number of questions, and the filler between them."""

    queries: PositiveInt | None = None
    """Questions after each block of pairs; None: as many as pairs."""
    filler: Literal["blank", "noise"] = "blank"
    """One repeated character, or random ones of eight."""


class PairOptions(QueryOptions):
    """Number of pairs, and the alphabets of keys and values."""

    pairs: PositiveInt = 4
    """Keys that are bound to a value."""
    keys: Keys = 26
    """Size of the key alphabet; up to 50 keys have one character, more have two."""
    values: Values = 16
    """Size of the value alphabet; up to 36 values have one character, more have two."""

    @model_validator(mode="after")
    def _enough_keys(self) -> PairOptions:
        if self.pairs > self.keys:
            raise ValueError(f"pairs: {self.pairs} exceed keys: {self.keys}")
        return self


class RecallOptions(PairOptions):
    """Options of `recall`."""

    rebind: Fraction = 0.0
    """Share of the keys that are bound again to another value; the latest one is the answer."""


@lru_cache
def symbols(alphabet: str, size: int) -> list[str]:
    """Return the first `size` symbols over `alphabet`: single characters, or pairs if there are too few."""
    characters = 1 if size <= len(alphabet) else 2
    return ["".join(symbol) for symbol in product(alphabet, repeat=characters)][:size]


def spread(rng: random.Random, values: list[str], count: int) -> list[str]:
    """`count` values in random order, distinct if possible, otherwise evenly distributed."""
    whole, rest = divmod(count, len(values))
    drawn = values * whole + rng.sample(values, rest)
    rng.shuffle(drawn)
    return drawn


_KEY = rf"[A-Z{re.escape(''.join(mark for mark in KEYS if not mark.isalpha()))}]+"
PAIR, ASKED = re.compile(rf"({_KEY})([0-9a-z]+)"), re.compile(rf"{_KEY}$")


@lru_cache(maxsize=1)
def key_and_pairs(before: str) -> tuple[str, dict[str, str]]:
    """Return the key at the end of a text, and the latest value of every key, in order of binding."""
    bound: dict[str, str] = {}
    for key, value in PAIR.findall(before):
        bound.pop(key, None)
        bound[key] = value
    query = ASKED.search(before)
    return query[0] if query else "", bound


class Recall(GeneratedTask):
    """The latest value of each queried key.

    A subclass may bind keys in other blocks.
    """

    name = "recall"
    version = 2
    Options = RecallOptions

    def blocks(self, rng: random.Random, length: int) -> list[Block]:
        """Generate one block; rebound keys occur twice. A subclass may have several in `length` tokens."""
        options, values = self.options, symbols(VALUES, self.options.values)
        keys = rng.sample(symbols(KEYS, options.keys), options.pairs)
        latest = dict(zip(keys, spread(rng, values, len(keys)), strict=True))
        again = set(rng.sample(keys, round(options.rebind * len(keys))))
        order = [*keys, *sorted(again)]
        rng.shuffle(order)
        pairs = []
        for key in order:
            others = [value for value in values if value != latest[key]]
            pairs.append(key + (rng.choice(others) if key in again else latest[key]))
            again.discard(key)
        return [("".join(pairs), latest)]

    @property
    def bound(self) -> int:
        """Number of keys with a value at a question."""
        return self.options.pairs

    @property
    def chance(self) -> float:
        """One over the number of values."""
        return 1 / self.options.values

    @property
    def heuristics(self) -> Mapping[str, Heuristic]:
        """Guesses that bind no value to a key."""
        values = lambda before: [*key_and_pairs(before)[1].values()]  # noqa: E731
        return {
            "any value of the newest block": lambda before: commonest(values(before)[-self.bound :]),
            "the newest value": lambda before: values(before)[-1:],
        }

    def ask(self, rng: random.Random, keys: list[str]) -> list[str]:
        """Draw the queried keys independently."""
        return rng.choices(keys, k=self.options.queries or self.bound)

    def item(self, rng: random.Random, length: int, tokenizer: ItemTokenizer) -> Item:
        """Blocks, each followed by questions in its share of the filler, which takes the rest of the row."""
        parts = []
        for block, answers in self.blocks(rng, length):
            queries = [[(key, False), (answers[key], True)] for key in self.ask(rng, list(answers))]
            parts.append((block, queries, [rng.random() for _ in queries]))
        seed = rng.getrandbits(64)

        def build(characters: int) -> Item:
            noise = random.Random(seed)
            pieces: list[Piece] = []
            for i, (block, queries, depths) in enumerate(parts):
                share = characters * (i + 1) // len(parts) - characters * i // len(parts)
                offsets = sorted(int(depth * (share + 1)) for depth in depths)
                pieces += [(block, False), *scatter(self._filler(share, noise), queries, offsets)]
            return make_item(pieces)

        return fill(build, length, tokenizer)

    def _filler(self, characters: int, rng: random.Random) -> str:
        blank = self.options.filler == "blank"
        return BLANK * characters if blank else "".join(rng.choices(NOISE, k=characters))
