"""Perplexity of the validation rows; training throughput by row length."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from statistics import fmean, median, pvariance
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from titans_core.config import Frozen, PositiveInt
from titans_kernels.bench.timing import Clock
from titans_platform.errors import UsageError
from titans_platform.evals.scoring import measure_distributed, sharded_modules
from titans_platform.tasks import Context, Measurement, Task


class Perplexity(Task):
    """exp of the mean negative log-likelihood per token on the validation rows; lower is better."""

    name = "perplexity"

    def check(self, objective: Any, length: int, data: Any) -> None:
        """Reject a length beyond the validation rows, which have ``data.sequence_length`` tokens."""
        available = objective.cfg.data.sequence_length
        if length > available:
            raise UsageError(f"lengths: validation rows have {available} tokens, {self.name} needs {length}")

    def measure(self, context: Context) -> Measurement:
        """Perplexity on `config.perplexity_tokens` tokens of rows cut to `context.length`.

        The floor is the perplexity, on the same rows, of n-grams of the text that the run trained on.

        Raises:
            UsageError: there are no validation rows, or they are shorter than `context.length`.
        """
        parts = measure_distributed(validation_batches(context), partial(_rows, context))
        rows = [row for part in parts for row in part]
        if not (tokens := sum(count for _, count in rows)):
            raise UsageError("perplexity: no validation rows; raise a text source's validation_fraction")
        mean = sum(nll for nll, _ in rows) / tokens
        # rows are the independent samples (ratio estimator)
        stderr = math.sqrt(sum((nll - mean * count) ** 2 for nll, count in rows)) / tokens
        chance = float(context.scorer.tokenizer.vocab_size)
        floor, heuristic = None, None
        if ngrams := context.ngrams():
            length = context.length
            batches = [(b.tokens[:, : length + 1], b.loss[:, :length]) for b in validation_batches(context)]
            floor, heuristic = ngrams.floor([(tokens.numpy(), loss.numpy()) for tokens, loss in batches])
        value = math.exp(mean)
        return Measurement(value, value * stderr, chance, tokens, floor=floor, heuristic=heuristic)


class HeldOutLoss(Perplexity):
    """Log perplexity, nats per token; the objective of a search."""

    name = "loss"

    def measure(self, context: Context) -> Measurement:
        """Mean negative log-likelihood per token, on the rows of `Perplexity`."""
        base = super().measure(context)
        return replace(
            base, value=math.log(base.value), stderr=base.stderr / base.value, chance=math.log(base.chance),
            floor=None if base.floor is None else math.log(base.floor),
        )  # fmt: skip


def validation_batches(context: Context) -> Iterator[Any]:
    """Yield validation batches until `config.perplexity_tokens` tokens are counted.

    A budget of less than one pass is read in one of its own size.
    """
    budget, length = context.config.perplexity_tokens, context.length
    rows, needed = context.scorer.rows(length), math.ceil(budget / length)
    for batch in islice(context.prepared.validation(min(rows, needed)), None if needed > rows else 1):
        yield batch
        budget -= int(batch.loss[:, :length].sum())
        if budget <= 0:
            return


def _rows(context: Context, batch: Any) -> list[tuple[float, int]]:
    """Return the negative log-likelihood (nats) of each row, and how many tokens of it count."""
    length, available = context.length, batch.tokens.shape[1] - 1
    if available < length:
        raise UsageError(f"lengths: validation rows have {available} tokens, perplexity needs {length}")
    tokens, counts_BT = batch.tokens[:, : length + 1], batch.loss[:, :length]
    logits_BTV, rows = context.scorer.logits(tokens[:, :-1], batch.starts[:, :length]), []
    targets_BT = tokens[:, 1:].to(logits_BTV.device)
    for logits_TV, targets_T, counts_T in zip(logits_BTV, targets_BT, counts_BT, strict=True):
        # float32 row by row: a whole batch would need B T V floats
        nll_T = torch.nn.functional.cross_entropy(logits_TV.float(), targets_T, reduction="none").cpu()
        rows.append((float(nll_T[counts_T].double().sum()), int(counts_T.sum())))
    return rows


class ThroughputOptions(Frozen):
    """Batch size, repetitions and precision."""

    rows: PositiveInt | None = None
    """Rows of a pass; None: `eval.batch_tokens` tokens."""
    repeats: Annotated[int, Field(ge=1, le=100)] = 5
    """Timed passes after a warm-up; the value is their median."""
    precision: Literal["fp32", "bf16"] = "fp32"


class Throughput(Task):
    """Tokens per second, forward and backward, on one worker; depends on the machine."""

    name = "throughput"
    Options = ThroughputOptions

    def measure(self, context: Context) -> Measurement:
        """Median over passes on random rows of `context.length` tokens; the model keeps no gradients.

        In a process group all workers measure at the same time, and the first one's rate is the value.
        """
        return measure_distributed([context], self._measure)[0]

    def _measure(self, context: Context) -> Measurement:
        scorer = context.scorer
        rows = self.options.rows or scorer.rows(context.length)
        tokens = torch.randint(scorer.tokenizer.vocab_size, (rows, context.length + 1)).to(scorer.device)
        # evaluation runs without gradients, but the backward pass is timed here too
        with torch.inference_mode(False), torch.enable_grad():
            clock = Clock(scorer.device, flush=False)
            step = partial(self._step, scorer.model, tokens.clone())
            # the first pass is the warm-up
            seconds = [clock.time(step)[1] for _ in range(1 + self.options.repeats)][1:]
        rates = [rows * context.length / second for second in seconds]
        stderr = math.sqrt(pvariance(rates, fmean(rates)) / len(rates))
        # a rate has no chance level
        return Measurement(median(rates), stderr, math.nan, rows * context.length)

    def _step(self, model: nn.Module, tokens_BT: Tensor) -> None:
        """Forward and backward pass; gradients are discarded."""
        with torch.autocast(tokens_BT.device.type, torch.bfloat16, enabled=self.options.precision == "bf16"):
            loss = model(tokens_BT[:, :-1], targets_BT=tokens_BT[:, 1:]).losses.mean()
        if sharded_modules(model):
            # the graph has the gathered parameters, not the sharded ones
            loss.backward()
            model.zero_grad()
            return
        torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
