"""Questions of the bAbI files (qaN_*.txt, in a folder, a zip or a tar), as a task that can be trained on."""

from __future__ import annotations

import random
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path

from titans_core.config import Frozen
from titans_platform.errors import UsageError
from titans_platform.evals.generated import GeneratedTask
from titans_platform.evals.items import Item, Tokenizer, count_tokens, item_of
from titans_platform.evals.registry import register


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
    def questions(self) -> tuple[Item, ...]:
        """Every question of the files."""
        return _questions(self.options.path, self.options.kind, self.options.split)

    @property
    def chance(self) -> float:
        """One over the number of different answers."""
        return 1 / len({item.pieces[-1][0] for item in self.questions})

    def item(self, rng: random.Random, length: int, tokenizer: Tokenizer) -> Item:
        """A question drawn from those of at most `length` tokens, shorter ones included."""
        questions = self.questions
        order = range(len(questions))
        for index in rng.sample(order, min(len(order), 200)):
            if self._size(index, tokenizer) <= length:
                return questions[index]
        fitting = [i for i in order if self._size(i, tokenizer) <= length]
        if not fitting:
            raise UsageError(
                f"lengths: no story of {self.options.kind} in {self.options.path} fits in {length} tokens"
            )
        return questions[rng.choice(fitting)]

    def _size(self, index: int, tokenizer: Tokenizer) -> int:
        if index not in self._sizes:
            self._sizes[index] = count_tokens(self.questions[index], tokenizer)
        return self._sizes[index]


@lru_cache(maxsize=8)
def _questions(path: str, kind: str, split: str) -> tuple[Item, ...]:
    wanted = re.compile(rf"{re.escape(kind)}_.*{re.escape(split)}.*\.txt$")
    try:
        files = [
            (name, read().decode()) for name, read in _files(Path(path)) if wanted.match(Path(name).name)
        ]
    except (OSError, UnicodeDecodeError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise UsageError(f"options.path: cannot read {path}: {error}") from None
    found = tuple(item for name, text in files for item in parse(text, name))
    if not found:
        raise UsageError(f"options.kind: no {kind}_*{split}*.txt with questions in {path}")
    return found


def _files(path: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Name and content of each file of a folder, of an archive, or the one at `path`."""
    if path.is_dir():
        yield from ((str(file), file.read_bytes) for file in sorted(path.rglob("*.txt")))
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            yield from ((name, partial(archive.read, name)) for name in sorted(archive.namelist()))
    elif tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            for member in archive:
                if (file := archive.extractfile(member)) is not None:
                    yield member.name, file.read
    else:
        yield str(path), path.read_bytes


def parse(text: str, name: str = "text") -> list[Item]:
    """Items of one bAbI file: lines `n sentence` or `n question<TAB>answer<TAB>facts`; n = 1 begins a story.

    Raises:
        UsageError: a line has no number.
    """
    items: list[Item] = []
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
            items.append(item_of([(prompt, False), (f" {answer[0].strip()}", True)]))
        else:
            story.append(rest)
    return items
