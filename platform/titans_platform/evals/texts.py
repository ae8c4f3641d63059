"""The common-sense columns of the paper's Table 1 from local .jsonl files: multiple choice and LAMBADA.

Prompts and normalisation are those of lm-evaluation-harness, zero-shot: `acc` takes the likeliest
continuation, `acc_norm` the likeliest a character.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any, Literal, NamedTuple, TypeVar

from titans_core.config import Frozen
from titans_platform.errors import UsageError
from titans_platform.evals.files import read_jsonl
from titans_platform.evals.registry import Context, Measurement, Task, register
from titans_platform.evals.scoring import encode_pair


class Choices(NamedTuple):
    """`(context, continuation)` of each choice, the right one, its label where labels are fixed (yes, no)."""

    pairs: list[tuple[str, str]]
    gold: int
    label: str = ""


Record = dict[str, Any]
T = TypeVar("T")


def _hellaswag(record: Record) -> Choices:
    def clean(text: str) -> str:
        # WikiHow's artefacts
        text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
        return text.replace("  ", " ")

    context = clean(record["ctx"])
    return Choices([(context, f" {clean(ending)}") for ending in record["endings"]], int(record["label"]))


def _piqa(record: Record) -> Choices:
    context = f"Question: {record['goal']}\nAnswer:"
    return Choices([(context, f" {record[name]}") for name in ("sol1", "sol2")], int(record["label"]))


def _arc(record: Record) -> Choices:
    context = f"Question: {record['question']}\nAnswer:"
    return Choices([(context, f" {choice}") for choice in record["choices"]], int(record["gold"]))


def _winogrande(record: Record) -> Choices:
    before, _, after = record["sentence"].partition("_")
    # the continuation is the same: what is compared is how well either name leads to it
    pairs = [(before + record[name], f" {after.strip()}") for name in ("option1", "option2")]
    return Choices(pairs, int(record["answer"]) - 1)


def _siqa(record: Record) -> Choices:
    context = f"Q: {record['context']} {record['question']}\nA:"
    pairs = [(context, f" {record[name]}") for name in ("answerA", "answerB", "answerC")]
    return Choices(pairs, int(record["label"]) - 1)


def _boolq(record: Record) -> Choices:
    context = f"{record['passage']}\nQuestion: {record['question'].rstrip('?')}?\nAnswer:"
    answer = record["answer"]
    gold = answer if isinstance(answer, bool) else {"no": False, "yes": True}[answer]
    return Choices([(context, " no"), (context, " yes")], int(gold), label="yes" if gold else "no")


FORMATS: dict[str, Callable[[Record], Choices]] = {
    "hellaswag": _hellaswag,
    "piqa": _piqa,
    "arc": _arc,
    "winogrande": _winogrande,
    "siqa": _siqa,
    "boolq": _boolq,
}


class ChoiceOptions(Frozen):
    """Which file, in what format, by which metric."""

    path: str
    """A .jsonl(.gz, .xz) file."""
    format: Literal["hellaswag", "piqa", "arc", "winogrande", "siqa", "boolq"]
    metric: Literal["acc", "acc_norm"] = "acc"


@register
class MultipleChoice(Task):
    """Share of questions whose right choice is the likeliest."""

    name = "multiple_choice"
    Options = ChoiceOptions

    @property
    def label(self) -> str:
        """The file's name: ARC's easy and challenge sets have one format."""
        return Path(self.options.path).name.partition(".")[0]

    @property
    def chance(self) -> float:
        """What a guess gets on the whole file."""
        return chance_of(self._questions())

    def _questions(self) -> list[Choices]:
        return [self._parse(record) for record in read_jsonl(self.options.path)]

    def _parse(self, record: Record) -> Choices:
        try:
            choices = FORMATS[self.options.format](record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"options.format: a record of {self.options.path} is not {self.options.format}'s:"
                f" {type(error).__name__} {error}"
            ) from None
        if not 0 <= choices.gold < len(choices.pairs):
            raise UsageError(f"options.path: a record of {self.options.path} has a label beyond its choices")
        return choices

    def measure(self, context: Context) -> Measurement:
        """Accuracy on `config.items` questions; contexts keep their end where a row is too short."""
        questions = sample(self._questions(), context)
        tokenizer = context.scorer.tokenizer
        requests = [encode_pair(*pair, tokenizer) for question in questions for pair in question.pairs]
        scores = iter(context.scorer.score(requests, context.length))
        right = []
        for question in questions:
            totals = [next(scores).logprob for _ in question.pairs]
            if self.options.metric == "acc_norm":
                widths = [max(1, len(text.removeprefix(" "))) for _, text in question.pairs]
                totals = [total / width for total, width in zip(totals, widths, strict=True)]
            right.append(float(totals.index(max(totals)) == question.gold))
        return accuracy(right, chance_of(questions))


def chance_of(questions: list[Choices]) -> float:
    """One over the choices, on average; of choices with fixed labels the share of the commonest."""
    guess = fmean(1 / len(question.pairs) for question in questions)
    labels = Counter(question.label for question in questions if question.label)
    return max(guess, max(labels.values()) / len(questions)) if labels else guess


def sample(records: list[T], context: Context) -> list[T]:
    """`config.items` of `records`, the same for every model; all where there are no more."""
    count = min(context.config.items, len(records))
    return random.Random(context.config.seed).sample(records, count)


def accuracy(right: list[float], chance: float) -> Measurement:
    """Mean of 0s and 1s with its binomial standard error."""
    p = fmean(right)
    return Measurement(p, (p * (1 - p) / len(right)) ** 0.5, chance, len(right))


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
