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
import re
import string
from abc import abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache, partial
from itertools import accumulate, product
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from titans_core.config import Frozen, PositiveInt
from titans_platform.evals.items import Item, Tokenizer, fill, item_of, scatter
from titans_platform.evals.registry import GeneratedTask, Heuristic, register

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


_KEY = rf"[A-Z{re.escape(''.join(mark for mark in KEYS if not mark.isalpha()))}]+"
PAIR, ASKED = re.compile(rf"({_KEY})([0-9a-z]+)"), re.compile(rf"{_KEY}$")


@lru_cache(maxsize=1)
def key_and_pairs(before: str) -> tuple[str, dict[str, str]]:
    """The key asked about at the end of a text, and the latest value of every key, in order of binding."""
    bound: dict[str, str] = {}
    for key, value in PAIR.findall(before):
        bound.pop(key, None)
        bound[key] = value
    asked = ASKED.search(before)
    return asked[0] if asked else "", bound


def newest_value(before: str) -> list[str]:
    """The value read last."""
    _, bound = key_and_pairs(before)
    return list(bound.values())[-1:]


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
    def heuristics(self) -> Mapping[str, Heuristic]:
        """Guesses that bind no value to a key."""
        return {"any value of the newest block": self._values_of_block, "the newest value": newest_value}

    def _values_of_block(self, before: str) -> list[str]:
        """The most frequent values of the keys that were bound last."""
        _, bound = key_and_pairs(before)
        counts = Counter(list(bound.values())[-self.bound :])
        return [value for value, count in counts.items() if count == max(counts.values())]

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

    A model that binds one of the letters alone gets 1 / side, the floor.
    """

    name = "composition"
    Options = GridOptions

    @property
    def bound(self) -> int:
        """The cells of the grid."""
        return self.options.side**2

    @property
    def heuristics(self) -> Mapping[str, Heuristic]:
        """Also: what one letter of the key is bound to."""
        letters = {"any value of the same first letter": 0, "any value of the same second letter": 1}
        return {**super().heuristics, **{name: partial(_sharing, place) for name, place in letters.items()}}

    def blocks(self, rng: random.Random, length: int) -> list[Block]:
        """All keys of a grid, in random order."""
        letters = string.ascii_uppercase
        keys = [*product(*(rng.sample(half, self.options.side) for half in (letters[:13], letters[13:])))]
        rng.shuffle(keys)
        values = spread(rng, symbols(VALUES, self.options.values), len(keys))
        bound = {"".join(key): value for key, value in zip(keys, values, strict=True)}
        return [("".join(key + value for key, value in bound.items()), bound)]


def _sharing(place: int, before: str) -> list[str]:
    """Values of the keys with the same letter at ``place`` as the key asked about."""
    key, bound = key_and_pairs(before)
    return [value for other, value in bound.items() if other[place] == key[place]]


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
    symbols: Annotated[int, Field(ge=2, le=26)] = 2
    """Letters that keys are made of: few, so that a key shares its first and last letter with others."""
    values: Annotated[int, Field(ge=2, le=len(VALUES))] = 16
    """Characters that values are made of."""
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


@register
class FuzzyRecall(Associative):
    """The value of each key, where both are of one symbol or several and nothing marks their ends."""

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
        """All symbols of a value by guessing: its first alone, its first two, ..., equally often."""
        lengths = range(1, self.options.value_length + 1)
        return sum(self.options.values**-length for length in lengths) / len(lengths)

    @property
    def heuristics(self) -> Mapping[str, Heuristic]:
        """Also: the value of a key that begins or ends alike."""
        ends = {
            "the newest key with the same first letter": 0,
            "the newest key with the same last letter": -1,
        }
        return {
            **super().heuristics,
            **{name: lambda before, end=end: _sharing(end, before)[-1:] for name, end in ends.items()},
        }

    def blocks(self, rng: random.Random, length: int) -> list[Block]:
        """Different keys; the first symbols of values are spread, the others drawn."""
        first = spread(rng, list(VALUES[: self.options.values]), self.options.pairs)
        bound: dict[str, str] = {}
        for key, start in zip(rng.sample(self._keys, len(first)), first, strict=True):
            rest = rng.choices(VALUES[: self.options.values], k=rng.randint(1, self.options.value_length) - 1)
            bound[key] = start + "".join(rest)
        return [("".join(key + value for key, value in bound.items()), bound)]


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
