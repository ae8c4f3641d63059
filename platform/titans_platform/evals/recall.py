"""Associative recall and its kin: pairs of a key and a value, then keys that are answered by their values.

A row is a block of pairs `KvJw...`, then filler in which keys come up, each followed by its value. Keys are
capital letters and marks, values digits and small letters; of larger alphabets two characters each.

- `recall`: multi-query recall of zoology (Arora et al. 2023, arXiv 2312.04927); with `noise`, MAD's noisy
  recall; with more pairs than a state has dimensions, recall beyond its capacity.
- `composition`: zoology's compositional recall.
- `episodes`: block after block in one row, and nothing says that what was bound before is over.
- `fuzzy_recall`, `memorisation`: after MAD (Poli et al. 2024, arXiv 2403.17844).

A block has each value as often as any other, as far as that is possible, and every question draws its key
independently. So answers say nothing about later ones, and guessing among a row's values gives `floor`.
"""

from __future__ import annotations

import random
import string
from abc import abstractmethod
from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate, product
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from titans_core.config import Frozen, PositiveInt
from titans_platform.evals.items import Item, Tokenizer, fill, item_of, scatter
from titans_platform.evals.registry import GeneratedTask, register

BLANK = "."
NOISE = ".,;:-+*/"
KEYS = string.ascii_uppercase + "".join(mark for mark in string.punctuation if mark not in NOISE)
VALUES = string.digits + string.ascii_lowercase

Keys = Annotated[int, Field(ge=1, le=len(KEYS) ** 2)]
Values = Annotated[int, Field(ge=2, le=len(VALUES) ** 2)]
Share = Annotated[float, Field(ge=0, le=1)]
Short = Annotated[int, Field(ge=1, le=3)]
Block = tuple[str, dict[str, str]]
"""Pairs as text, and the answer to each key that can be asked about after them."""


class QueryOptions(Frozen):
    """How many questions, and what stands between them."""

    queries: PositiveInt | None = None
    """Questions after each block of pairs; None: as many as pairs."""
    filler: Literal["blank", "noise"] = "blank"
    """One character repeated, or random ones of eight."""


class PairOptions(QueryOptions):
    """How many keys are bound, from what alphabets, and how they are queried."""

    pairs: PositiveInt = 4
    """Keys that get a value."""
    keys: Keys = 26
    """Size of the keys' alphabet: of up to 50 keys each is one character, of more two."""
    values: Values = 16
    """Size of the values' alphabet: of up to 36 each is one character."""

    @model_validator(mode="after")
    def _enough_keys(self) -> PairOptions:
        if self.pairs > self.keys:
            raise ValueError(f"pairs: {self.pairs} exceed keys: {self.keys}")
        return self

    @property
    def characters(self) -> int:
        """What a block's pairs and its questions with their answers take."""
        width = 2 + (self.keys > len(KEYS)) + (self.values > len(VALUES))
        return width * (self.pairs + (self.queries or self.pairs))


class RecallOptions(PairOptions):
    """Also what makes pairs hard to find and to keep."""

    rebind: Share = 0.0
    """Share of the keys that get another value later on; the answer is the latest."""
    noise: Annotated[float, Field(ge=0, le=0.9)] = 0.0
    """Share of the block's places that hold two characters of noise instead of a pair."""
    gaps: Literal["uniform", "power", "end"] = "uniform"
    """Where queries stand in the filler: anywhere; mostly soon after the pairs, as in zoology; at its end."""


def symbols(alphabet: str, size: int) -> list[str]:
    """The first `size` symbols over `alphabet`, all of one width: one character, or two where needed."""
    if size <= len(alphabet):
        return list(alphabet[:size])
    return ["".join(pair) for pair in product(alphabet, repeat=2)][:size]


def spread(rng: random.Random, values: list[str], count: int) -> list[str]:
    """`count` values in random order, all different where there are enough, else as even as can be."""
    whole, rest = divmod(count, len(values))
    drawn = values * whole + rng.sample(values, rest)
    rng.shuffle(drawn)
    return drawn


class Associative(GeneratedTask):
    """Blocks of pairs, each followed by questions; a task says what its blocks are."""

    @abstractmethod
    def blocks(self, rng: random.Random, length: int) -> list[Block]:
        """The blocks of a row of `length` tokens."""

    @property
    def bound(self) -> int:
        """Keys that have a value when a question is asked."""
        return self.options.pairs

    @property
    def chance(self) -> float:
        """One over the number of values."""
        return 1 / self.options.values

    @property
    def floor(self) -> float:
        """The most frequent of the values that the block has."""
        return -(-self.bound // self.options.values) / self.bound

    def ask(self, rng: random.Random, keys: list[str]) -> list[str]:
        """The keys queried, each drawn on its own."""
        return rng.choices(keys, k=self.options.queries or self.bound)

    def item(self, rng: random.Random, length: int, tokenizer: Tokenizer) -> Item:
        """Blocks, each followed by questions in a part of the filler, which takes the rest of the row."""
        parts = []
        for block, answers in self.blocks(rng, length):
            queries = [[(key, False), (answers[key], True)] for key in self.ask(rng, list(answers))]
            parts.append((block, queries, [rng.random() for _ in queries]))
        seed = rng.getrandbits(64)

        def build(characters: int) -> Item:
            noise = random.Random(seed)
            pieces: list[tuple[str, bool]] = []
            for i, (block, queries, depths) in enumerate(parts):
                share = characters * (i + 1) // len(parts) - characters * i // len(parts)
                offsets = sorted(self.offset(depth, share) for depth in depths)
                pieces += [(block, False), *scatter(self._filler(share, noise), queries, offsets)]
            return item_of(pieces)

        return fill(build, length, tokenizer)

    def _filler(self, characters: int, rng: random.Random) -> str:
        if self.options.filler == "blank":
            return BLANK * characters
        return "".join(rng.choices(NOISE, k=characters))

    def offset(self, depth: float, characters: int) -> int:
        """Filler characters before a query, for a uniformly random `depth` in [0, 1)."""
        return int(depth * (characters + 1))


@lru_cache(maxsize=64)
def _power_law(space: int, exponent: float = 0.01) -> tuple[float, ...]:
    """Running sums of i^(exponent - 1), i = 1..space: zoology's gaps with its default exponent."""
    return tuple(accumulate(i ** (exponent - 1) for i in range(1, space + 1)))


class KeyValue(Associative):
    """An associative task over one alphabet of keys and one of values."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._keys = symbols(KEYS, self.options.keys)
        self._values = symbols(VALUES, self.options.values)


@register
class Recall(KeyValue):
    """The latest value of each key that is queried."""

    name = "recall"
    version = 2
    Options = RecallOptions

    def blocks(self, rng: random.Random, length: int) -> list[Block]:
        """One block: keys that are bound again come up twice, and noise stands between pairs."""
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
        noise = self.options.noise
        for _ in range(round(len(pairs) * noise / (1 - noise))):
            pairs.insert(rng.randint(0, len(pairs)), "".join(rng.choices(NOISE, k=2)))
        return [("".join(pairs), latest)]

    def offset(self, depth: float, characters: int) -> int:
        """By `gaps`: anywhere, at the end, or mostly early."""
        if self.options.gaps == "uniform":
            return super().offset(depth, characters)
        if self.options.gaps == "end":
            return characters
        sums = _power_law(characters + 1)
        return min(bisect_right(sums, depth * sums[-1]), characters)


class GridOptions(QueryOptions):
    """How large the grid of keys is."""

    side: Annotated[int, Field(ge=2, le=6)] = 2
    """First letters, and second letters: side x side keys are bound."""
    values: Values = 16

    @model_validator(mode="after")
    def _different_values(self) -> GridOptions:
        if self.values < self.side**2:
            raise ValueError(f"values: {self.values} are fewer than the {self.side**2} keys of the grid")
        return self


@register
class Composition(Associative):
    """The value of a key of two letters; every first letter occurs with every second one.

    A model that binds one of the letters alone gets 1 / side, the floor being 1 / side^2.
    """

    name = "composition"
    Options = GridOptions

    @property
    def bound(self) -> int:
        """The cells of the grid."""
        return self.options.side**2

    def blocks(self, rng: random.Random, length: int) -> list[Block]:
        """All keys of a grid, in random order."""
        letters = string.ascii_uppercase
        keys = [*product(*(rng.sample(half, self.options.side) for half in (letters[:13], letters[13:])))]
        rng.shuffle(keys)
        values = spread(rng, symbols(VALUES, self.options.values), len(keys))
        bound = {"".join(key): value for key, value in zip(keys, values, strict=True)}
        return [("".join(key + value for key, value in bound.items()), bound)]


class EpisodeOptions(PairOptions):
    """How long an episode is, and how many of its keys are new."""

    tokens: PositiveInt = 20
    """Tokens of an episode; a row has as many as fit, longer rows have more."""
    renewed: Share = 0.0
    """Share of an episode's keys that the one before did not have; 0: the same keys throughout."""

    @model_validator(mode="after")
    def _long_enough(self) -> EpisodeOptions:
        if self.tokens < self.characters:
            needed = self.characters
            raise ValueError(
                f"tokens: {self.tokens} are fewer than the {needed} of an episode and its queries"
            )
        if self.pairs + round(self.renewed * self.pairs) > self.keys:
            raise ValueError(f"renewed: an episode of {self.pairs} pairs needs more than {self.keys} keys")
        return self


@register
class Episodes(KeyValue):
    """The value of each key in the latest of several blocks; `recall` with `rebind` is its control.

    A block's values are drawn anew: what a key had before is no more likely to be right than another value.
    """

    name = "episodes"
    Options = EpisodeOptions

    def blocks(self, rng: random.Random, length: int) -> list[Block]:
        """As many as the row has room for."""
        pairs, new = self.options.pairs, round(self.options.renewed * self.options.pairs)
        keys = rng.sample(self._keys, pairs)
        found = []
        for _ in range(max(1, (length - 1) // self.options.tokens)):
            rng.shuffle(keys)
            bound = dict(zip(keys, spread(rng, self._values, pairs), strict=True))
            found.append(("".join(key + value for key, value in bound.items()), bound))
            unused = [key for key in self._keys if key not in bound]
            keys = keys[new:] + rng.sample(unused, new)
        return found


class FuzzyOptions(QueryOptions):
    """How many symbols make a key and a value, and of what alphabets they are."""

    pairs: PositiveInt = 3
    symbols: Annotated[int, Field(ge=2, le=26)] = 8
    """Letters that keys are made of: few of them, and keys share letters."""
    values: Annotated[int, Field(ge=2, le=len(VALUES))] = 16
    """Characters that values are made of."""
    key_length: Short = 2
    """Most letters of a key; all lengths up to it are equally frequent."""
    value_length: Short = 2
    """Most characters of a value."""

    @model_validator(mode="after")
    def _enough_keys(self) -> FuzzyOptions:
        if self.pairs > self.symbols:
            raise ValueError(f"pairs: {self.pairs} exceed symbols: {self.symbols}")
        return self


@register
class FuzzyRecall(Associative):
    """The value of each key, where both are of one symbol or several and nothing marks their ends."""

    name = "fuzzy_recall"
    Options = FuzzyOptions

    @property
    def chance(self) -> float:
        """All symbols of a value by guessing: its first alone, its first two, ..., equally often."""
        lengths = range(1, self.options.value_length + 1)
        return sum(self.options.values**-length for length in lengths) / len(lengths)

    def blocks(self, rng: random.Random, length: int) -> list[Block]:
        """Different keys; the first symbols of values are spread, the others drawn."""
        first = spread(rng, list(VALUES[: self.options.values]), self.options.pairs)
        bound: dict[str, str] = {}
        while len(bound) < len(first):
            key = self._draw(rng, string.ascii_uppercase[: self.options.symbols], self.options.key_length)
            if key not in bound:
                rest = self._draw(rng, VALUES[: self.options.values], self.options.value_length)
                bound[key] = first[len(bound)] + rest[1:]
        return [("".join(key + value for key, value in bound.items()), bound)]

    def _draw(self, rng: random.Random, alphabet: str, longest: int) -> str:
        return "".join(rng.choices(alphabet, k=rng.randint(1, longest)))


class MemorisationOptions(QueryOptions):
    """How large the dictionary is, and which one."""

    entries: Annotated[int, Field(ge=2, le=len(KEYS) ** 2)] = 2048
    """Keys of the dictionary."""
    values: Values = 16
    queries: PositiveInt | None = 16
    """Entries asked about in a row, no two alike; None: all of them."""
    dictionary: int = 0
    """Seed of the dictionary: one number, one dictionary, in training and in evaluation."""

    @model_validator(mode="after")
    def _enough_entries(self) -> MemorisationOptions:
        if (self.queries or 0) > self.entries:
            raise ValueError(f"queries: {self.queries} exceed entries: {self.entries}")
        return self


@register
class Memorisation(Associative):
    """The values of a fixed dictionary, which no row states: it has to be learnt in the weights.

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
        """The entries."""
        return self.options.entries

    def ask(self, rng: random.Random, keys: list[str]) -> list[str]:
        """Different keys: an answer read in the row helps with no other."""
        return rng.sample(keys, self.options.queries or len(keys))

    def blocks(self, rng: random.Random, length: int) -> list[Block]:
        """No pairs, only questions."""
        return [("", self.dictionary)]
