"""Perplexity of the validation rows, whole and by how much context a prediction had."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titans_platform.errors import UsageError
from titans_platform.evals.ranks import measure_shared
from titans_platform.evals.registry import Context, Measurement, Task, register


class _Row(NamedTuple):
    """Negative log-likelihood (nats) and tokens that count of one row, and of its buckets by exponent."""

    nll: float
    tokens: int
    buckets: dict[int, tuple[float, int]]


def context_sizes(starts_BT: Tensor) -> Tensor:
    """[B, T] tokens of its own document that each position has seen, itself included, from 1 on."""
    positions = torch.arange(starts_BT.shape[1]).expand_as(starts_BT)
    begins = torch.where(starts_BT, positions, 0).cummax(1).values
    return positions - begins + 1


def token_nll(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """[T] negative log-likelihoods of one row in nats, float32 (of a batch it would take B T V floats)."""
    return torch.nn.functional.cross_entropy(
        logits_TV.float(), targets_T.to(logits_TV.device), reduction="none"
    )


@register
class Perplexity(Task):
    """exp of the mean negative log-likelihood a token; lower is better. Rows are those of validation."""

    name = "perplexity"

    @property
    def chance(self) -> float:
        """Infinite: without a tokenizer nothing bounds it; `measure` gives the vocabulary's size."""
        return math.inf

    def measure(self, context: Context) -> Measurement:
        """Perplexity on `config.perplexity_tokens` tokens of rows cut to `context.length`.

        Raises:
            UsageError: there are no validation rows, or they are shorter than `context.length`.
        """
        scorer, budget = context.scorer, context.config.perplexity_tokens
        batches = _within(budget, _batches(context), context.length)
        rows = [row for batch in measure_shared(batches, partial(_rows, context)) for row in batch]
        tokens = sum(row.tokens for row in rows)
        if not tokens:
            raise UsageError(
                "perplexity: no validation rows; give a text source a validation_fraction above 0"
            )
        mean = sum(row.nll for row in rows) / tokens
        buckets = {f"{2**e}-{2 ** (e + 1) - 1}": math.exp(nll / n) for e, (nll, n) in _buckets(rows)}
        return Measurement(
            value=math.exp(mean),
            stderr=math.exp(mean) * _stderr(rows, mean),
            chance=float(scorer.tokenizer.vocab_size),
            items=tokens,
            buckets=buckets,
        )


@register
class HeldOutLoss(Perplexity):
    """The logarithm of perplexity, nats a token: what a search minimises."""

    name = "loss"

    def measure(self, context: Context) -> Measurement:
        """Mean negative log-likelihood a token, on the rows of `Perplexity`."""
        found = super().measure(context)
        chance = math.log(found.chance)
        return Measurement(math.log(found.value), found.stderr / found.value, chance, found.items)


def _batches(context: Context) -> Iterator[Any]:
    """Validation rows in whole passes; a budget of less than one pass is read in one of its own size."""
    rows = context.scorer.rows(context.length)
    wanted = math.ceil(context.config.perplexity_tokens / context.length)
    if wanted > rows:
        return context.prepared.validation(rows)
    return islice(context.prepared.validation(wanted), 1)


def _within(budget: int, batches: Iterable[Any], length: int) -> Iterator[Any]:
    """Batches until ``budget`` tokens count in them."""
    for batch in batches:
        yield batch
        budget -= int(batch.loss[:, :length].sum())
        if budget <= 0:
            return


def _rows(context: Context, batch: Any) -> list[_Row]:
    length, have = context.length, batch.tokens.shape[1] - 1
    if have < length:
        raise UsageError(f"lengths: validation rows have {have} tokens, perplexity needs {length}")
    tokens, starts = batch.tokens[:, : length + 1], batch.starts[:, :length]
    logits = context.scorer.logits(tokens[:, :-1], starts)
    sizes = context_sizes(starts)
    return [
        _row(token_nll(row_logits, tokens[b, 1:]).cpu(), sizes[b], batch.loss[b, :length])
        for b, row_logits in enumerate(logits)
    ]


def _row(nll_T: Tensor, seen_T: Tensor, counts_T: Tensor) -> _Row:
    nll, exponents = nll_T[counts_T].double(), seen_T[counts_T].double().log2().floor().long()
    buckets = {}
    for exponent in exponents.unique().tolist():
        inside = nll[exponents == exponent]
        buckets[exponent] = float(inside.sum()), len(inside)
    return _Row(float(nll.sum()), len(nll), buckets)


def _buckets(rows: list[_Row]) -> list[tuple[int, tuple[float, int]]]:
    """Nats and tokens of each bucket over all rows, by its exponent."""
    sums: dict[int, tuple[float, int]] = {}
    for row in rows:
        for exponent, (nll, count) in row.buckets.items():
            before = sums.get(exponent, (0.0, 0))
            sums[exponent] = before[0] + nll, before[1] + count
    return sorted(sums.items())


def _stderr(rows: list[_Row], mean: float) -> float:
    """Standard error of the mean nll a token, rows taken as independent (a ratio estimator)."""
    tokens = sum(row.tokens for row in rows)
    return math.sqrt(sum((row.nll - mean * row.tokens) ** 2 for row in rows)) / tokens
