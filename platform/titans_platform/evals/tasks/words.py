"""Words of a group: the running product of its elements, the state of a finite automaton.

A row is letters, each a group element; after some of them `=` and the product so far. `cyclic` counts modulo
`degree`: the letters a, b, c, ... add 0, 1, 2, ..., and the answer is a digit. `symmetric` has the
permutations of `degree` things in lexicographic order as letters (of degree 5 two characters each), and the
answer is the arrangement: `213` if the first two have changed places.
"""

from __future__ import annotations

import random
import string
from collections.abc import Mapping
from functools import partial
from itertools import pairwise, permutations
from typing import Annotated, Literal

from pydantic import Field, model_validator

from titans_core.config import Frozen, PositiveInt
from titans_platform.evals.items import Item, Tokenizer, fill, make_item
from titans_platform.evals.registry import GeneratedTask, Heuristic
from titans_platform.evals.tasks.recall import BLANK, symbols
from titans_platform.text import plural

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
            raise ValueError(
                f"degree: the symmetric group of {self.degree} has too many elements; 5 is the most"
            )
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
        return {
            f"last answer shown, then the last {plural(k, 'letter')}": partial(self._from_last_answer, k)
            for k in LAST_LETTERS
        }

    def _from_last_answer(self, k: int, before: str) -> list[str]:
        """Product of the answer shown last (the identity at first) and of the last k letters after it."""
        shown, _, text = before.rpartition("=")[0].rpartition("=")
        digits = len(text) - len(text.lstrip(string.digits)) if shown else 0
        width = len(self._letters[0])
        letters = text[digits:].lstrip(BLANK)
        state = self._state(text[:digits])
        start = max(0, len(letters) - k * width)
        for place in range(start, len(letters), width):
            state = self._product(state, self._elements[self._letters.index(letters[place : place + width])])
        return [self._said(state)]

    def item(self, rng: random.Random, length: int, tokenizer: Tokenizer) -> Item:
        """As many letters as fit."""
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
        """The sum modulo the degree, or the arrangement whose place i holds what place element[i] held."""
        if self._cyclic:
            return ((state[0] + element[0]) % self.options.degree,)
        return tuple(state[place] for place in element)

    def _state(self, said: str) -> tuple[int, ...]:
        """Inverse of `_said`; the identity for an empty text."""
        if not said:
            return self._elements[0]
        return (int(said),) if self._cyclic else tuple(int(digit) - 1 for digit in said)

    def _said(self, state: tuple[int, ...]) -> str:
        return str(state[0]) if self._cyclic else "".join(str(place + 1) for place in state)


def _letters_bucket(letters: int) -> str:
    """Letters since the last answer, between two powers of two: `4-7 letters`."""
    low = 2 ** (letters.bit_length() - 1)
    return "1 letter" if low == 1 else f"{low}-{2 * low - 1} letters"
