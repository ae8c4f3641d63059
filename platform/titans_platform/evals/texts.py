"""Tasks that read local files: the common-sense columns of the paper's Table 1 (multiple choice, LAMBADA)
from .jsonl, and the questions of bAbI, which can be trained on too.

Prompts and normalisation of the columns are those of lm-evaluation-harness, zero-shot: `acc` takes the
likeliest continuation, `acc_norm` the likeliest a character.
"""

from __future__ import annotations

import gzip
import json
import lzma
import math
import random
import re
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any, Literal, NamedTuple, TypeVar

from titans_core.config import Frozen
from titans_platform.errors import UsageError
from titans_platform.evals.items import Item, Tokenizer, count_tokens, item_of
from titans_platform.evals.registry import (
    FLOOR_ITEMS,
    Context,
    GeneratedTask,
    Heuristic,
    Measurement,
    Task,
    register,
)
from titans_platform.evals.scoring import encode_pair

T = TypeVar("T")


def read_text(path: str) -> str:
    """Text of a UTF-8 file, plain, .gz or .xz. Raises UsageError where it cannot be read."""
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(Path(path).suffix, open)
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            return file.read()
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise UsageError(f"options.path: cannot read {path}: {error}") from None


def read_jsonl(path: str) -> list[dict[str, Any]]:
    """The objects of a .jsonl file. Raises UsageError: cannot be read, empty, or a line is no JSON object."""
    records = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if line.strip():
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise UsageError(f"options.path: {path}, line {number}: {error.msg}") from None
            if not isinstance(record, dict):
                raise UsageError(f"options.path: {path}, line {number}: not a JSON object")
            records.append(record)
    if not records:
        raise UsageError(f"options.path: {path} holds no records")
    return records


def cycle(text: str, start: int, characters: int) -> str:
    """`characters` characters of `text` from `start` on, round and round."""
    return (text * ((start + characters) // len(text) + 1))[start : start + characters]


@lru_cache(maxsize=4)
def prose_of(path: str) -> str:
    """The file's text with runs of white space made one space, as RULER does with its essays."""
    if ".jsonl" in path:
        text = " ".join(str(record.get("text", "")) for record in read_jsonl(path))
    else:
        text = read_text(path)
    text = re.sub(r"\s+", " ", text).strip() + " "
    if text == " ":
        raise UsageError(f"options.path: {path} holds no text")
    return text


def sample(records: list[T], context: Context) -> list[T]:
    """`config.items` of `records`, the same for every model; all where there are no more."""
    count = min(context.config.items, len(records))
    return random.Random(context.config.seed).sample(records, count)


def accuracy(right: list[bool], chance: float) -> Measurement:
    """The share that is right, with its binomial standard error."""
    p = fmean(right)
    return Measurement(p, (p * (1 - p) / len(right)) ** 0.5, chance, len(right))


class Choices(NamedTuple):
    """`(context, continuation)` of each choice, the right one, its label where labels are fixed (yes, no)."""

    pairs: list[tuple[str, str]]
    gold: int
    label: str = ""


def choices(form: str, record: dict[str, Any]) -> Choices:
    """The question of a record of a data set. Raises KeyError and others where it is none of that set's."""
    label = ""
    match form:
        case "winogrande":
            before, _, after = record["sentence"].partition("_")
            # the continuation is the same: what is compared is how well either name leads to it
            pairs = [(before + record[name], f" {after.strip()}") for name in ("option1", "option2")]
            return Choices(pairs, int(record["answer"]) - 1)
        case "hellaswag":
            context = _clean(record["ctx"])
            answers, gold = [_clean(ending) for ending in record["endings"]], int(record["label"])
        case "piqa":
            context = f"Question: {record['goal']}\nAnswer:"
            answers, gold = [record["sol1"], record["sol2"]], int(record["label"])
        case "arc":
            context = f"Question: {record['question']}\nAnswer:"
            answers, gold = record["choices"], int(record["gold"])
        case "siqa":
            context = f"Q: {record['context']} {record['question']}\nA:"
            answers, gold = [record[f"answer{i}"] for i in "ABC"], int(record["label"]) - 1
        case _:
            context = f"{record['passage']}\nQuestion: {record['question'].rstrip('?')}?\nAnswer:"
            answers, said = ["no", "yes"], record["answer"]
            gold = int(said) if isinstance(said, bool) else answers.index(said)
            label = answers[gold]
    return Choices([(context, f" {answer}") for answer in answers], gold, label)


def _clean(text: str) -> str:
    """HellaSwag's text without the marks of WikiHow."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


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
    version = 2
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

    def _parse(self, record: dict[str, Any]) -> Choices:
        path, form = self.options.path, self.options.format
        try:
            question = choices(form, record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"{type(error).__name__} {error}"
            raise UsageError(f"options.format: a record of {path} is not {form}'s: {reason}") from None
        if not 0 <= question.gold < len(question.pairs):
            raise UsageError(f"options.path: a record of {path} has a label beyond its choices")
        return question

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
            right.append(totals.index(max(totals)) == question.gold)
        return accuracy(right, chance_of(questions))


def chance_of(questions: list[Choices]) -> float:
    """One over the choices, on average; of choices with fixed labels the share of the commonest."""
    guess = fmean(1 / len(question.pairs) for question in questions)
    labels = Counter(question.label for question in questions if question.label)
    return max(guess, max(labels.values()) / len(questions)) if labels else guess


class LambadaOptions(Frozen):
    """Which file, by which metric."""

    path: str
    """A .jsonl(.gz, .xz) file with a `text` field."""
    metric: Literal["acc", "ppl"] = "acc"


@register
class Lambada(Task):
    """`acc`: share of last words greedy decoding gives; `ppl`: exp of their mean nll a word."""

    name = "lambada"
    version = 2
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
        path, scorer = self.options.path, context.scorer
        texts = [record.get("text") for record in read_jsonl(path)]
        passages = [text.strip() for text in texts if isinstance(text, str) and " " in text.strip()]
        if not passages:
            raise UsageError(f"options.path: no record of {path} has a `text` of two words or more")
        pairs = [passage.rsplit(" ", 1) for passage in sample(passages, context)]
        requests = [encode_pair(before, f" {last}", scorer.tokenizer) for before, last in pairs]
        scores = scorer.score(requests, context.length)
        if self.options.metric == "acc":
            return accuracy([score.greedy for score in scores], self.chance)
        nlls = [-score.logprob for score in scores]
        value = math.exp(min(fmean(nlls), 700))
        stderr = value * math.sqrt(pvariance(nlls) / len(nlls))
        uniform = fmean(score.tokens for score in scores) * math.log(scorer.tokenizer.vocab_size)
        return Measurement(value, stderr, math.exp(min(uniform, 700)), len(scores))


class BabiOptions(Frozen):
    """Which questions of which file."""

    path: str
    """A .zip or .tar(.gz) of bAbI files, a folder of them, or one file."""
    kind: str = "qa1"
    """Task of bAbI; files whose name begins with it and an underscore are read."""
    split: str = "train"
    """Part of the file's name: train, valid or test."""


@register
class Babi(GeneratedTask):
    """Story, question, answer as the files have them, no filler; stories longer than a row are left out."""

    name = "babi"
    Options = BabiOptions

    def __init__(self, options: BabiOptions) -> None:
        super().__init__(options)
        self._sizes: dict[int, int] = {}

    @property
    def chance(self) -> float:
        """One over the number of different answers."""
        return 1 / len({item.pieces[-1][0] for item in self._questions()})

    @property
    def heuristics(self) -> Mapping[str, Heuristic]:
        """Answers that the story names, whatever is asked."""
        return {"any answer named in the story": self._named, "the answer named last": self._named_last}

    def _words(self, before: str) -> list[str]:
        """Words of the story that are the answer of some question, in order."""
        answers = answers_of(self._questions())
        return [word for word in re.findall(r"\w+", self._story(before)) if word in answers]

    def _named(self, before: str) -> list[str]:
        return sorted(set(self._words(before)))

    def _named_last(self, before: str) -> list[str]:
        return self._words(before)[-1:]

    def _story(self, before: str) -> str:
        """The text before an answer without its question."""
        return before.rpartition("\n")[0]

    def floor_items(self, length: int, tokenizer: Tokenizer) -> Iterator[Item]:
        """Questions as the files have them, of any length: what hides them has no part in the heuristics."""
        questions = self._questions()
        yield from random.Random(0).sample(questions, min(FLOOR_ITEMS, len(questions)))

    def item(self, rng: random.Random, length: int, tokenizer: Tokenizer) -> Item:
        """A question drawn from those of at most `length` tokens, shorter ones included."""
        questions = self._questions()

        def fits(index: int) -> bool:
            if index not in self._sizes:
                self._sizes[index] = count_tokens(questions[index], tokenizer)
            return self._sizes[index] <= length

        order = range(len(questions))
        for index in rng.sample(order, min(len(order), 200)):
            if fits(index):
                return questions[index]
        fitting = [index for index in order if fits(index)]
        if not fitting:
            raise UsageError(
                f"lengths: no story of {self.options.kind} in {self.options.path} fits in {length} tokens"
            )
        return questions[rng.choice(fitting)]

    def _questions(self) -> tuple[Item, ...]:
        return babi_questions(self.options.path, self.options.kind, self.options.split)


@lru_cache(maxsize=8)
def answers_of(questions: tuple[Item, ...]) -> frozenset[str]:
    """Every answer of the questions."""
    return frozenset(item.pieces[-1][0].strip() for item in questions)


@lru_cache(maxsize=8)
def babi_questions(path: str, kind: str, split: str) -> tuple[Item, ...]:
    """Every question of the files of a kind and split. Raises UsageError: none there, or cannot be read."""
    pattern = re.compile(rf"{re.escape(kind)}_.*{re.escape(split)}.*\.txt$")
    try:
        files = _babi_files(Path(path), lambda name: bool(pattern.match(Path(name).name)))
        texts = [(name, raw.decode()) for name, raw in files]
    except (OSError, UnicodeDecodeError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise UsageError(f"options.path: cannot read {path}: {error}") from None
    found = tuple(item for name, text in texts for item in _parse_babi(text, name))
    if not found:
        raise UsageError(f"options.kind: no {kind}_*{split}*.txt with questions in {path}")
    return found


def _babi_files(path: Path, wanted: Callable[[Path | str], bool]) -> Iterator[tuple[str, bytes]]:
    """Name and content of the wanted files of a folder, of an archive, or of the one at `path`."""
    if path.is_dir():
        yield from ((file.name, file.read_bytes()) for file in sorted(path.rglob("*.txt")) if wanted(file))
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            yield from ((name, archive.read(name)) for name in sorted(archive.namelist()) if wanted(name))
    elif tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            for member in archive:
                if wanted(member.name) and (file := archive.extractfile(member)) is not None:
                    yield member.name, file.read()
    elif wanted(path):
        yield path.name, path.read_bytes()


def _parse_babi(text: str, name: str) -> Iterator[Item]:
    """Items of one file: lines `n sentence` or `n question<TAB>answer<TAB>facts`; n = 1 begins a story.

    Raises:
        UsageError: a line has no number.
    """
    story: list[str] = []
    for row, line in enumerate(text.splitlines(), start=1):
        number, _, rest = line.strip().partition(" ")
        if not line.strip():
            continue
        if not number.isdigit():
            raise UsageError(f"options.path: {name}, line {row}: a bAbI line begins with its number")
        if number == "1":
            story = []
        question, *answer = rest.split("\t")
        if answer:
            prompt = "".join(f"{sentence}\n" for sentence in story) + question.strip()
            yield item_of([(prompt, False), (f" {answer[0].strip()}", True)])
        else:
            story.append(rest)
