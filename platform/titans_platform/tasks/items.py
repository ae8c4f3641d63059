"""Items: one row of questions and answers as pieces of text, its tokens, and filler up to a length.

The filler has no word that is a person, a place or a thing of the reasoning tasks, so it states no fact.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Protocol

import yaml

from titans_platform.errors import UsageError
from titans_platform.files import opened
from titans_platform.text import plain

LONG = 32_768
"""Rows of at least this many tokens first estimate their filler from the tokens per character."""


Piece = tuple[str, bool]
"""A text, and whether it is an answer."""


class ItemTokenizer(Protocol):
    """The tokenizer interface that evaluation uses (`titans_platform.data.load_tokenizer`)."""

    vocab_size: int
    bos: int
    pad: int

    def encode(self, text: str, /) -> list[int]:
        """Token ids of `text`, without the document start."""
        ...

    def encode_within(self, text: str, /) -> list[int]:
        """Token ids of `text` after another text."""
        ...

    def decode(self, tokens: list[int], /) -> str:
        """Text of token ids."""
        ...


@dataclass(frozen=True)
class Item:
    """One row: `(text, is_answer)` pieces in reading order; the first piece is not an answer."""

    pieces: tuple[Piece, ...]
    buckets: tuple[str, ...] = ()
    """A bucket for each answer, with an accuracy of its own (a needle's depth, say); empty: none."""

    @cached_property
    def text(self) -> str:
        """Text of the whole row, answers included."""
        return "".join(text for text, _ in self.pieces)

    @cached_property
    def hash(self) -> str:
        """16 hex digits of the text's sha256; items with the same text count as the same item."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    def questions(self) -> Iterator[tuple[str, str]]:
        """Yield for each answer all text before it, and the answer."""
        before = ""
        for text, is_answer in self.pieces:
            if is_answer:
                yield before, text
            before += text


def make_item(pieces: Iterable[Piece], buckets: tuple[str, ...] = ()) -> Item:
    """Item of `pieces`, with adjacent pieces of the same kind joined and empty ones dropped.

    Pieces are tokenised one by one, so that an answer's tokens are its own; joining first keeps a
    subword tokenizer from seeing more seams than that needs.
    """
    runs = groupby((piece for piece in pieces if piece[0]), key=lambda piece: piece[1])
    return Item(tuple(("".join(text for text, _ in run), is_answer) for is_answer, run in runs), buckets)


def count_tokens(item: Item, tokenizer: ItemTokenizer) -> int:
    """Tokens of `item`, its document start included."""
    return 1 + sum(map(len, _encoded(item, tokenizer)))


def _encoded(item: Item, tokenizer: ItemTokenizer) -> Iterator[list[int]]:
    """Token ids of each piece."""
    for i, (text, _) in enumerate(item.pieces):
        yield tokenizer.encode_within(text) if i else tokenizer.encode(text)


def encode_item(item: Item, tokenizer: ItemTokenizer, length: int) -> tuple[list[int], list[bool]]:
    """Token ids of `item`, `length` of them, and which of them are answer tokens.

    An item that falls short (subword tokenizers cannot always be filled to the token) is padded between
    its document start and its text, so that a fact keeps its distance to its question.

    Raises:
        UsageError: the item has more than `length` tokens.
    """
    tokens: list[int] = []
    answers: list[bool] = []
    for (_, is_answer), ids in zip(item.pieces, _encoded(item, tokenizer), strict=True):
        tokens += ids
        answers += [is_answer] * len(ids)
    missing = length - 1 - len(tokens)
    if missing < 0:
        raise UsageError(f"lengths: an item of {len(tokens) + 1} tokens does not fit in {length}")
    return [tokenizer.bos] + [tokenizer.pad] * missing + tokens, [False] * (missing + 1) + answers


def answer_spans(is_answer: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """(start, end) of each run of answer tokens."""
    position = 0
    for flag, run in groupby(is_answer):
        width = len(list(run))
        if flag:
            yield position, position + width
        position += width


def fill(build: Callable[[int], Item], length: int, tokenizer: ItemTokenizer) -> Item:
    """Return the item `build(n)` with the most filler characters n that has at most `length` tokens.

    Exactly `length` if a character is a token; otherwise short by less than a word, which `encode_item` pads.
    `build` must give the same item for the same n.

    Raises:
        UsageError: not even the item without filler fits.
    """
    bare = count_tokens(build(0), tokenizer)
    if bare > length:
        raise UsageError(f"lengths: an item of {bare} tokens does not fit in {length}; ask for longer rows")
    low, item = 0, build(length - bare)
    tokens = count_tokens(item, tokenizer)
    if tokens == length:
        return item
    high = length - bare
    while tokens < length:
        low, high = high, 2 * high + 8
        tokens = count_tokens(build(high), tokenizer)
    if length >= LONG:
        low, high = _narrow(lambda n: count_tokens(build(n), tokenizer), low, high, length)
    while high - low > 1:
        middle = (low + high) // 2
        if count_tokens(build(middle), tokenizer) <= length:
            low = middle
        else:
            high = middle
    return build(low)


def _narrow(count: Callable[[int], int], low: int, high: int, length: int) -> tuple[int, int]:
    """Tighter bounds around `length` tokens, by interpolating tokens per character.

    A long text takes a while to count; a search by halves counts it twenty times.
    """
    fewer, more = count(low), count(high)
    for lean in (-40, 40, -20, 20):
        near = low + (length - fewer) * (high - low) // (more - fewer) + lean
        if low < near < high:
            tokens = count(near)
            if tokens <= length:
                low, fewer = near, tokens
            else:
                high, more = near, tokens
    return low, high


def scatter(filler: str, inserts: Sequence[Sequence[Piece]], offsets: Sequence[int]) -> list[Piece]:
    """`filler` with `inserts[i]` put before its character `offsets[i]`; offsets ascend."""
    pieces: list[Piece] = []
    start = 0
    for insert, offset in zip(inserts, offsets, strict=True):
        pieces += [(filler[start:offset], False), *insert]
        start = offset
    return [*pieces, (filler[start:], False)]


_words = yaml.safe_load((Path(__file__).parent / "words.yaml").read_text("utf-8"))
WORDS: dict[str, tuple[str, ...]] = {kind: tuple(words.split()) for kind, words in _words.items()}
NOUNS, ADJECTIVES, VERBS, LINKS = (WORDS[kind] for kind in ("nouns", "adjectives", "verbs", "links"))


def prose(rng: random.Random, characters: int) -> str:
    """Sentences, exactly `characters` characters; the first may be truncated."""

    def sentence() -> str:
        """Eight to ten words without digits or names, with a full stop."""
        subject, verb = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}", rng.choice(VERBS)
        place = f"{rng.choice(NOUNS)} {rng.choice(LINKS)} the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
        return f"The {subject} {verb} the {place}."

    return _joined(sentence, characters)


def lowercase_words(rng: random.Random, characters: int) -> str:
    """Lower-case words and spaces, exactly `characters` characters: no capital, digit or punctuation."""
    return _joined(lambda: rng.choice(NOUNS if rng.random() < 0.5 else VERBS), characters)


def _joined(make: Callable[[], str], characters: int) -> str:
    parts: list[str] = []
    total = -1
    while total < characters:
        parts.append(make())
        total += 1 + len(parts[-1])
    return " ".join(parts)[total - characters :]


def cycle(text: str, start: int, characters: int) -> str:
    """`characters` characters of `text` from `start` on, repeating the text."""
    return (text * ((start + characters) // len(text) + 1))[start : start + characters]


@lru_cache(maxsize=4)
def load_prose(path: str) -> str:
    """Text of a file, of .jsonl its `text` fields, with white space collapsed, as RULER does with essays.

    Raises UsageError: it cannot be read, or holds no text.
    """
    try:
        with opened(path) as file:
            text = plain(file.read().decode("utf-8"))
        if ".jsonl" in path:
            records = json.loads("[" + ",\n".join(filter(str.strip, text.split("\n"))) + "]")
            text = " ".join(str(record.get("text", "")) for record in records)
    except Exception as error:  # decompression, decoding, JSON and file systems have no common base
        raise UsageError(f"options.path: cannot read {path}: {error}") from None
    text = re.sub(r"\s+", " ", text).strip() + " "
    if text == " ":
        raise UsageError(f"options.path: {path} holds no text")
    return text
