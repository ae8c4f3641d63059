"""Items: one question-answer row as text pieces, its tokens, and the filler that brings it to length."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Protocol

from titans_platform.errors import UsageError


class Tokenizer(Protocol):
    """What evaluation needs of a tokenizer (`titans_platform.data.load_tokenizer` gives one)."""

    vocab_size: int
    bos: int
    pad: int

    def encode(self, text: str, /) -> list[int]:
        """Token ids of `text`, without a document start."""
        ...

    def decode(self, tokens: list[int], /) -> str:
        """Text of token ids."""
        ...


@dataclass(frozen=True)
class Item:
    """One row: `(text, is_answer)` pieces in reading order; each answer follows at least one other piece."""

    pieces: tuple[tuple[str, bool], ...]

    @cached_property
    def text(self) -> str:
        """The whole row as it is read, answers included."""
        return "".join(text for text, _ in self.pieces)

    @cached_property
    def hash(self) -> str:
        """16 hex digits of the text's sha256: two items with the same text are the same item."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


def item_of(pieces: Iterable[tuple[str, bool]]) -> Item:
    """Item of `pieces` with neighbours of the same kind joined and empty ones left out.

    Pieces are tokenised one by one, so that an answer's tokens are its own; joining first keeps a
    subword tokenizer from seeing more seams than that needs.
    """
    kept = [piece for piece in pieces if piece[0]]
    return Item(
        tuple(
            ("".join(text for text, _ in run), is_answer)
            for is_answer, run in groupby(kept, key=lambda piece: piece[1])
        )
    )


def count_tokens(item: Item, tokenizer: Tokenizer) -> int:
    """Tokens of `item`, its document start included."""
    return 1 + sum(len(tokenizer.encode(text)) for text, _ in item.pieces)


def encode_item(item: Item, tokenizer: Tokenizer, length: int) -> tuple[list[int], list[bool]]:
    """Token ids of `item`, `length` of them, and which of them are answer tokens.

    An item that falls short (subword tokenizers cannot always be filled to the token) is padded between
    its document start and its text, so that a fact keeps its distance to its question.

    Raises:
        UsageError: the item has more than `length` tokens.
    """
    tokens: list[int] = []
    answers: list[bool] = []
    for text, is_answer in item.pieces:
        ids = tokenizer.encode(text)
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


def fill(build: Callable[[int], Item], length: int, tokenizer: Tokenizer) -> Item:
    """The item `build(n)` with the most filler characters n that has at most `length` tokens.

    Exactly `length` where a character is a token; elsewhere short by less than a word, which
    `encode_item` pads. `build` must give the same item for the same n.

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
    while high - low > 1:
        middle = (low + high) // 2
        if count_tokens(build(middle), tokenizer) <= length:
            low = middle
        else:
            high = middle
    return build(low)


def scatter(
    filler: str,
    inserts: Sequence[Sequence[tuple[str, bool]]],
    offsets: Sequence[int],
) -> list[tuple[str, bool]]:
    """`filler` with `inserts[i]` put before its character `offsets[i]`; offsets ascend."""
    pieces: list[tuple[str, bool]] = []
    start = 0
    for insert, offset in zip(inserts, offsets, strict=True):
        pieces.append((filler[start:offset], False))
        pieces.extend(insert)
        start = offset
    pieces.append((filler[start:], False))
    return pieces
