"""Talk with an adapted model in sessions, whose memory is kept between calls.

chat = Chat(folder)
for piece in chat.say("anna", "My name is Anna.", 100):
    print(piece, end="")
chat.sessions.fork("anna", "bert")
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers  # pyright: ignore[reportMissingImports]

from titans_core.adapt.model import options_of
from titans_core.adapt.sessions import Sessions
from titans_core.generation import GREEDY, Sampling

REPLY = "\u241e"
"""Stands for an earlier reply, of which the memory has the text."""


class Chat:
    """An adapted model, its tokenizer, and its sessions in a folder.

    Args:
        folder: of the model, as `titans adapt` writes it.
        sessions: folder of the sessions; None: ``sessions`` in the model's folder.

    Raises:
        ValueError: the folder has no adapted model; one line.
    """

    def __init__(self, folder: Path, sessions: Path | None = None):
        self.folder = folder
        if not (folder / "config.json").is_file():
            raise ValueError("has no config.json; give a folder that titans adapt wrote")
        options_of(transformers.AutoConfig.from_pretrained(folder, local_files_only=True))
        self.sessions = Sessions(None, sessions or folder / "sessions")

    @cached_property
    def model(self) -> Any:
        """The model, on a GPU if there is one; listing or changing sessions does not load it."""
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(self.folder, local_files_only=True)
        self.sessions.model = model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        return model

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers."""
        return transformers.AutoTokenizer.from_pretrained(self.folder, local_files_only=True)

    def say(self, session: str, text: str, most: int, sampling: Sampling = GREEDY) -> Iterator[str]:
        """Say a text in a session, and return the reply of at most ``most`` tokens piece by piece.

        The turn, text and reply, is kept when the reply has ended.

        Raises:
            ValueError: another model has written the session, or there is nothing to read; one line.
        """
        stop = self.model.generation_config.eos_token_id
        stop = {self.tokenizer.eos_token_id, *(stop if isinstance(stop, list) else [stop])} - {None}
        first = not self.sessions.turns(session)
        written = turn_text(self.tokenizer, text, first)
        special = first and not self.tokenizer.chat_template
        tokens = self.tokenizer(written, add_special_tokens=special)["input_ids"]
        reply = self.sessions.replies({session: tokens}, most, sampling=sampling, stop=sorted(stop))
        return decoded(self.tokenizer, (token for _, token in reply))


def turn_text(tokenizer: Any, text: str, first: bool) -> str:
    """Return what a turn adds to the text of a chat, from the end of the reply before, by its template."""
    if not tokenizer.chat_template:
        return text
    messages = [{"role": "user", "content": text}]
    if not first:
        messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": REPLY}, *messages]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return whole if first else whole.partition(REPLY)[2]


def decoded(tokenizer: Any, tokens: Iterable[int]) -> Iterator[str]:
    """Decode tokens as they come; an incomplete character waits for its end."""
    ids, shown, text = [], "", ""
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        if not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text
    yield text[len(shown) :]
