"""Training throughput: tokens per second, forward and backward, by row length."""

from __future__ import annotations

import math
from functools import partial
from statistics import fmean, median, pvariance
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from titans_core.config import Frozen, PositiveInt
from titans_kernels.bench.timing import Clock
from titans_platform.evals.registry import Context, Measurement, Task
from titans_platform.evals.scoring import measure_on_rank_0, sharded_modules


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

    @property
    def chance(self) -> float:
        """NaN: a rate has no chance level."""
        return math.nan

    def measure(self, context: Context) -> Measurement:
        """Median over passes on random rows of `context.length` tokens; the model keeps no gradients.

        In a process group the first worker measures, and the others wait unless its passes need them.
        """
        return measure_on_rank_0(context.scorer.model, lambda: self._measure(context))

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
        return Measurement(median(rates), stderr, self.chance, rows * context.length)

    def _step(self, model: nn.Module, tokens_BT: Tensor) -> None:
        """Forward and backward pass; gradients are discarded."""
        with torch.autocast(tokens_BT.device.type, torch.bfloat16, enabled=self.options.precision == "bf16"):
            loss = model(tokens_BT[:, :-1], targets_BT=tokens_BT[:, 1:]).losses.mean()
        if sharded_modules(model):
            # the graph has the gathered parameters, not the sharded ones
            loss.backward()
            model.zero_grad()
            return
        trained = [p for p in model.parameters() if p.requires_grad]
        torch.autograd.grad(loss, trained, allow_unused=True)
