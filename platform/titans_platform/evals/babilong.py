"""BABILong (Kuratov et al. 2024, arXiv 2406.10149): the facts of a bAbI question hidden in the text of books.

A row is the book's sentences with the facts between them, in their order and at uniformly random places, then
the question. Without a book it is the paper's 0K. `babilong_hub` reads the authors' own files from the Hub.
"""

from __future__ import annotations

import random
import re
from functools import lru_cache
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import Field

from titans_core.config import Frozen
from titans_platform.errors import UsageError, one_line
from titans_platform.evals.items import Item, Tokenizer, count_tokens, fill, item_of, scatter
from titans_platform.evals.registry import register
from titans_platform.evals.texts import Babi, BabiOptions, cycle, prose_of

Part = Literal["all", "first", "last"]
HELD_OUT = 10
"""The last of so many parts of the questions is `last`."""
SEAM = 8
"""Tokens more that a subword tokenizer may need where pieces meet."""
ENDS = re.compile(r"[.!?] ")


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
