"""Questions of bAbI from its files, and BABILong (Kuratov et al. 2024, arXiv 2406.10149): the facts of a bAbI
question hidden in the text of books.

A row of BABILong is the book's sentences with the facts between them, in their order and at uniformly random
places, then the question. Without a book it is the paper's 0K. `babilong_hub` reads the authors' own files.
"""

from __future__ import annotations

import random
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from titans_core.config import Frozen
from titans_platform.errors import UsageError, one_line
from titans_platform.tasks import FLOOR_ITEMS, GeneratedTask, Heuristic
from titans_platform.tasks.items import (
    Item,
    ItemTokenizer,
    Piece,
    count_tokens,
    cycle,
    fill,
    load_prose,
    make_item,
    scatter,
)
from titans_platform.text import plain

Part = Literal["all", "first", "last"]
HELD_OUT = 10
"""The last 1 / HELD_OUT of the questions are held out (`part: last`)."""
SEAM = 8
"""Extra tokens that a subword tokenizer may need where pieces are joined."""
ENDS = re.compile(r"[.!?] ")


class BabiOptions(Frozen):
    """Which questions of which file."""

    path: str
    """A .zip or .tar(.gz) of bAbI files, a folder of them, or one file."""
    kind: str = "qa1"
    """Task of bAbI; files whose name begins with it and an underscore are read."""
    split: str = "train"
    """Part of the file's name: train, valid or test."""


_token_count = lru_cache(2**16)(count_tokens)


class Babi(GeneratedTask):
    """Stories, questions and answers of the files, without filler; stories longer than a row are skipped."""

    name = "babi"
    Options = BabiOptions

    @property
    def chance(self) -> float:
        """One over the number of distinct answers."""
        return 1 / len(distinct_answers(self._questions()))

    @property
    def heuristics(self) -> Mapping[str, Heuristic]:
        """Answers that the story mentions, whatever the question."""
        return {
            "any answer named in the story": lambda before: sorted(set(self._words(before))),
            "the answer named last": lambda before: self._words(before)[-1:],
        }

    def _words(self, before: str) -> list[str]:
        """Words of the story that are the answer to some question, in order."""
        answers = distinct_answers(self._questions())
        return [word for word in re.findall(r"\w+", self._story(before)) if word in answers]

    def _story(self, before: str) -> str:
        """Text before an answer, without the question."""
        return before.rpartition("\n")[0]

    def floor_items(self, length: int, tokenizer: ItemTokenizer) -> Iterator[Item]:
        """Questions of the files, of any length: heuristics ignore the text in which facts are hidden."""
        questions = self._questions()
        yield from random.Random(0).sample(questions, min(FLOOR_ITEMS, len(questions)))

    def item(self, rng: random.Random, length: int, tokenizer: ItemTokenizer) -> Item:
        """Draw a random question of at most `length` tokens."""
        questions = self._questions()
        for item in rng.sample(questions, min(len(questions), 200)):
            if _token_count(item, tokenizer) <= length:
                return item
        if not (fitting := [item for item in questions if _token_count(item, tokenizer) <= length]):
            where = f"{self.options.kind} in {self.options.path}"
            raise UsageError(f"lengths: no story of {where} fits in {length} tokens")
        return rng.choice(fitting)

    def _questions(self) -> tuple[Item, ...]:
        return babi_questions(self.options.path, self.options.kind, self.options.split)


@lru_cache(maxsize=8)
def distinct_answers(questions: tuple[Item, ...]) -> frozenset[str]:
    """Return the distinct answers of the questions."""
    return frozenset(item.pieces[-1][0].strip() for item in questions)


@lru_cache(maxsize=8)
def babi_questions(path: str, kind: str, split: str) -> tuple[Item, ...]:
    """Questions of the files of a kind and split. Raises UsageError: there are none, or unreadable."""
    pattern = re.compile(rf"{re.escape(kind)}_.*{re.escape(split)}.*\.txt$")
    try:
        files = _babi_files(Path(path), lambda name: bool(pattern.match(Path(name).name)))
        texts = [(name, plain(raw.decode())) for name, raw in files]
    except (OSError, UnicodeDecodeError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise UsageError(f"options.path: cannot read {path}: {error}") from None
    questions = tuple(item for name, text in texts for item in _parse_babi(text, name))
    if not questions:
        cause = f"{path} has no {kind}_*{split}*.txt with questions"
        raise UsageError(f"options.kind: {cause}; give a task that it has, or another options.path")
    return questions


def _babi_files(path: Path, accepts: Callable[[Path | str], bool]) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the wanted files in a folder, an archive, or of the single file `path`."""
    if path.is_dir():
        yield from ((file.name, file.read_bytes()) for file in sorted(path.rglob("*.txt")) if accepts(file))
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            yield from ((name, archive.read(name)) for name in sorted(archive.namelist()) if accepts(name))
    elif tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            for member in archive:
                if accepts(member.name) and (file := archive.extractfile(member)) is not None:
                    yield member.name, file.read()
    elif accepts(path):
        yield path.name, path.read_bytes()


def _parse_babi(text: str, name: str) -> Iterator[Item]:
    """Items of one file: lines `n sentence` or `n question<TAB>answer<TAB>facts`; n = 1 begins a story.

    Raises:
        UsageError: a line has no number.
    """
    story: list[str] = []
    for row, line in enumerate(text.split("\n"), start=1):
        number, _, rest = line.strip().partition(" ")
        if not number:
            continue
        if not number.isdigit():
            raise UsageError(f"options.path: {name}, line {row}: a bAbI line begins with its number")
        if number == "1":
            story = []
        question, *answer = rest.split("\t")
        if answer:
            prompt = "".join(f"{sentence}\n" for sentence in story) + question.strip()
            yield make_item([(prompt, False), (f" {answer[0].strip()}", True)])
        else:
            story.append(rest)


class BabilongOptions(BabiOptions):
    """Which questions of which file, in which book."""

    books: str | None
    """A text or .jsonl file (`text` field), plain, .gz or .xz, that hides the facts; null: nothing, 0K."""
    part: Part = "all"
    """`last`: the last tenth of the questions, `first`: the others; train on one and measure the other."""
    shots: Annotated[int, Field(ge=0, le=16)] = 0
    """Few-shot examples (facts, question, answer) before the text."""
    asked: Literal["last", "all"] = "last"
    """`all`: the text also has the story's earlier questions with their answers, a denser training signal."""


class Babilong(Babi):
    """Questions of bAbI whose facts are spread over an unrelated text."""

    name = "babilong"
    version = 2
    Options = BabilongOptions

    def item(self, rng: random.Random, length: int, tokenizer: ItemTokenizer) -> Item:
        """Draw a random question that fits; the book takes the rest of the row."""
        shots = [rng.choice(self._questions()) for _ in range(self.options.shots)]
        examples = "".join(map(_example, shots))
        reserved = count_tokens(make_item([(examples + _asked("x"), False), (" x", True)]), tokenizer) + SEAM
        drawn = super().item(rng, length - reserved, tokenizer)
        # the example that is the question itself would tell the answer
        examples = "".join(_example(shot) for shot in shots if shot != drawn)
        earlier = previous_questions(self._questions())[drawn] if self.options.asked == "all" else ()
        while earlier and _tokens(_told(drawn, earlier), tokenizer) > length - reserved:
            earlier = earlier[1:]
        *hidden, last = _told(drawn, earlier)
        depths, start = sorted(rng.random() for _ in hidden), rng.random()
        try:
            text, first = self.options.books and load_prose(self.options.books), 0
        except UsageError as error:
            raise UsageError(str(error).replace("options.path", "options.books", 1)) from None
        # the book starts with the first sentence that begins after the share ``start`` of it
        if text and (begins := ENDS.search(text, int(start * len(text)))):
            first = begins.end() % len(text)

        def build(characters: int) -> Item:
            book = cycle(text, first, characters) if text else ""
            borders = [0, *(match.end() for match in ENDS.finditer(book))]
            spots = [borders[int(depth * len(borders))] for depth in depths]
            return make_item([(examples, False), *scatter(book, hidden, spots), *last])

        return fill(build, length, tokenizer) if text else build(0)

    def _questions(self) -> tuple[Item, ...]:
        questions = super()._questions()
        border = len(questions) - len(questions) // HELD_OUT
        parts = {"all": questions, "first": questions[:border], "last": questions[border:]}
        if not parts[self.options.part]:
            raise UsageError(f"options.part: {len(questions)} questions are too few to split; use part: all")
        return parts[self.options.part]


class HubOptions(Frozen):
    """Which questions of the published files."""

    path: str = "RMT-team/babilong"
    """A dataset of the Hub by its name, or a folder, with fields input, question and target."""
    length: str = "0k"
    """Its configuration, the tokens of the text: 0k, 1k, 2k, ...; a row must hold them."""
    kind: str = "qa1"
    """Its split."""
    revision: str | None = None
    """A commit or a branch of the dataset."""


class BabilongHub(Babi):
    """BABILong as its authors publish it; texts that are longer than a row are skipped."""

    name = "babilong_hub"
    Options = HubOptions

    @property
    def label(self) -> str:
        """Name, task and length: `babilong_hub-qa1-4k`."""
        return f"{super().label}-{self.options.length}"

    def _story(self, before: str) -> str:
        return before.rpartition("\nQuestion: ")[0]

    def _questions(self) -> tuple[Item, ...]:
        options = self.options
        return hub_questions(options.path, options.length, options.kind, options.revision)


@lru_cache(maxsize=2)
def hub_questions(dataset: str, length: str, kind: str, revision: str | None) -> tuple[Item, ...]:
    """Questions of a split. Raises UsageError: unreadable, or other fields."""
    import datasets

    try:
        records: list[Any] = list(datasets.load_dataset(dataset, length, split=kind, revision=revision))
        triples = [(record["input"], record["question"], record["target"]) for record in records]
    except Exception as error:  # errors of HTTP, Arrow, JSON and datasets have no common base class
        reason = f"{type(error).__name__} {one_line(error, 160)}"
        raise UsageError(f"options.path: {dataset}, {length}, {kind} cannot be read: {reason}") from None
    return tuple(make_item([(text + _asked(q), False), (f" {a}", True)]) for text, q, a in triples)


def split_question(item: Item) -> tuple[list[str], str, str]:
    """Split an item of `Babi` into its facts, its question and its answer."""
    (prompt, _), (answer, _) = item.pieces
    *facts, question = prompt.split("\n")
    return facts, question, answer.strip()


@lru_cache(maxsize=8)
def previous_questions(questions: tuple[Item, ...]) -> dict[Item, tuple[Item, ...]]:
    """Return for each question the earlier questions of its story; their facts are a prefix of its own."""
    earlier: dict[Item, tuple[Item, ...]] = {}
    story: tuple[Item, ...] = ()
    for item in questions:
        facts = split_question(item)[0]
        if story and facts[: len(earlier_facts := split_question(story[-1])[0])] != earlier_facts:
            story = ()
        earlier[item], story = story, (*story, item)
    return earlier


def _told(item: Item, earlier: tuple[Item, ...]) -> list[list[Piece]]:
    """Pieces in reading order: the facts, and each question after the facts that it is about."""
    pieces: list[list[Piece]] = []
    read = 0
    for posed in (*earlier, item):
        facts, question, answer = split_question(posed)
        pieces += [[(f"{fact} ", False)] for fact in facts[read:]]
        end = [] if posed is item else [("\n", False)]
        pieces.append([(_asked(question), False), (f" {answer}", True), *end])
        read = len(facts)
    return pieces


def _tokens(pieces: list[list[Piece]], tokenizer: ItemTokenizer) -> int:
    return count_tokens(make_item(chain.from_iterable(pieces)), tokenizer)


def _example(item: Item) -> str:
    facts, question, answer = split_question(item)
    return f"{' '.join(facts)}{_asked(question)} {answer}\n\n"


def _asked(question: str) -> str:
    return f"\nQuestion: {question}\nAnswer:"
