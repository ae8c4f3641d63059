"""Tasks of few symbols: fuzzy recall and memorisation, in-context regression, words of a group.

`fuzzy_recall` and `memorisation` are after MAD (Poli et al. 2024, arXiv 2403.17844).

`functions` is in-context regression: examples of a random map, then inputs that were not shown. An input is
a few letters, an output a digit: `AH2CB0...`. The map is a random net of two layers, tanh between them, that
makes one number of the numbers its letters stand for. The output says in which of `classes` equal parts of
all inputs, ordered by that number, the input is. So every output is as frequent as another, and near inputs
have near outputs. With the map in hand every answer is certain. From the examples alone none is: at the
defaults the floor is 0.33, the nearest example's output is right 0.60 of the time, the best linear map 0.63,
and the average over random nets by how well they fit the examples 0.72.

`words` is the running product of the elements of a group, the state of a finite automaton. A row is letters,
each a group element; after some of them `=` and the product so far. `cyclic` counts modulo `degree`: the
letters a, b, c, ... add 0, 1, 2, ..., and the answer is a digit. `symmetric` has the permutations of `degree`
things in lexicographic order as letters (of degree 5 two characters each), and the answer is the arrangement:
`213` if the first two have changed places.
"""

from __future__ import annotations

import math
import random
import string
from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import pairwise, permutations, product
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from experiments.tasks.blocks import Associative, QueryOptions, paired, sharing
from titans_core.config import Frozen, PositiveInt
from titans_platform.tasks import GeneratedTask, Heuristic
from titans_platform.tasks.items import Item, ItemTokenizer, fill, make_item
from titans_platform.tasks.recall import (
    BLANK,
    KEYS,
    VALUES,
    Block,
    Values,
    key_and_pairs,
    spread,
    symbols,
)
from titans_platform.text import plural

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


def newest_sharing(place: int, before: str) -> list[str]:
    """Return the value of the newest key with the same letter at ``place`` as the queried key."""
    return sharing(place, before)[-1:]


class FuzzyRecall(Associative):
    """The value of each key; keys and values have one or several symbols, without separators."""

    name = "fuzzy_recall"
    version = 2
    Options = FuzzyOptions

    def __init__(self, options: FuzzyOptions | None = None) -> None:
        super().__init__(options)
        letters, lengths = string.ascii_uppercase[: self.options.symbols], range(self.options.key_length)
        self._keys = ["".join(key) for length in lengths for key in product(letters, repeat=length + 1)]

    @property
    def chance(self) -> float:
        """Guessing all symbols of a value, averaged over the value lengths."""
        lengths = range(1, self.options.value_length + 1)
        return sum(self.options.values**-length for length in lengths) / len(lengths)

    @property
    def heuristics(self) -> Mapping[str, Heuristic]:
        """Also the value of a key with the same first or last letter."""
        return {
            **super().heuristics,
            "the newest key with the same first letter": partial(newest_sharing, 0),
            "the newest key with the same last letter": partial(newest_sharing, -1),
        }

    def blocks(self, rng: random.Random, length: int) -> list[Block]:
        """Distinct keys; the first symbols of the values are evenly distributed, the others random."""
        alphabet, longest = VALUES[: self.options.values], self.options.value_length
        first = spread(rng, list(alphabet), self.options.pairs)
        keys = rng.sample(self._keys, len(first))
        values = [start + "".join(rng.choices(alphabet, k=rng.randint(1, longest) - 1)) for start in first]
        return [paired(keys, values)]


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
        """Return a block without pairs."""
        return [("", self.dictionary)]


BEND = 2.0
"""Scale of the input of tanh; at 1 a linear map does nearly as well, at 3 nearby inputs differ."""


class FunctionOptions(QueryOptions):
    """The distribution of maps, and the number of examples."""

    inputs: Annotated[int, Field(ge=1, le=4)] = 2
    """Symbols of an input."""
    levels: Annotated[int, Field(ge=2, le=26)] = 8
    """Values of a symbol, A to Z: evenly spaced numbers from -1 to 1."""
    classes: Annotated[int, Field(ge=2, le=10)] = 4
    """Number of outputs: quantiles of the map's value over all inputs."""
    hidden: Annotated[int, Field(ge=0, le=256)] = 8
    """Hidden units of the map, a random two-layer network; 0: a linear map, the control."""
    examples: PositiveInt = 13
    """Inputs shown with their outputs."""
    queries: PositiveInt | None = 8
    """Number of queried inputs, none of them shown before; None: as many as examples."""

    @model_validator(mode="after")
    def _unseen_are_left(self) -> FunctionOptions:
        inputs, used = self.levels**self.inputs, self.examples + (self.queries or self.examples)
        if inputs > 4096:
            raise ValueError(f"levels: {self.levels} to the power {self.inputs} are more than 4096 inputs")
        if used > inputs:
            raise ValueError(f"examples: with the queries {used}, of {inputs} inputs")
        if self.classes > inputs:
            raise ValueError(f"classes: {self.classes} exceed the {inputs} inputs")
        return self


class Functions(Associative):
    """The output of a map for inputs that were not shown, after examples.

    Each row has a map of its own: a random net of two layers, or with `hidden: 0` a linear one, the control.
    """

    name = "functions"
    Options = FunctionOptions

    def __init__(self, options: FunctionOptions | None = None) -> None:
        super().__init__(options)
        levels, inputs = self.options.levels, self.options.inputs
        self._names = ["".join(name) for name in product(string.ascii_uppercase[:levels], repeat=inputs)]
        self._points = np.array([*product(np.linspace(-1, 1, levels), repeat=inputs)])

    @property
    def bound(self) -> int:
        """Number of examples."""
        return self.options.examples

    @property
    def chance(self) -> float:
        """One over the number of classes."""
        return 1 / self.options.classes

    @property
    def heuristics(self) -> Mapping[str, Heuristic]:
        """Guesses from the outputs alone or from one letter of the input."""
        return {
            "the output seen least": self._seen_least,
            "the newest example with the same first letter": partial(newest_sharing, 0),
            "the newest example with the same last letter": partial(newest_sharing, -1),
        }

    def _seen_least(self, before: str) -> list[str]:
        """Return the output seen least often.

        All are equally frequent over the inputs, so it has the most inputs left.
        """
        counts = Counter(map(str, range(self.options.classes)))
        counts.update(key_and_pairs(before)[1].values())
        return [output for output, count in counts.items() if count == min(counts.values())]

    def ask(self, rng: random.Random, keys: list[str]) -> list[str]:
        """Return inputs that occur once in the row."""
        return keys

    def blocks(self, rng: random.Random, length: int) -> list[Block]:
        """Examples of a new map; an input's output is the class of the rank of its value."""
        inputs, hidden = self.options.inputs, self.options.hidden
        if hidden:
            bent = np.tanh(BEND * (self._points @ _gauss(rng, inputs, hidden) + _gauss(rng, hidden)))
            values = bent @ _gauss(rng, hidden)
        else:
            values = self._points @ _gauss(rng, inputs)
        ranks = values.argsort(kind="stable").argsort()
        outputs = ranks * self.options.classes // len(ranks)
        shown, queries = self.options.examples, self.options.queries or self.options.examples
        pairs = [(self._names[i], str(outputs[i])) for i in rng.sample(range(len(outputs)), shown + queries)]
        return [("".join(name + output for name, output in pairs[:shown]), dict(pairs[shown:]))]


def _gauss(rng: random.Random, *shape: int) -> NDArray[np.float64]:
    """Draw standard normal numbers from Python's generator, whose stream is the same in every version."""
    return np.array([rng.gauss(0, 1) for _ in range(math.prod(shape))]).reshape(shape)


LAST_LETTERS = (1, 2, 4, 6)
"""Letters that the heuristics read after the last answer shown."""


class WordOptions(Frozen):
    """The group, and the number of questions."""

    group: Literal["cyclic", "symmetric"] = "cyclic"
    """Numbers modulo `degree`, or all permutations of `degree` things."""
    degree: Annotated[int, Field(ge=2, le=10)] = 3
    """cyclic: at most 10; symmetric: at most 5."""
    queries: PositiveInt = 8
    """The last one ends the row; the others are at random positions, with at least one letter before each."""

    @model_validator(mode="after")
    def _few_letters(self) -> WordOptions:
        if self.group == "symmetric" and self.degree > 5:
            raise ValueError(f"degree: the symmetric group of {self.degree} is too large; 5 is the most")
        return self


class Words(GeneratedTask):
    """The product of the letters so far.

    Letters are uniform over the whole group, so the product is too, whatever was read but one letter.
    """

    name = "words"
    Options = WordOptions

    def __init__(self, options: WordOptions | None = None) -> None:
        super().__init__(options)
        self._cyclic, degree = self.options.group == "cyclic", self.options.degree
        self._elements = [(i,) for i in range(degree)] if self._cyclic else [*permutations(range(degree))]
        self._letters = symbols(string.ascii_lowercase, len(self._elements))

    @property
    def label(self) -> str:
        """Name and group: `words-Z3`, `words-S5`."""
        return f"{self.name}-{'Z' if self._cyclic else 'S'}{self.options.degree}"

    @property
    def chance(self) -> float:
        """One over the order of the group."""
        return 1 / len(self._elements)

    @property
    def heuristics(self) -> Mapping[str, Heuristic]:
        """The last answer shown times the last k letters after it: no state is kept for longer.

        With one question no answer is shown before it, and the floor is chance.
        """
        name = "last answer shown, then the last {}"
        return {name.format(plural(k, "letter")): partial(self._from_last_answer, k) for k in LAST_LETTERS}

    def _from_last_answer(self, k: int, before: str) -> list[str]:
        """Product of the answer shown last (the identity at first) and of the last k letters after it."""
        shown, _, text = before.rpartition("=")[0].rpartition("=")
        digits = len(text) - len(text.lstrip(string.digits)) if shown else 0
        width = len(self._letters[0])
        letters, state = text[digits:].lstrip(BLANK), self._state(text[:digits])
        for place in range(max(0, len(letters) - k * width), len(letters), width):
            state = self._product(state, self._elements[self._letters.index(letters[place : place + width])])
        return [self._said(state)]

    def item(self, rng: random.Random, length: int, tokenizer: ItemTokenizer) -> Item:
        """Generate as many letters as fit."""
        seed, queries, width = rng.getrandbits(64), self.options.queries, len(self._letters[0])

        def build(characters: int) -> Item:
            draw, count = random.Random(seed), queries + characters // width
            word = draw.choices(range(len(self._elements)), k=count)
            ends = {count, *draw.sample(range(1, count), queries - 1)}
            state, pieces = self._elements[0], [(BLANK * (characters % width), False)]
            apart = [read - before for before, read in pairwise([0, *sorted(ends)])]
            for read, letter in enumerate(word, start=1):
                state = self._product(state, self._elements[letter])
                pieces.append((self._letters[letter], False))
                if read in ends:
                    pieces += [("=", False), (self._said(state), True)]
            return make_item(pieces, tuple(map(_letters_bucket, apart)) if queries > 1 else ())

        return fill(build, length, tokenizer)

    def _product(self, state: tuple[int, ...], element: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sum modulo the degree, or the arrangement whose place i holds state[element[i]]."""
        if self._cyclic:
            return ((state[0] + element[0]) % self.options.degree,)
        return tuple(state[place] for place in element)

    def _state(self, answer: str) -> tuple[int, ...]:
        """Inverse of `_said`; the identity for an empty text."""
        if not answer:
            return self._elements[0]
        return (int(answer),) if self._cyclic else tuple(int(digit) - 1 for digit in answer)

    def _said(self, state: tuple[int, ...]) -> str:
        return str(state[0]) if self._cyclic else "".join(str(place + 1) for place in state)


def _letters_bucket(letters: int) -> str:
    """Letters since the last answer, between two powers of two: `4-7 letters`."""
    low = 2 ** (letters.bit_length() - 1)
    return "1 letter" if low == 1 else f"{low}-{2 * low - 1} letters"
