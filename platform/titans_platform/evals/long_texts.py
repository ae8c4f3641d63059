"""Long texts out of the held-out text: neighbouring tokens, many training rows of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from titans_platform.errors import UsageError

SEARCH = 2**20
"""Tokens in which the start of a document is looked for."""


class LongText(NamedTuple):
    """Neighbouring tokens of the held-out text."""

    tokens: NDArray[np.int64]
    """[L + 1]"""
    counts: NDArray[np.bool_]
    """[L]: whether predicting the token after each counts; the start of a document does not."""


def longest_text(prepared: Any) -> int:
    """Tokens of the longest stretch of held-out text, its last target not counted."""
    return max((end - begin - 1 for _, begin, end in _stretches(prepared)), default=0)


def _stretches(prepared: Any) -> list[tuple[Any, int, int]]:
    """Each split of held-out text, and the first and the last token up to which it has no gap."""
    found = []
    for source in prepared.sources:
        split = source.validation
        if source.items or not len(split.held):
            continue
        ends = (split.begins + split.held).tolist()
        # shards that are left out leave gaps
        gaps = bool(source.manifest.left_out)
        borders = zip(split.begins.tolist(), ends, strict=True) if gaps else [(0, ends[-1])]
        found += [(split, begin, end) for begin, end in borders]
    return found


def long_texts(
    prepared: Any,
    rows: int,
    budget: int,
    field: str = "lengths",
    remedy: str = "raise a text source's validation_fraction",
) -> list[LongText]:
    """Texts of ``rows`` training rows, spread evenly over the held-out text; each begins where a document
    does, where there is room to choose.

    Args:
        prepared: `PreparedData`.
        rows: R.
        budget: tokens of all texts together, at most; but two texts where there are two.
        field: what asked for so many rows, and ``remedy`` what gives more text, for the error.

    Raises:
        UsageError: the held-out text is shorter than one text.
    """
    row = prepared.config.sequence_length
    length, stretches = rows * row, _stretches(prepared)
    fit = np.array([max(0, end - begin - 1) // length for _, begin, end in stretches], np.int64)
    if not fit.sum():
        longest = longest_text(prepared)
        less = f"ask for at most {longest // row} rows or " if longest >= 2 * row else ""
        raise UsageError(
            f"{field}: {rows} training rows of {row} tokens make {length:,} tokens, and the longest held-out "
            f"text has {max(0, longest):,}; {less}{remedy}"
        )
    wanted = min(int(fit.sum()), max(2, budget // length))
    drawn = np.searchsorted(fit.cumsum(), np.arange(wanted) * int(fit.sum()) // wanted, side="right")
    texts = []
    for (split, begin, end), share in zip(stretches, np.bincount(drawn, minlength=len(fit)), strict=True):
        for i in range(share):
            each = (end - begin - 1) // int(share)
            first = _document_start(split, begin + i * each, each - length)
            span = split.read(first, first + length + 1)
            texts.append(LongText(span.tokens.astype(np.int64), np.array(span.loss[1:])))
    return texts


def _document_start(split: Any, first: int, room: int) -> int:
    """The first token from which a document begins, at most ``room`` further on; else ``first``."""
    starts = split.read(first, first + min(room, SEARCH) + 1).starts
    return first + int(starts.argmax())
