"""Needle in a haystack, after RULER (Hsieh et al. 2024, arXiv 2404.06654).

`style="ruler"` is RULER's task with its templates: a pass-key in repeated noise (S-NIAH-1), a number in
prose (S-NIAH-2), a uuid in prose (S-NIAH-3; Table 2 of the Titans paper calls it W). Its haystack of
essays is made prose here, or the file at `path`.
The share of right answers is given by depth too, in tenths of the haystack.
`style="compact"` is the task for models of some 64 to 512 bytes of context: `K:47;` somewhere in
lower-case filler, `?K:` at the end.
"""

from __future__ import annotations

import random
import re
import string
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from titans_core.config import Frozen
from titans_platform.tasks import GeneratedTask, Heuristic
from titans_platform.tasks.items import (
    ADJECTIVES,
    NOUNS,
    Item,
    ItemTokenizer,
    cycle,
    fill,
    load_prose,
    lowercase_words,
    make_item,
    prose,
    scatter,
)

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
COMPACT_NOISE = "grass is green sky is blue sun is yellow "
INTRODUCTION = (
    "{some} special magic {thing} hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {noun} afterwards.\n"
)
NEEDLE = "One of the special magic NOUNs for {key} is: {value}."
QUESTION = (
    "\nWhat is the special magic NOUN for {key} mentioned in the provided text? "
    "The special magic NOUN for {key} mentioned in the provided text is"
)
UUID_VALUES = 2**122
"""A version-4 uuid has 122 random bits."""


class NeedleOptions(Frozen):
    """Kind and number of needles, and the haystack."""

    kind: Literal["passkey", "number", "uuid"] = "passkey"
    style: Literal["ruler", "compact"] = "ruler"
    digits: Annotated[int, Field(ge=1, le=8)] = 2
    """compact: digits of a value (hexadecimal ones for uuid)."""
    needles: Annotated[int, Field(ge=1, le=26)] = 1
    """Needles in a row; several give a denser training signal."""
    queries: Annotated[int, Field(ge=1, le=26)] = 1
    """Needles that are queried at the end of a row, one after the other."""
    path: str | None = None
    """ruler: a text or .jsonl file (`text` field) whose prose is the haystack of number and uuid."""

    @model_validator(mode="after")
    def _answerable(self) -> NeedleOptions:
        if self.queries > self.needles:
            raise ValueError(f"queries: {self.queries} exceed needles: {self.needles}")
        if self.path and (self.style == "compact" or self.kind == "passkey"):
            raise ValueError("path: only the ruler style of number and uuid reads a haystack")
        return self


class Needle(GeneratedTask):
    """Values that are stated once at a uniformly random depth of a haystack and queried at its end."""

    name = "needle"
    Options = NeedleOptions

    @property
    def label(self) -> str:
        """Name, kind and, if there are several, the number of keys: `needle-uuid-4-keys`."""
        label, needles = super().label, self.options.needles
        return f"{label}-{needles}-keys" if needles > 1 else label

    @property
    def chance(self) -> float:
        """One over the number of possible values."""
        uuids = self.options.kind == "uuid"
        if self.options.style == "compact":
            return (16.0 if uuids else 10.0) ** -self.options.digits
        return 1 / UUID_VALUES if uuids else 1 / 9_000_000

    @property
    def heuristics(self) -> Mapping[str, Heuristic]:
        """Guesses that ignore the key; with one needle in the row they are always right."""
        compact = re.compile(r"[A-Z]:(\w+);")
        ruler = re.compile(r"One of the special magic \w+ for [\w-]+ is: ([\w-]+)\.")
        stated = compact if self.options.style == "compact" else ruler

        def unanswered(before: str) -> list[str]:
            answered = {"".join(answer) for answer in re.findall(r"\?[A-Z]:(\w+)|text is ([\w-]+)", before)}
            return [value for value in stated.findall(before) if value not in answered]

        return {"any value stated": stated.findall, "any value not yet answered": unanswered}

    def item(self, rng: random.Random, length: int, tokenizer: ItemTokenizer) -> Item:
        """Needles at independent uniform depths; queries of distinct keys, in random order, at the end."""
        values = self._values(rng)
        queried = rng.sample(list(values), self.options.queries)
        depths = sorted(rng.random() for _ in values)
        tenth_of = {key: 10 * int(10 * depth) for key, depth in zip(values, depths, strict=True)}
        buckets = tuple(f"{tenth_of[key]}-{tenth_of[key] + 10}%" for key in queried)
        seed = rng.getrandbits(64)
        opening, needle, question, answer = self._templates()
        needles = [[(needle.format(key=key, value=value), False)] for key, value in values.items()]

        def build(characters: int) -> Item:
            haystack, borders = self._haystack(characters, random.Random(seed))
            spots = [borders[int(depth * len(borders))] for depth in depths]
            pieces = [(opening, False), *scatter(haystack, needles, spots)]
            for key in queried:
                pieces += [(question.format(key=key), False), (answer.format(value=values[key]), True)]
            return make_item(pieces, buckets)

        return fill(build, length, tokenizer)

    def _values(self, rng: random.Random) -> dict[str, str]:
        """Draw the value of each key."""
        kind, needles = self.options.kind, self.options.needles
        if self.options.style == "compact":
            alphabet = "0123456789abcdef" if kind == "uuid" else string.digits
            keys = rng.sample(string.ascii_uppercase, needles)
            return {key: "".join(rng.choices(alphabet, k=self.options.digits)) for key in keys}
        values: dict[str, str] = {}
        while len(values) < needles:
            number = rng.getrandbits(128) if kind == "uuid" else rng.randint(1_000_000, 9_999_999)
            value = str(uuid.UUID(int=number, version=4) if kind == "uuid" else number)
            # an adjective and a noun, as RULER's keys are
            values.setdefault(f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}", value)
        return values

    def _templates(self) -> tuple[str, str, str, str]:
        """Format strings of the opening, a needle, a question and an answer."""
        if self.options.style == "compact":
            return "", "{key}:{value};", "?{key}:", "{value}"
        noun = "uuid" if self.options.kind == "uuid" else "number"
        one = {"some": "A", "thing": f"{noun} is", "noun": noun}
        several = {"some": "Some", "thing": f"{noun}s are", "noun": f"{noun}s"}
        opening = INTRODUCTION.format(**one if self.options.needles == 1 else several)
        end = "\n" if self.options.kind == "passkey" else " "
        return opening, NEEDLE.replace("NOUN", noun) + end, QUESTION.replace("NOUN", noun), " {value}"

    def _haystack(self, characters: int, rng: random.Random) -> tuple[str, Sequence[int]]:
        """Return exactly `characters` characters, and the offsets at which a needle may be inserted."""
        passkey = self.options.kind == "passkey"
        if self.options.style == "compact":
            if not passkey:
                return lowercase_words(rng, characters), range(characters + 1)
            return cycle(COMPACT_NOISE, rng.randrange(len(COMPACT_NOISE)), characters), range(characters + 1)
        if passkey:
            # ends with a whole line, so it is truncated at the beginning
            haystack = cycle(NOISE, -characters % len(NOISE), characters)
        elif self.options.path is None:
            # the space after the last sentence belongs to the haystack: needles may stand there
            haystack = prose(rng, characters - 1) + " " if characters else ""
        else:
            text = load_prose(self.options.path)
            haystack = cycle(text, rng.randrange(len(text)), characters)
        return haystack, [0, *(match.end() for match in re.finditer("\n" if passkey else "[.!?] ", haystack))]
