"""N-grams of the text that a run trains on: the floor of its perplexity, which counting alone reaches.

Shapes: R rows, W predicted tokens of a row.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from titans_platform.data import PreparedData

if TYPE_CHECKING:
    from titans_platform.config import RunConfig

ORDERS = 3, 5
"""Orders whose perplexity is computed; the lowest is the floor."""
CACHED = 3
"""Tokens of the longest history that the cache counts."""
COUNTED_TOKENS = 2**25
"""A run that trains on more tokens has no floor: its text is not counted."""

Rows = tuple[NDArray[np.int64], NDArray[np.bool_]]
"""Tokens [R, W + 1], and which of the last W are predicted [R, W]."""


Level = tuple[NDArray[np.int64], NDArray[Any], NDArray[Any], NDArray[Any]]
"""N-grams of one length, each a pair of history and token, sorted; their counts; by history the sum of the
counts, and the number of different tokens."""


class NGrams:
    """N-gram models of the orders 1 to N, interpolated by Witten and Bell's method.

    P_n(w | h) = (c(h w) + t(h) P_{n-1}(w | h')) / (c(h) + t(h)) with the history h of n - 1 tokens, h'
    without its first token, the counts c, t(h) the number of different tokens that followed h, and P_0
    uniform. A history does not reach beyond its row.

    Args:
        rows: the rows to count. A row that occurs again, in another pass over the text, counts once: repeated
            counts would be trusted more than they are worth.
        vocab_size: number of tokens.
        order: N.
    """

    def __init__(self, rows: Rows, vocab_size: int, order: int = max(ORDERS)):
        self.vocab_size, self.order = vocab_size, order
        first = np.unique(rows[0], axis=0, return_index=True)[1]
        tokens = self._padded(rows[0][first])
        predicted = np.pad(rows[1][first], ((0, 0), (order, 0))).astype(float)
        self._levels: list[Level] = []
        history = np.zeros_like(tokens)
        for n in range(order):
            pairs = history * (vocab_size + 1) + tokens[:, n:]
            keys, index = np.unique(pairs, return_inverse=True)
            counts = np.bincount(index.ravel(), predicted[:, n:].ravel())
            histories = keys // (vocab_size + 1)
            totals, types = (np.bincount(histories, weights) for weights in (counts, counts > 0))
            self._levels.append((keys, counts, totals, types))
            history = index.reshape(pairs.shape)[:, :-1]

    def probabilities(self, tokens: NDArray[np.int64], order: int) -> NDArray[np.float64]:
        """Probability [R, W] of each token of rows [R, W + 1] but the first."""
        padded, history = self._padded(tokens), np.zeros(1, np.int64)
        p = np.full(padded.shape, 1 / self.vocab_size)
        for n, (keys, counts, totals, types) in enumerate(self._levels[:order]):
            pairs = history * (self.vocab_size + 1) + padded[:, n:]
            at = np.minimum(np.searchsorted(keys, pairs), len(keys) - 1)
            seen, known = keys[at] == pairs, history >= 0
            total, kinds = (np.where(known, values[history], 0) for values in (totals, types))
            p = p[:, -pairs.shape[1] :]
            mixed = (np.where(seen, counts[at], 0) + kinds * p) / np.maximum(total + kinds, 1)
            p = np.where(total > 0, mixed, p)
            # -1: the history was not counted
            history = np.where(seen, at, -1)[:, :-1]
        return p[:, 1 - tokens.shape[1] :]

    def cached(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Probability [R, W] of each token of rows [R, W + 1] but the first, with a cache of its row.

        The highest order's, interpolated as in the class's equation with counts of what followed the last 1,
        2 and 3 tokens earlier in the row.
        """
        p_RW = self.probabilities(tokens, self.order).copy()
        for row, p_W in zip(tokens.tolist(), p_RW, strict=True):
            seen: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
            for i, token in enumerate(row[1:], 1):
                for n in range(1, min(i, CACHED) + 1):
                    after = seen[tuple(row[i - n : i])]
                    if kinds := len(after):
                        p_W[i - 1] = (after[token] + kinds * p_W[i - 1]) / (after.total() + kinds)
                    after[token] += 1
        return p_RW

    def floor(self, rows: list[Rows]) -> tuple[float, str]:
        """Return the lowest perplexity over `ORDERS` and the highest with a cache, and its name."""
        plain = [(perplexity(partial(self.probabilities, order=n), rows), f"{n}-grams") for n in ORDERS]
        return min(*plain, (perplexity(self.cached, rows), f"{self.order}-grams with a cache"))

    def _padded(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Put N - 1 times a token of its own before each row."""
        return np.pad(tokens, ((0, 0), (self.order - 1, 0)), constant_values=self.vocab_size)


def perplexity(
    probabilities: Callable[[NDArray[np.int64]], NDArray[np.float64]], rows: Iterable[Rows]
) -> float:
    """Perplexity per predicted token of rows."""
    total, count = 0.0, 0
    for tokens, predicted in rows:
        total -= float(np.log(probabilities(tokens)[predicted]).sum())
        count += int(predicted.sum())
    return float(np.exp(total / count))


def count_text(data: object, cfg: RunConfig) -> NGrams | None:
    """Count the n-grams of the text among a run's training rows, without the items of tasks.

    Returns:
        None if it trains on no text, or on more than COUNTED_TOKENS tokens.
    """
    tokens = cfg.optim.steps * cfg.optim.global_batch_size * cfg.row_tokens
    if not isinstance(data, PreparedData) or tokens > COUNTED_TOKENS:
        return None
    rows = list(_text_rows(data, cfg))
    if not sum(len(tokens) for tokens, _ in rows):
        return None
    both = np.concatenate([tokens for tokens, _ in rows]), np.concatenate([counts for _, counts in rows])
    return NGrams(both, data.tokenizer.vocab_size)


def _text_rows(data: PreparedData, cfg: RunConfig) -> Iterator[Rows]:
    text = np.array([not source.items for source in data.sources])
    stream = data.train_stream(cfg)
    for step in range(cfg.optim.steps):
        batch, kept = stream.batch(step), text[stream.sources_of(step)]
        yield batch.tokens.numpy()[kept], batch.loss.numpy()[kept]
