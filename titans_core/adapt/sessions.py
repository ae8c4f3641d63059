"""Sessions of an adapted model: named texts whose memory is kept between calls, a memory file for each turn.

sessions = model.sessions(folder)
sessions.add("anna", tokens)  # reads on from the last turn
sessions.fork("anna", "bert", turn=1)
sessions.rollback("anna", 0)  # before the first turn
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from titans_core.generation import Reading
from titans_core.memory_file import load_memory, save_memory
from titans_core.state import ModelState


class Turn(NamedTuple):
    """A turn of a session."""

    number: int
    """From 1."""
    tokens: int
    """Tokens read up to its end."""
    hash: str
    """Of the state after it: equal for equal states of the same model."""


class Sessions:
    """The sessions of one model in a folder.

    Args:
        model: an adapted model; a session of another one is refused when it is read.
        folder: created with the first turn.
    """

    def __init__(self, model: Any, folder: Path):
        self.model, self.folder = model, folder

    def names(self) -> list[str]:
        """Return the names of all sessions."""
        return sorted(path.name for path in self.folder.glob("*") if any(path.glob("*.memory")))

    def turns(self, name: str) -> list[Turn]:
        """Return the turns of a session, oldest first; none if there is no such session.

        Raises:
            ValueError: a file is damaged; one line.
        """
        turns = []
        for path in self._files(name):
            try:
                with safe_open(path, "pt") as file:
                    metadata = file.metadata()
                turns.append(Turn(int(path.stem), int(metadata["tokens"]), metadata["checksum"]))
            except (SafetensorError, KeyError, TypeError) as error:
                advice = "roll the session back to the turn before it, or delete the session"
                raise ValueError(f"{path}: damaged: {error}; {advice}") from None
        return turns

    def reading(self, name: str) -> Reading:
        """Load the session after its last turn; an empty reading if there is no such session.

        Raises:
            ValueError: another model wrote it, or the file is damaged; one line.
        """
        turns = self.turns(name)
        return load_memory(self._file(name, turns[-1].number), self.model) if turns else Reading()

    def add(self, name: str, tokens: Sequence[int]) -> Turn:
        """Read at least one token after the last turn, and keep the state after all but the last of them."""
        return self._keep(name, self.model.read(tokens, self.reading(name)))

    def replies(
        self, asked: Mapping[str, Sequence[int]], most: int, **options: Any
    ) -> Iterator[tuple[str, int]]:
        """Read tokens in several sessions and generate at most ``most`` in each; both are a turn of it.

        Sessions that have filled window and kept tokens are decoded in one batch, however much each has read;
        with a deep memory those whose open chunks are equally long.

        Args:
            asked: tokens to read after the last turn, by session.
            most: new tokens of a session.
            options: ``sampling`` and ``stop`` of `titans_core.generation.Writing`.

        Yields:
            A session and a new token of it.
        """
        readings = {name: self.reading(name) for name in asked}
        key = lambda name: repr((state := readings[name].state) and self.model.batch_key(state))  # noqa: E731
        for _, group in groupby(sorted(asked, key=key), key):
            names = list(group)
            states = [state for name in names if (state := readings[name].state)]
            prompts = [[*readings[name].ahead, *asked[name]] for name in names]
            start = {"start": ModelState.cat(states)} if states else {}
            writing = self.model.stream(prompts, most, **start, **options)
            for row, token in writing:
                yield names[row], token
            for name, after in zip(names, writing.readings, strict=True):
                more = after.state.position - (states[0].position if states else 0)
                before = readings[name].tokens - len(readings[name].ahead)
                self._keep(name, after._replace(state=after.state._replace(position=before + more)))

    def _keep(self, name: str, reading: Reading) -> Turn:
        save_memory(self._file(name, len(self.turns(name)) + 1), reading, self.model)
        return self.turns(name)[-1]

    def fork(self, name: str, new: str, turn: int | None = None) -> None:
        """Copy a session up to a turn, or whole. Raises ValueError: there is none, or ``new`` has turns."""
        if self.turns(new):
            raise ValueError(f"session {new} exists already; delete it or give another name")
        turns = self._up_to(name, turn)
        self._folder(new).mkdir(parents=True, exist_ok=True)
        for number in range(1, turns + 1):
            # an interrupted copy leaves no partial file among the turns
            part = self._folder(new) / f"{number}.part"
            shutil.copyfile(self._file(name, number), part)
            os.replace(part, self._file(new, number))

    def rollback(self, name: str, turn: int) -> None:
        """Delete the turns after ``turn``, 0 for all. Raises ValueError: there is no such turn."""
        for number in range(len(self._files(name)), self._up_to(name, turn), -1):
            self._file(name, number).unlink()

    def delete(self, name: str) -> None:
        """Delete a session. Raises ValueError: there is none."""
        self._up_to(name, None)
        shutil.rmtree(self._folder(name))

    def _up_to(self, name: str, turn: int | None) -> int:
        count = len(self._files(name))
        if not count:
            raise ValueError(f"no session {name}; there are {', '.join(self.names()) or 'none'}")
        if turn is not None and not 0 <= turn <= count:
            raise ValueError(f"turn: {turn}, but session {name} has {count}")
        return count if turn is None else turn

    def _files(self, name: str) -> list[Path]:
        return sorted(self._folder(name).glob("*.memory"))

    def _folder(self, name: str) -> Path:
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(f"session {name!r}: give letters, digits, _, . and -")
        return self.folder / name

    def _file(self, name: str, number: int) -> Path:
        return self._folder(name) / f"{number:06}.memory"
