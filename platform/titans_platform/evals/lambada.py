"""LAMBADA on a local file: the last word of a passage, given all before it."""

from __future__ import annotations

import math
from statistics import fmean, pvariance
from typing import Literal

from titans_core.config import Frozen
from titans_platform.errors import UsageError
from titans_platform.evals.choice import accuracy, encode_pair, sample
from titans_platform.evals.files import read_jsonl
from titans_platform.evals.registry import Context, Measurement, Task, register


class LambadaOptions(Frozen):
    """Which file, by which metric."""

    path: str
    """A .jsonl(.gz, .xz) file with a `text` field."""
    metric: Literal["acc", "ppl"] = "acc"


@register
class Lambada(Task):
    """`acc`: share of last words greedy decoding gives; `ppl`: exp of their mean nll a word."""

    name = "lambada"
    Options = LambadaOptions

    @property
    def label(self) -> str:
        """Name and metric."""
        return f"{self.name}-{self.options.metric}"

    @property
    def chance(self) -> float:
        """acc: 0, the vocabulary of words being open. ppl: infinite; `measure` gives the uniform model's."""
        return 0.0 if self.options.metric == "acc" else math.inf

    def measure(self, context: Context) -> Measurement:
        """The metric on `config.items` passages; contexts keep their end where a row is too short."""
        scorer = context.scorer
        texts = [record.get("text") for record in read_jsonl(self.options.path)]
        passages = [text.strip() for text in texts if isinstance(text, str) and " " in text.strip()]
        if not passages:
            raise UsageError(
                f"options.path: no record of {self.options.path} has a `text` of two words or more"
            )
        pairs = [passage.rsplit(" ", 1) for passage in sample(passages, context)]
        requests = [encode_pair(before, f" {last}", scorer.tokenizer) for before, last in pairs]
        scores = scorer.score(requests, context.length)
        if self.options.metric == "acc":
            return accuracy([float(score.greedy) for score in scores], self.chance)
        nlls = [-score.logprob for score in scores]
        value = math.exp(min(fmean(nlls), 700))
        stderr = value * math.sqrt(pvariance(nlls) / len(nlls))
        uniform = fmean(score.tokens for score in scores) * math.log(scorer.tokenizer.vocab_size)
        return Measurement(value, stderr, math.exp(min(uniform, 700)), len(scores))
