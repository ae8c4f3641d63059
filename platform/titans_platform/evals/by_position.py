"""Loss by position in long held-out texts, and the gain of carrying the state from their start.

A text is R training rows of T tokens. Its loss is computed in several ways:

- carried: once from its start, in pieces, each on the state that the last one left;
- fresh: every row on a new state;
- window-w: every row on a new state that has read the w rows before it, or all where there are fewer.

Documents inside a text follow one another without a reset, in each of these ways.

Shapes: N texts, B of them read side by side, L = R T tokens of a text (with its last target L + 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titans_platform.errors import UsageError
from titans_platform.evals.scoring import Scorer, measure_distributed

Floats = NDArray[np.floating]
CARRIED, FRESH, WINDOW = "carried", "fresh", "window"
WINDOWS = (1, 2, 4, 8)
BLOCKS = 16
"""Blocks of a single text, for its standard error."""


SEARCH = 2**20
"""Tokens within which to look for the start of a document."""


@dataclass(frozen=True)
class ByPosition:
    """Losses of the same texts, computed in several ways. Positions count from 1."""

    row: int
    """T, tokens of a training row."""
    counts_NL: NDArray[np.bool_]
    losses: Mapping[str, Floats]
    """By way (carried, fresh, window-1, ...): [N, L], nats."""

    @property
    def texts(self) -> int:
        """N."""
        return self.counts_NL.shape[0]

    @property
    def length(self) -> int:
        """L."""
        return self.counts_NL.shape[1]

    @cached_property
    def best_window(self) -> str | None:
        """The window with the lowest loss beyond the first row; None without windows."""
        windows = [mode for mode in self.losses if mode.startswith(WINDOW)]
        return min(windows, key=lambda mode: self.loss(mode)[0], default=None)

    @property
    def shown(self) -> list[str]:
        """The computed ones of carried, fresh and the best window."""
        return [mode for mode in (CARRIED, FRESH, self.best_window or "") if mode in self.losses]

    def loss(self, mode: str, first: int = 0, last: int | None = None) -> tuple[float, float]:
        """Mean nats a token at positions ``first`` (0: beyond the first row) to ``last``, and its s.e."""
        return self._mean(self.losses[mode], first, last)

    def gain(self, first: int = 0, last: int | None = None) -> tuple[float, float]:
        """Fresh minus carried loss, and the standard error of the paired difference."""
        return self._mean(self.losses[FRESH] - self.losses[CARRIED], first, last)

    def buckets(self) -> list[tuple[int, int]]:
        """Return first and last position of each bucket: powers of two times T, down to an eighth of it."""
        sizes = [self.row >> 3, self.row >> 2, self.row >> 1, self.row]
        while sizes[-1] < self.length:
            sizes.append(2 * sizes[-1])
        ends = sorted({min(size, self.length) for size in sizes} | {0})
        return [(first + 1, last) for first, last in pairwise(ends) if self.counts_NL[:, first:last].any()]

    def tokens(self, first: int = 0, last: int | None = None) -> int:
        """Return the number of predictions at these positions that count."""
        return int(self.counts_NL[:, self._places(first, last)].sum())

    def _places(self, first: int, last: int | None) -> slice:
        return slice(first - 1 if first else self.row, last)

    def _mean(self, values_NL: Floats, first: int, last: int | None) -> tuple[float, float]:
        """Mean over tokens and its standard error, with texts (not tokens) as independent samples."""
        places = self._places(first, last)
        counts_NL = self.counts_NL[:, places]
        values_NL = np.where(counts_NL, values_NL[:, places], 0.0).astype(np.float64)
        split = [values_NL, counts_NL]
        if self.texts == 1:
            # a single text is split into blocks, which are less independent than texts
            split = [np.array_split(array[0], min(BLOCKS, counts_NL.shape[1])) for array in split]
        return ratio(*(np.array([part.sum() for part in parts], np.float64) for parts in split))


def ratio(sums_K: Floats, counts_K: Floats) -> tuple[float, float]:
    """Sum over count of K clusters, with the standard error of a ratio estimator (0 if K = 1)."""
    clusters, count = len(sums_K), float(counts_K.sum())
    mean = float(sums_K.sum()) / count
    if clusters == 1:
        return mean, 0.0
    squares = float(((sums_K - mean * counts_K) ** 2).sum())
    return mean, math.sqrt(clusters / (clusters - 1) * squares) / count


def read_by_position(
    scorer: Scorer, texts: Sequence[LongText], row: int, modes: Sequence[str] = (CARRIED, FRESH),
    windows: Sequence[int] = WINDOWS,
) -> ByPosition:  # fmt: skip
    """Losses of texts of equal length, computed in these ways and with these windows.

    Memory does not grow with the length, but for the tokens, their losses and the state itself. Windows that
    hold all rows before every row are left out: they are `carried`. Every worker of a process group calls
    this, and all get the same.
    """
    length = len(texts[0].counts)
    # the rows that each way reads before each row; None: all
    before: dict[str, int | None] = {mode: None if mode == CARRIED else 0 for mode in modes}
    before |= {f"{WINDOW}-{w}": w for w in dict.fromkeys(windows) if w < length // row - 1}
    at_once = scorer.parallel_rows(length)
    batches = [texts[i : i + at_once] for i in range(0, len(texts), at_once)]
    measured = measure_distributed(batches, _Reader(scorer, row, at_once, before))
    losses = {mode: np.concatenate([batch[mode] for batch in measured]) for mode in before}
    return ByPosition(row, np.stack([text.counts for text in texts]), losses)


@dataclass(frozen=True)
class _Reader:
    """Reads a batch of texts in every way."""

    scorer: Scorer
    row: int
    at_once: int
    """Texts of a full batch. The number of passes must not depend on how full a batch is: the ranks of a
    sharded model make them together."""
    before: Mapping[str, int | None]

    def __call__(self, texts: Sequence[LongText]) -> dict[str, Floats]:
        tokens_BL = torch.from_numpy(np.stack([text.tokens for text in texts])).to(self.scorer.device)
        return {mode: self._read(tokens_BL, rows).numpy() for mode, rows in self.before.items()}

    def _read(self, tokens_BL: Tensor, before: int | None) -> Tensor:
        """[B, L] losses, each row on the state after the ``before`` rows before it."""
        if before is None:
            return self._losses(tokens_BL, 0, self.at_once)
        width = (before + 1) * self.row
        # the first rows have fewer rows before them; one reading covers these
        losses_of_rows = [self._losses(tokens_BL[:, : width + 1], 0, self.at_once)]
        later = tokens_BL[:, self.row :].unfold(1, width + 1, self.row)
        rows = max(1, self.scorer.batch_tokens // (self.at_once * width))
        for part in later.split(rows, 1):
            losses = self._losses(part.flatten(0, 1), before * self.row, self.at_once * rows)
            losses_of_rows.append(losses.view(len(tokens_BL), -1))
        return torch.cat(losses_of_rows, 1)

    def _losses(self, tokens_BL: Tensor, context: int, at_once: int) -> Tensor:
        """[B, L - context] losses on one state from the first token on; the first ``context`` have none."""
        model, state, losses = self.scorer.model, None, []
        piece = max(1, self.scorer.batch_tokens // at_once)
        piece -= piece % self.row if piece > self.row else 0
        for part in tokens_BL[:, :context].split(piece, 1) if context else ():
            state = model(part, state, last=True).state
        inputs, targets = tokens_BL[:, context:-1], tokens_BL[:, context + 1 :]
        for part, after in zip(inputs.split(piece, 1), targets.split(piece, 1), strict=True):
            out = model(part, state, targets_BT=after)
            state = out.state
            losses.append(out.losses.cpu())
        return torch.cat(losses, 1)


class LongText(NamedTuple):
    """Consecutive tokens of the held-out text."""

    tokens: NDArray[np.int64]
    """[L + 1]"""
    counts: NDArray[np.bool_]
    """[L]: True if the prediction of the next token counts; a document start's does not."""


def longest_text(prepared: Any) -> int:
    """Tokens of the longest stretch of held-out text, without its last target."""
    return max((tokens - 1 for _, tokens in _held_out(prepared)), default=0)


def _held_out(prepared: Any) -> list[tuple[Any, int]]:
    """Return each split of held-out text, with its number of tokens."""
    splits = [source.validation for source in prepared.sources if not source.items]
    return [(split, int(split.held.sum())) for split in splits if len(split.held)]


def long_texts(
    prepared: Any, rows: int, budget: int, field: str = "lengths",
    remedy: str = "raise a text source's validation_fraction",
) -> list[LongText]:  # fmt: skip
    """Return texts of ``rows`` training rows, spread evenly over the held-out text.

    Each begins where a document does, if there is room to choose.

    Raises:
        UsageError: the held-out text is shorter than one text.
    """
    row = prepared.config.sequence_length
    length, splits = rows * row, _held_out(prepared)
    fit = np.array([max(0, tokens - 1) // length for _, tokens in splits], np.int64)
    if not fit.sum():
        longest = longest_text(prepared)
        less = f"ask for at most {longest // row} rows or " if longest >= 2 * row else ""
        raise UsageError(
            f"{field}: {rows} training rows of {row} tokens make {length:,} tokens, and the longest held-out "
            f"text has {max(0, longest):,}; {less}{remedy}"
        )
    count = min(int(fit.sum()), max(2, budget // length))
    drawn = np.searchsorted(fit.cumsum(), np.arange(count) * int(fit.sum()) // count, side="right")
    texts = []
    for (split, tokens), share in zip(splits, np.bincount(drawn, minlength=len(fit)), strict=True):
        for i in range(share):
            stride = (tokens - 1) // int(share)
            first = i * stride
            # the next document's start, if there is one within the room
            first += int(split.read(first, first + min(stride - length, SEARCH) + 1).starts.argmax())
            span = split.read(first, first + length + 1)
            texts.append(LongText(span.tokens.astype(np.int64), np.array(span.loss[1:])))
    return texts
