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
from titans_platform.evals.items import Item, Tokenizer, count_tokens, cycle, fill, item_of, prose_of, scatter
from titans_platform.evals.registry import FLOOR_ITEMS, GeneratedTask, Heuristic, register

Part = Literal["all", "first", "last"]
HELD_OUT = 10
"""The last of so many parts of the questions is `last`."""
SEAM = 8
"""Tokens more that a subword tokenizer may need where pieces meet."""
ENDS = re.compile(r"[.!?] ")


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


class BabilongOptions(BabiOptions):
    """Which questions of which file, in which book."""

    books: str | None
    """A text or .jsonl file (`text` field), plain, .gz or .xz, that hides the facts; null: nothing, 0K."""
    part: Part = "all"
    """`last`: the last tenth of the questions, `first`: the others. To train on one and measure the other."""
    shots: Annotated[int, Field(ge=0, le=16)] = 0
    """Other questions with their facts and answers that stand before the text."""
    asked: Literal["last", "all"] = "last"
    """`all`: the story's earlier questions too, in the text, with their answers: more to learn from a row."""


@register
class Babilong(Babi):
    """Questions of bAbI whose facts stand far apart in a text that says nothing of them."""

    name = "babilong"
    Options = BabilongOptions

    def item(self, rng: random.Random, length: int, tokenizer: Tokenizer) -> Item:
        """A question drawn from those that fit, the rest of the row being the book."""
        shown = "".join(_shot(rng.choice(self._questions())) for _ in range(self.options.shots))
        apart = count_tokens(item_of([(shown + _asked("x"), False), (" x", True)]), tokenizer) + SEAM
        drawn = super().item(rng, length - apart, tokenizer)
        earlier = self._earlier(drawn)
        while earlier and _tokens(_told(drawn, earlier), tokenizer) > length - apart:
            earlier = earlier[1:]
        *hidden, last = _told(drawn, earlier)
        depths, start = sorted(rng.random() for _ in hidden), rng.random()
        text = self._book()

        def build(characters: int) -> Item:
            book = _from_a_sentence(text, start, characters) if text else ""
            borders = [0, *(match.end() for match in ENDS.finditer(book))]
            spots = [borders[int(depth * len(borders))] for depth in depths]
            return item_of([(shown, False), *scatter(book, hidden, spots), *last])

        return fill(build, length, tokenizer) if text else build(0)

    def _earlier(self, item: Item) -> tuple[Item, ...]:
        return earlier_questions(self._questions())[item] if self.options.asked == "all" else ()

    def _questions(self) -> tuple[Item, ...]:
        found = super()._questions()
        border = len(found) - len(found) // HELD_OUT
        parts = {"all": found, "first": found[:border], "last": found[border:]}
        if not parts[self.options.part]:
            raise UsageError(f"options.part: {len(found)} questions are too few to hold some of them out")
        return parts[self.options.part]

    def _book(self) -> str | None:
        try:
            return self.options.books and prose_of(self.options.books)
        except UsageError as error:
            raise UsageError(str(error).replace("options.path", "options.books", 1)) from None


class HubOptions(Frozen):
    """Which questions of the published files."""

    path: str = "RMT-team/babilong"
    """A dataset of the Hub by its name, or a folder, with fields input, question and target."""
    length: str = "0k"
    """Its configuration: the tokens of the text, 0k, 1k, 2k and so on; the row has to hold them."""
    kind: str = "qa1"
    """Its split."""
    revision: str | None = None
    """A commit or a branch of the dataset."""


@register
class BabilongHub(Babi):
    """BABILong as its authors publish it: text, facts and question as they are, where the row holds them."""

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
    """Every question of a split. Raises UsageError: it cannot be read, or has other fields."""
    import datasets

    try:
        records: list[Any] = list(datasets.load_dataset(dataset, length, split=kind, revision=revision))
        found = [(record["input"], record["question"], record["target"]) for record in records]
    except Exception as error:  # HTTP, Arrow, JSON and its own have no common base
        reason = f"{type(error).__name__} {one_line(error, 160)}"
        raise UsageError(f"options.path: {dataset}, {length}, {kind} cannot be read: {reason}") from None
    return tuple(
        item_of([(f"{text}{_asked(asked)}", False), (f" {said}", True)]) for text, asked, said in found
    )


def parts_of(item: Item) -> tuple[list[str], str, str]:
    """The facts, the question and the answer of an item of `Babi`."""
    (prompt, _), (answer, _) = item.pieces
    *facts, question = prompt.split("\n")
    return facts, question, answer.strip()


@lru_cache(maxsize=8)
def earlier_questions(questions: tuple[Item, ...]) -> dict[Item, tuple[Item, ...]]:
    """Of each question those that its story asks before it, whose facts are the first of its own."""
    found: dict[Item, tuple[Item, ...]] = {}
    story: tuple[Item, ...] = ()
    for item in questions:
        facts = parts_of(item)[0]
        if story and facts[: len(told := parts_of(story[-1])[0])] != told:
            story = ()
        found[item], story = story, (*story, item)
    return found


def _told(item: Item, earlier: tuple[Item, ...]) -> list[list[tuple[str, bool]]]:
    """What is read one after the other: the facts, each of the questions after the facts it is about."""
    found: list[list[tuple[str, bool]]] = []
    read = 0
    for asked in (*earlier, item):
        facts, question, answer = parts_of(asked)
        found += [[(f"{fact} ", False)] for fact in facts[read:]]
        end = [] if asked is item else [("\n", False)]
        found.append([(_asked(question), False), (f" {answer}", True), *end])
        read = len(facts)
    return found


def _tokens(told: list[list[tuple[str, bool]]], tokenizer: Tokenizer) -> int:
    return count_tokens(item_of(chain.from_iterable(told)), tokenizer)


def _asked(question: str) -> str:
    return f"\nQuestion: {question}\nAnswer:"


def _shot(item: Item) -> str:
    facts, question, answer = parts_of(item)
    return f"{' '.join(facts)}{_asked(question)} {answer}\n\n"


def _from_a_sentence(text: str, start: float, characters: int) -> str:
    """`characters` characters from the sentence on that begins after a share of the text."""
    begins = ENDS.search(text, int(start * len(text)))
    return cycle(text, begins.end() % len(text) if begins else 0, characters)
