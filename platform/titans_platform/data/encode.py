"""From a source to token sequences: documents split and tokenised, or task items generated."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from titans_platform.config import DataConfig, SourceConfig, hashes_of
from titans_platform.data.shards import BoolArray
from titans_platform.data.sources import Document
from titans_platform.data.tokenizer import Tokenizer
from titans_platform.errors import UsageError, within

# Documents buffered before the first is assigned; smaller sources get an exact split
WINDOW_DOCUMENTS = 256
WINDOW_CHARACTERS = 32 * 2**20
# Longer texts are tokenised in pieces: ids as Python objects take about 40 bytes per character
PIECE_CHARACTERS = 2**20
GROUP_CHARACTERS = 4 * 2**20
CYCLE = 10_000
Piece = tuple[Document, bool, bool, str]
"""A document, whether it is held out, whether this is its first piece, and the piece's text."""
Placed = Iterator[tuple[Document, bool]]
"""Documents, each with whether it is held out for validation."""


class Encoded(NamedTuple):
    """One document or one task item as token ids."""

    tokens: NDArray[np.integer]
    loss: BoolArray
    """Which of the tokens count as targets."""
    validation: bool
    item: str | None
    """Hash of the task item."""
    done: float | None
    """Fraction of the source read so far, if known."""
    first: bool = True
    """False for the later pieces of a long document."""


def encode_documents(
    documents: Iterator[Document], tokenizer: Tokenizer, config: SourceConfig, seed: int,
    several: bool = False,
) -> Iterator[Encoded]:  # fmt: skip
    """Documents as bos + tokens, up to ``max_tokens`` in all (the last one is cut).

    ``several``: the documents are one part of a source whose parts share one split threshold.
    """
    remaining = budget = config.max_tokens or math.inf
    documents = (document for document in documents if document.text.strip())
    fraction = config.validation_fraction
    placed = _by_hash(documents, fraction, seed) if several else split_documents(documents, fraction, seed)
    for document, validation, first, ids in _tokenise(placed, tokenizer):
        if first:
            budget = remaining * document.share
            ids = np.concatenate([np.array([tokenizer.bos], np.uint32), ids])
        tokens = ids[: math.ceil(min(budget, len(ids)))]
        loss = np.arange(len(tokens)) >= first
        done = document.done
        remaining, budget = remaining - len(tokens), budget - len(tokens)
        if config.max_tokens:
            done = max(done or 0.0, 1 - remaining / config.max_tokens)
        if len(tokens):
            yield Encoded(tokens, loss, validation, None, done, first)
        if remaining == 0:
            return


def split_documents(documents: Iterator[Document], fraction: float, seed: int) -> Placed:
    """Yield each document, marked if it is held out for validation, by the hash of its key.

    Documents of a small source are ranked by that hash, and a ``fraction`` of them (at least one, never all)
    is held out; in a larger source each is held out with probability ``fraction``, and of a few long ones
    that fill the window the one of lowest rank. A single document is split by position: the last
    ``fraction`` of its text is held out.
    """
    window: list[Document] = []
    for document in islice(documents, WINDOW_DOCUMENTS):
        window.append(document)
        if sum(len(each.text) for each in window) >= WINDOW_CHARACTERS:
            break
    following = list(islice(documents, 1))
    threshold, lowest = fraction, -1.0
    if len(window) < WINDOW_DOCUMENTS and 0 < fraction < 1:
        ranks = sorted(_unit(seed, document.key) for document in window)
        if following:
            lowest = ranks[0]
        elif len(window) == 1:
            yield from _split_by_position(window[0], fraction)
            return
        else:
            kept = min(max(round(fraction * len(window)), 1), len(window) - 1)
            # copies of a document have one rank, so all are held out or none
            threshold = next((rank for rank in ranks[kept:] if rank > ranks[0]), 0.0)
    for document, validation in _by_hash(chain(window, following, documents), threshold, seed):
        yield document, validation or _unit(seed, document.key) == lowest


def _by_hash(documents: Iterable[Document], threshold: float, seed: int) -> Placed:
    for document in documents:
        yield document, _unit(seed, document.key) < threshold


def _split_by_position(document: Document, fraction: float) -> Placed:
    """Split a document near a line or word boundary; yields it whole if a part would be blank."""
    text = document.text
    start = round(len(text) * (1 - fraction))
    # at most half of the held-out text later
    borders = (text.find(character, start, (start + len(text)) // 2 + 1) for character in "\n ")
    cut = next((border for border in borders if border >= 0), start)
    if text[:cut].strip() and text[cut:].strip():
        yield document._replace(text=text[:cut], share=1 - fraction), False
        yield document._replace(text=text[cut:]), True
    else:
        yield document, False


def _unit(seed: int, key: str) -> float:
    """Hash seed and key to a number in [0, 1)."""
    name = f"{seed}:{key}".encode("utf-8", "replace")
    return int.from_bytes(hashlib.blake2b(name, digest_size=6).digest()) / 2**48


def _tokenise(placed: Placed, tokenizer: Tokenizer) -> Iterator[tuple[Document, bool, bool, NDArray]]:
    """Tokenise a few million characters at a time, so that the tokenizer can use several threads.

    Yields each piece of each document: whether it is held out, whether the piece is its first, the ids.
    """
    pieces = (
        (document, validation, i == 0, text)
        for document, validation in placed
        for i, text in enumerate(_pieces(document.text))
    )
    for group in _groups(pieces):
        ids = tokenizer.encode_batch([text for *_, text in group])
        yield from ((*one[:3], each) for one, each in zip(group, ids, strict=True))


def _groups(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield lists of pieces of at least GROUP_CHARACTERS characters."""
    group, characters = [], 0
    for piece in pieces:
        group.append(piece)
        characters += len(piece[3])
        if characters >= GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _pieces(text: str) -> Iterator[str]:
    """Cut the text into pieces of at most PIECE_CHARACTERS, at a line or word boundary if there is one."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        end = start + PIECE_CHARACTERS
        border = max(text.rfind("\n", start + 1, end), text.rfind(" ", start + 1, end))
        cut = border if border > start else end
        yield text[start:cut]
        start = cut
    yield text[start:]


def task_identity(config: SourceConfig) -> list[Any]:
    """Return what determines the items of a task source, as JSON: task versions and the files they read."""
    from titans_platform.tasks import build_task

    return [[task.task, build_task(task).version, hashes_of(task.options)] for task in config.tasks]


def generate_items(
    config: SourceConfig, tokenizer: Tokenizer, data: DataConfig, field: str
) -> Iterator[Encoded]:
    """``config.rows`` items of exactly `item_tokens` each, the tasks in turn by weight."""
    from titans_platform.tasks import build_generated, encode_item

    if not any(task.weight for task in config.tasks):
        raise UsageError(f"{field}.tasks: every weight is 0; give one a weight above 0")
    tasks = []
    for i, task in enumerate(config.tasks):
        with within(f"{field}.tasks.{i}"):
            tasks.append(build_generated(task))
    names = [json.dumps([task.task, task.options], sort_keys=True) for task in config.tasks]
    cycle = interleave([task.weight for task in config.tasks])
    length, rows = data.item_tokens(config), config.rows or 0
    for i, task in zip(range(rows), itertools.cycle(cycle), strict=False):
        # from strings: the same on every machine, and independent of the other tasks of the source
        with within(f"{field}.tasks.{task}"):
            item = tasks[task].item(random.Random(f"{data.seed}/{names[task]}/{i}"), length, tokenizer)
        tokens, answers = encode_item(item, tokenizer, length)
        yield Encoded(np.asarray(tokens), np.asarray(answers, np.bool_), False, item.hash, (i + 1) / rows)


def interleave(weights: list[float]) -> list[int]:
    """Return a cycle of indices into ``weights``, each as often as its weight says and spread evenly.

    Proportions that need a cycle longer than CYCLE are rounded to it, none to zero.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    total = sum(exact)
    shares = [weight / total for weight in exact]
    length = min(math.lcm(*(share.denominator for share in shares)), CYCLE)
    counts = [max(1, round(share * length)) if share else 0 for share in shares]
    # smooth weighted round-robin: the index furthest behind its share is next
    behind, order = [0] * len(counts), []
    for _ in range(sum(counts)):
        behind = [b + count for b, count in zip(behind, counts, strict=True)]
        pick = max(range(len(counts)), key=lambda i: behind[i])
        behind[pick] -= sum(counts)
        order.append(pick)
    return order
