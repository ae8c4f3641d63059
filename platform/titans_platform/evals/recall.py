"""Multi-query associative recall, after zoology (Arora et al. 2023, arXiv 2312.04927).

A row is a block of pairs `KvJw...`, then filler in which keys come up again, each followed by its value.
Keys are capital letters, values digits and small letters; of larger alphabets two characters each.
"""

from __future__ import annotations

import random
import string
from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate, product
from typing import Annotated, Literal

from pydantic import Field, model_validator

from titans_core.config import Frozen
from titans_platform.evals.items import Item, Tokenizer, fill, item_of, scatter
from titans_platform.evals.registry import GeneratedTask, register

KEYS = string.ascii_uppercase
VALUES = string.digits + string.ascii_lowercase
BLANK = "."
NOISE = ".,;:-+*/"


class RecallOptions(Frozen):
    """How many keys are bound, from what alphabets, and how they are queried."""

    pairs: Annotated[int, Field(ge=1)] = 4
    """Keys that get a value."""
    queries: Annotated[int, Field(ge=1)] | None = None
    """Keys queried; None: as many as pairs. Beyond the number of pairs, keys are queried again."""
    keys: Annotated[int, Field(ge=1, le=26**2)] = 26
    values: Annotated[int, Field(ge=2, le=36**2)] = 16
    rebind: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the keys that get another value later on; the answer is the latest."""
    gaps: Literal["uniform", "power"] = "uniform"
    """Where queries stand in the filler: anywhere, or mostly soon after the pairs, as in zoology."""
    filler: Literal["blank", "noise"] = "blank"
    """One character repeated, or random ones of eight."""

    @model_validator(mode="after")
    def _enough_keys(self) -> RecallOptions:
        if self.pairs > self.keys:
            raise ValueError(f"pairs: {self.pairs} exceed keys: {self.keys}")
        return self


def symbols(alphabet: str, size: int) -> list[str]:
    """The first `size` symbols over `alphabet`, all of one width: one character, or two where needed."""
    if size <= len(alphabet):
        return list(alphabet[:size])
    return ["".join(pair) for pair in product(alphabet, repeat=2)][:size]


@register
class Recall(GeneratedTask):
    """The latest value of each key that is queried."""

    name = "recall"
    Options = RecallOptions

    def __init__(self, options: RecallOptions | None = None) -> None:
        super().__init__(options)
        self._keys = symbols(KEYS, self.options.keys)
        self._values = symbols(VALUES, self.options.values)

    @property
    def chance(self) -> float:
        """One over the number of values."""
        return 1 / self.options.values

    def item(self, rng: random.Random, length: int, tokenizer: Tokenizer) -> Item:
        """Pairs, then queries scattered over the filler that takes the rest of the row."""
        block, latest = self._bind(rng)
        queried = self._ask(rng, list(latest))
        queries = [[(key, False), (latest[key], True)] for key in queried]
        depths = [rng.random() for _ in queries]
        seed = rng.getrandbits(64)

        def build(characters: int) -> Item:
            filler = self._filler(characters, random.Random(seed))
            offsets = sorted(self._offset(depth, characters) for depth in depths)
            return item_of([(block, False), *scatter(filler, queries, offsets)])

        return fill(build, length, tokenizer)

    def _bind(self, rng: random.Random) -> tuple[str, dict[str, str]]:
        """The block of pairs as text, and what each key is bound to in the end."""
        keys = rng.sample(self._keys, self.options.pairs)
        again = rng.sample(keys, round(self.options.rebind * len(keys)))
        order = keys + again
        rng.shuffle(order)
        latest: dict[str, str] = {}
        block = []
        for key in order:
            value = rng.choice(self._values)
            while value == latest.get(key):
                value = rng.choice(self._values)
            latest[key] = value
            block.append(key + value)
        return "".join(block), latest

    def _ask(self, rng: random.Random, keys: list[str]) -> list[str]:
        """Keys in random order; each once before any comes again."""
        wanted = self.options.queries or len(keys)
        queried: list[str] = []
        while len(queried) < wanted:
            queried += rng.sample(keys, len(keys))
        return queried[:wanted]

    def _filler(self, characters: int, rng: random.Random) -> str:
        if self.options.filler == "blank":
            return BLANK * characters
        return "".join(rng.choices(NOISE, k=characters))

    def _offset(self, depth: float, characters: int) -> int:
        """Filler characters before a query, for a uniformly random `depth` in [0, 1)."""
        if self.options.gaps == "uniform":
            return int(depth * (characters + 1))
        sums = _power_law(characters + 1)
        return min(bisect_right(sums, depth * sums[-1]), characters)


@lru_cache(maxsize=64)
def _power_law(space: int, exponent: float = 0.01) -> tuple[float, ...]:
    """Running sums of i^(exponent - 1), i = 1..space: zoology's gaps with its default exponent."""
    return tuple(accumulate(i ** (exponent - 1) for i in range(1, space + 1)))
