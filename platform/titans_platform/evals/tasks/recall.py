"""Associative recall and related tasks: key-value pairs, then keys whose values are the answers.

A row is a block of pairs `KvJw...`, then filler in which keys come up, each followed by its value. Keys are
capital letters and marks, values digits and small letters; of larger alphabets two characters each.

- `recall`: multi-query recall of zoology (Arora et al. 2023, arXiv 2312.04927); with more pairs than a
  state has dimensions, recall beyond its capacity.
- `composition`: zoology's compositional recall.
- `episodes`: several blocks in one row, without a mark between them.
- `resets`: blocks on lines of their own, `-` for a key that the line does not bind.

The values of a block are as evenly distributed as possible, and every question draws its key independently.
So answers carry no information about later ones.
"""

from __future__ import annotations

import random
import re
import string
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from titans_core.config import Frozen, PositiveInt
from titans_platform.evals.items import Item, Piece, Tokenizer, fill, make_item, scatter
from titans_platform.evals.registry import GeneratedTask, Heuristic
from titans_platform.evals.tasks.story import commonest

BLANK = "."
NOISE = ".,;:-+*/"
KEYS = string.ascii_uppercase + "".join(mark for mark in string.punctuation if mark not in NOISE)
VALUES = string.digits + string.ascii_lowercase

Keys = Annotated[int, Field(ge=1, le=len(KEYS) ** 2)]
Values = Annotated[int, Field(ge=2, le=len(VALUES) ** 2)]
Share = Annotated[float, Field(ge=0, le=1)]
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

    @property
    def characters(self) -> int:
        """Characters of a block's pairs, questions and answers."""
        width = 2 + (self.keys > len(KEYS)) + (self.values > len(VALUES))
        return width * (self.pairs + (self.queries or self.pairs))


class RecallOptions(PairOptions):
    """Also rebinding."""

    rebind: Share = 0.0
    """Share of the keys that are bound again to another value; the latest one is the answer."""


def symbols(alphabet: str, size: int) -> list[str]:
    """The first `size` symbols over `alphabet`: single characters, or pairs if there are too few."""
    if size <= len(alphabet):
        return list(alphabet[:size])
    return ["".join(pair) for pair in product(alphabet, repeat=2)][:size]


def spread(rng: random.Random, values: list[str], count: int) -> list[str]:
    """`count` values in random order, distinct if possible, otherwise evenly distributed."""
    whole, rest = divmod(count, len(values))
    drawn = values * whole + rng.sample(values, rest)
    rng.shuffle(drawn)
    return drawn


def paired(keys: Iterable[str], values: Iterable[str]) -> Block:
    """A block of keys, each followed by its value."""
    bound = dict(zip(keys, values, strict=True))
    return "".join(key + value for key, value in bound.items()), bound


_KEY = rf"[A-Z{re.escape(''.join(mark for mark in KEYS if not mark.isalpha()))}]+"
PAIR, ASKED = re.compile(rf"({_KEY})([0-9a-z]+)"), re.compile(rf"{_KEY}$")


@lru_cache(maxsize=1)
def key_and_pairs(before: str) -> tuple[str, dict[str, str]]:
    """The key at the end of a text, and the latest value of every key, in order of binding."""
    bound: dict[str, str] = {}
    for key, value in PAIR.findall(before):
        bound.pop(key, None)
        bound[key] = value
    asked = ASKED.search(before)
    return asked[0] if asked else "", bound


def newest_value(before: str) -> list[str]:
    """The last value in the text."""
    return list(key_and_pairs(before)[1].values())[-1:]


class Associative(GeneratedTask):
    """Blocks of pairs, each followed by questions; subclasses define the blocks."""

    @abstractmethod
    def blocks(self, rng: random.Random, length: int) -> list[Block]:
        """Blocks of a row of `length` tokens."""

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
        return {"any value of the newest block": self._values_of_block, "the newest value": newest_value}

    def _values_of_block(self, before: str) -> list[str]:
        """The most frequent values of the keys that were bound last."""
        return commonest([*key_and_pairs(before)[1].values()][-self.bound :])

    def ask(self, rng: random.Random, keys: list[str]) -> list[str]:
        """The queried keys, drawn independently."""
        return rng.choices(keys, k=self.options.queries or self.bound)

    def item(self, rng: random.Random, length: int, tokenizer: Tokenizer) -> Item:
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


class KeyValue(Associative):
    """An associative task over one alphabet of keys and one of values."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._keys = symbols(KEYS, self.options.keys)
        self._values = symbols(VALUES, self.options.values)


class Recall(KeyValue):
    """The latest value of each queried key."""

    name = "recall"
    version = 2
    Options = RecallOptions

    def blocks(self, rng: random.Random, length: int) -> list[Block]:
        """One block; rebound keys occur twice."""
        keys = rng.sample(self._keys, self.options.pairs)
        latest = dict(zip(keys, spread(rng, self._values, len(keys)), strict=True))
        again = set(rng.sample(keys, round(self.options.rebind * len(keys))))
        order = [*keys, *sorted(again)]
        rng.shuffle(order)
        pairs = []
        for key in order:
            others = [value for value in self._values if value != latest[key]]
            pairs.append(key + (rng.choice(others) if key in again else latest[key]))
            again.discard(key)
        return [("".join(pairs), latest)]


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
        """All keys of a grid, in random order."""
        halves = string.ascii_uppercase[:13], string.ascii_uppercase[13:]
        keys = ["".join(key) for key in product(*(rng.sample(half, self.options.side) for half in halves))]
        rng.shuffle(keys)
        return [paired(keys, spread(rng, symbols(VALUES, self.options.values), len(keys)))]


def sharing(place: int, before: str) -> list[str]:
    """Values of the keys with the same letter at ``place`` as the key asked about."""
    key, bound = key_and_pairs(before)
    return [value for other, value in bound.items() if other[place] == key[place]]


class EpisodeOptions(PairOptions):
    """Length of an episode, and its share of new keys."""

    tokens: PositiveInt = 20
    """Tokens of an episode; a row has as many episodes as fit."""
    renewed: Share = 0.0
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
        """As many blocks as fit."""
        pairs, new = self.options.pairs, round(self.options.renewed * self.options.pairs)
        keys = rng.sample(self._keys, pairs)
        found = []
        for _ in range(max(1, (length - 1) // self.options.tokens)):
            rng.shuffle(keys)
            text, bound = paired(keys, spread(rng, self._values, pairs))
            found.append((text, bound))
            keys = keys[new:] + rng.sample([key for key in self._keys if key not in bound], new)
        return found


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
        """As many blocks as fit; consecutive blocks share no key."""
        pairs = self.options.pairs
        drawn = rng.sample(self._keys, 2 * pairs)
        keys, over = drawn[:pairs], drawn[pairs:]
        found = []
        for _ in range(max(1, (length - 1) // self.options.tokens)):
            text, bound = paired(keys, spread(rng, self._values, pairs))
            found.append((MARK + text, bound | dict.fromkeys(over, NO_VALUE)))
            over, keys = keys, rng.sample([key for key in self._keys if key not in bound], pairs)
        return found
