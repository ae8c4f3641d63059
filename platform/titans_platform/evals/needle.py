"""Needle in a haystack, after RULER (Hsieh et al. 2024, arXiv 2404.06654).

`style="ruler"` is RULER's task with its templates: a pass-key in repeated noise (S-NIAH-1), a number in
prose (S-NIAH-2), a uuid in prose (S-NIAH-3; Table 2 of the Titans paper calls it W). Its haystack of
essays is made prose here, or the file at `path`.
`style="compact"` is the task for models of some 64 to 512 bytes of context: `K:47;` somewhere in
lower-case filler, `?K:` at the end.
"""

from __future__ import annotations

import random
import re
import string
import uuid
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field, model_validator

from titans_core.config import Frozen
from titans_platform.errors import UsageError
from titans_platform.evals.files import read_jsonl, read_text
from titans_platform.evals.generated import GeneratedTask
from titans_platform.evals.items import Item, Tokenizer, fill, item_of, scatter
from titans_platform.evals.registry import register
from titans_platform.evals.words import murmur, prose, random_key

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
COMPACT_NOISE = "grass is green sky is blue sun is yellow "
INTRODUCTION = (
    "{some} special magic {thing} hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {noun} afterwards.\n"
)
NEEDLE = "One of the special magic {things} for {key} is: {value}."
QUESTION = (
    "\nWhat is the special magic {thing} for {key} mentioned in the provided text? "
    "The special magic {thing} for {key} mentioned in the provided text is"
)
UUID_VALUES = 2**122
"""A version-4 uuid has 122 random bits."""


class NeedleOptions(Frozen):
    """What is hidden, in what, and how much of it."""

    kind: Literal["passkey", "number", "uuid"] = "passkey"
    style: Literal["ruler", "compact"] = "ruler"
    digits: Annotated[int, Field(ge=1, le=8)] = 2
    """compact: digits of a value (hexadecimal ones for uuid)."""
    needles: Annotated[int, Field(ge=1, le=26)] = 1
    """Needles in a row; more than one makes training rows denser in what they teach."""
    queries: Annotated[int, Field(ge=1, le=26)] = 1
    """Needles queried, one after the other, at the end of a row."""
    path: str | None = None
    """ruler: a text or .jsonl file (`text` field) whose prose is the haystack of number and uuid."""

    @model_validator(mode="after")
    def _answerable(self) -> NeedleOptions:
        if self.queries > self.needles:
            raise ValueError(f"queries: {self.queries} exceed needles: {self.needles}")
        if self.path and (self.style == "compact" or self.kind == "passkey"):
            raise ValueError("path: only the ruler style of number and uuid reads a haystack")
        return self


@register
class Needle(GeneratedTask):
    """Values stated once, at a uniformly random depth of a haystack, and queried at its end."""

    name = "needle"
    Options = NeedleOptions

    @property
    def chance(self) -> float:
        """One over the number of possible values."""
        if self.options.style == "compact":
            return self._base**-self.options.digits
        return 1 / UUID_VALUES if self.options.kind == "uuid" else 1 / 9_000_000

    @property
    def _base(self) -> float:
        return 16.0 if self.options.kind == "uuid" else 10.0

    def item(self, rng: random.Random, length: int, tokenizer: Tokenizer) -> Item:
        """Needles at independent uniform depths, queries of different keys in random order at the end."""
        compact = self.options.style == "compact"
        bindings = self._compact_bindings(rng) if compact else self._ruler_bindings(rng)
        queried = rng.sample(list(bindings), self.options.queries)
        depths = sorted(rng.random() for _ in bindings)
        seed = rng.getrandbits(64)
        build = self._build_compact if compact else self._build_ruler

        def with_filler(characters: int) -> Item:
            return build(bindings, queried, depths, characters, random.Random(seed))

        return fill(with_filler, length, tokenizer)

    def _compact_bindings(self, rng: random.Random) -> dict[str, str]:
        keys = rng.sample(string.ascii_uppercase, self.options.needles)
        alphabet = "0123456789abcdef"[: int(self._base)]
        return {key: "".join(rng.choices(alphabet, k=self.options.digits)) for key in keys}

    def _ruler_bindings(self, rng: random.Random) -> dict[str, str]:
        bindings: dict[str, str] = {}
        while len(bindings) < self.options.needles:
            if self.options.kind == "uuid":
                value = str(uuid.UUID(int=rng.getrandbits(128), version=4))
            else:
                value = str(rng.randint(1_000_000, 9_999_999))
            bindings.setdefault(random_key(rng), value)
        return bindings

    def _build_compact(
        self,
        bindings: dict[str, str],
        queried: list[str],
        depths: list[float],
        characters: int,
        rng: random.Random,
    ) -> Item:
        if self.options.kind == "passkey":
            filler = _cycle(COMPACT_NOISE, rng.randrange(len(COMPACT_NOISE)), characters)
        else:
            filler = murmur(rng, characters)
        needles = [[(f"{key}:{value};", False)] for key, value in bindings.items()]
        pieces = scatter(filler, needles, [int(depth * (characters + 1)) for depth in depths])
        for key in queried:
            pieces += [(f"?{key}:", False), (bindings[key], True)]
        return item_of(pieces)

    def _build_ruler(
        self,
        bindings: dict[str, str],
        queried: list[str],
        depths: list[float],
        characters: int,
        rng: random.Random,
    ) -> Item:
        noun = "uuid" if self.options.kind == "uuid" else "number"
        haystack, gap = self._haystack(characters, rng)
        borders = [0, *(match.end() for match in re.finditer(gap, haystack))]
        needles = [NEEDLE.format(things=f"{noun}s", key=key, value=value) for key, value in bindings.items()]
        spots = [borders[int(depth * len(borders))] for depth in depths]
        pieces = [(_introduction(noun, len(needles)), False)]
        pieces += scatter(haystack, [[(needle + gap[-1], False)] for needle in needles], spots)
        for key in queried:
            pieces += [(QUESTION.format(thing=noun, key=key), False), (f" {bindings[key]}", True)]
        return item_of(pieces)

    def _haystack(self, characters: int, rng: random.Random) -> tuple[str, str]:
        """Exactly `characters` characters, and the pattern after which a needle may stand."""
        if self.options.kind == "passkey":
            # ends with a whole line, so the cut falls at the beginning
            return _cycle(NOISE, -characters % len(NOISE), characters), "\n"
        if self.options.path is None:
            # the space after the last sentence belongs to the haystack: needles may stand there
            return (prose(rng, characters - 1) + " " if characters else ""), r"[.!?] "
        text = _prose_of(self.options.path)
        start = rng.randrange(len(text))
        return _cycle(text, start, characters), r"[.!?] "


def _introduction(noun: str, needles: int) -> str:
    """RULER's opening; its wording for one needle is the singular."""
    if needles == 1:
        return INTRODUCTION.format(some="A", thing=f"{noun} is", noun=noun)
    return INTRODUCTION.format(some="Some", thing=f"{noun}s are", noun=f"{noun}s")


def _cycle(text: str, start: int, characters: int) -> str:
    """`characters` characters of `text` from `start` on, round and round."""
    return (text * ((start + characters) // len(text) + 1))[start : start + characters]


@lru_cache(maxsize=4)
def _prose_of(path: str) -> str:
    """The file's text with runs of white space made one space, as RULER does with its essays."""
    if ".jsonl" in path:
        text = " ".join(str(record.get("text", "")) for record in read_jsonl(path))
    else:
        text = read_text(path)
    text = re.sub(r"\s+", " ", text).strip() + " "
    if text == " ":
        raise UsageError(f"options.path: {path} holds no text")
    return text
