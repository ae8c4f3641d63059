"""Perplexity of the validation rows, whole and by how much context a prediction had."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from titans_platform.errors import UsageError
from titans_platform.evals.registry import Context, Measurement, Task, register


@dataclass
class _Totals:
    """Sums over the tokens that count: negative log-likelihood (nats) and tokens, by row and by bucket."""

    rows: list[tuple[float, int]] = field(default_factory=list)
    buckets: dict[int, list[float]] = field(default_factory=dict)

    def add(self, nll_T: Tensor, seen_T: Tensor, counts_T: Tensor) -> None:
        nll, seen = nll_T[counts_T].double(), seen_T[counts_T]
        self.rows.append((float(nll.sum()), len(nll)))
        exponents = seen.double().log2().floor().long()
        for exponent in exponents.unique().tolist():
            inside = nll[exponents == exponent]
            bucket = self.buckets.setdefault(exponent, [0.0, 0])
            bucket[0] += float(inside.sum())
            bucket[1] += len(inside)

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.rows)


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
        totals = _Totals()
        for batch in _batches(context):
            self._add_batch(totals, batch, context)
            if totals.tokens >= context.config.perplexity_tokens:
                break
        if not totals.tokens:
            raise UsageError(
                "perplexity: no validation rows; give a text source a validation_fraction above 0"
            )
        mean = sum(nll for nll, _ in totals.rows) / totals.tokens
        buckets = {
            f"{2**e}-{2 ** (e + 1) - 1}": math.exp(nll / count)
            for e, (nll, count) in sorted(totals.buckets.items())
        }
        return Measurement(
            value=math.exp(mean),
            stderr=math.exp(mean) * _stderr(totals.rows, mean),
            chance=float(context.scorer.tokenizer.vocab_size),
            items=totals.tokens,
            buckets=buckets,
        )

    def _add_batch(self, totals: _Totals, batch: Any, context: Context) -> None:
        length = context.length
        if batch.tokens.shape[1] - 1 < length:
            have = batch.tokens.shape[1] - 1
            raise UsageError(f"lengths: validation rows have {have} tokens, perplexity needs {length}")
        tokens, starts = batch.tokens[:, : length + 1], batch.starts[:, :length]
        logits = context.scorer.logits(tokens[:, :-1], starts)
        sizes = context_sizes(starts)
        for row, row_logits in enumerate(logits):
            nll = token_nll(row_logits, tokens[row, 1:]).cpu()
            totals.add(nll, sizes[row], batch.loss[row, :length])


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


def _stderr(rows: list[tuple[float, int]], mean: float) -> float:
    """Standard error of the mean nll a token, rows taken as independent (a ratio estimator)."""
    tokens = sum(count for _, count in rows)
    return math.sqrt(sum((nll - mean * count) ** 2 for nll, count in rows)) / tokens
