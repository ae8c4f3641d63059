"""An n-gram model of tokens: what counting alone makes of a text, beside a trained model's perplexity."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from titans_platform.data.prepare import PreparedData
from titans_platform.data.reading import Span
from titans_platform.errors import UsageError

Codes = NDArray[np.uint64]


class _Counts(NamedTuple):
    """The n-grams of one order: how often each was seen, and what followed each context."""

    grams: Codes
    times: NDArray[np.int64]
    contexts: Codes
    followed: NDArray[np.int64]
    """How often each context was followed by anything."""
    kinds: NDArray[np.int64]
    """By how many different tokens."""


class NGram:
    """An interpolated n-gram model of a text's tokens [N], with Witten and Bell's weights (1991, method C).

    ``p_n(w | h) = (c(h w) + k(h) p_{n-1}(w | h')) / (c(h) + k(h))``: c counts in the training text, k(h) is
    the number of different tokens seen after h, h' is h without its oldest token, and p_0 is uniform. A
    context ends where its document begins.

    Raises UsageError where ``order`` tokens of the vocabulary do not fit 64 bits.
    """

    def __init__(self, text: Span, vocab_size: int, order: int = 4):
        self.vocab_size, self.order = vocab_size, order
        # one more for what lies before a document
        self._base = np.uint64(vocab_size + 1)
        if order * math.log2(vocab_size + 1) >= 64:
            raise UsageError(f"ngram: {order} tokens of {vocab_size:,} ids are too many to count; give fewer")
        self._counts = [self._count(codes) for codes in self._codes(text)]

    def nll(self, text: Span) -> NDArray[np.float64]:
        """[..., T] negative log-likelihood, in nats, of each token [..., T] given those before it in T."""
        p = np.full(text.tokens.size, 1 / self.vocab_size)
        for counts, codes in zip(self._counts, self._codes(text), strict=True):
            seen = _look_up(codes, counts.grams, counts.times)
            contexts = codes // self._base
            followed = _look_up(contexts, counts.contexts, counts.followed)
            kinds = _look_up(contexts, counts.contexts, counts.kinds)
            known = followed > 0
            p[known] = (seen + kinds * p)[known] / (followed + kinds)[known]
        return -np.log(p).reshape(text.tokens.shape)

    def _codes(self, text: Span) -> Iterator[Codes]:
        """Of each order from 1 on, each token with those before it as one number."""
        tokens = text.tokens.astype(np.uint64)
        place = np.arange(tokens.shape[-1])
        begun = np.maximum.accumulate(np.where(text.starts, place, 0), axis=-1)
        codes, scale = tokens.copy(), np.uint64(1)
        for back in range(self.order):
            if back:
                scale *= self._base
                before = np.roll(tokens, back, axis=-1)
                codes += scale * np.where(place - back >= begun, before, np.uint64(self.vocab_size))
            yield codes.ravel()

    def _count(self, codes: Codes) -> _Counts:
        grams, times = np.unique(codes, return_counts=True)
        contexts, first = np.unique(grams // self._base, return_index=True)
        kinds = np.diff(np.append(first, len(grams)))
        return _Counts(grams, times, contexts, np.add.reduceat(times, first), kinds)


def _look_up(wanted: Codes, keys: Codes, values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The value of each wanted key, 0 where there is none."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)


def ngram_perplexity(prepared: PreparedData, order: int, tokens: int) -> tuple[float, int]:
    """Of the validation tokens that count, in whole rows until there are ``tokens``; how many they were.

    The model is counted on all training tokens of the sources that are trained on, each as often as it is
    there. A row begins with nothing before it, as for a model that reads rows. Raises UsageError.
    """
    splits = [source.train for source in prepared.sources if source.weight]
    parts = [split.read(0, split.info.tokens) for split in splits]
    train = Span(*map(np.concatenate, zip(*parts, strict=True)))
    model = NGram(train, prepared.tokenizer.vocab_size, order)
    total, counted = 0.0, 0
    for batch in prepared.validation(64):
        row = Span(batch.tokens.numpy(), batch.starts.numpy(), batch.loss.numpy())
        total += float(model.nll(row)[:, 1:][row.loss].sum())
        counted += int(row.loss.sum())
        if counted >= tokens:
            break
    return math.exp(total / counted), counted
