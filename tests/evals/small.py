"""A model that answers by code, and a helper that parses items of generated tasks."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
from torch import nn

from titans_platform.data import load_tokenizer
from titans_platform.tasks.items import Item

BYTE = load_tokenizer("byte")


class Oracle(nn.Module):
    """Says the character `solve(text so far)` gives, and nothing sensible where that is None."""

    def __init__(self, solve: Callable[[str], str | None]):
        super().__init__()
        self.solve = solve
        self.shapes: list[tuple[int, ...]] = []
        self.autocast: set[bool] = set()

    def forward(self, tokens, document_starts=None):
        assert not self.training
        assert torch.is_inference_mode_enabled()
        self.autocast.add(torch.is_autocast_enabled("cpu"))
        self.shapes.append(tuple(tokens.shape))
        logits = torch.zeros(*tokens.shape, BYTE.vocab_size)
        for b, row in enumerate(tokens.tolist()):
            for t in range(len(row)):
                written = self.solve(BYTE.decode(row[: t + 1]))
                if written:
                    logits[b, t, ord(written)] = 20.0
        return SimpleNamespace(logits=logits)


def questions(item: Item) -> Iterator[tuple[str, str]]:
    """(all text before the answer, answer) of each answer."""
    text = ""
    for piece, is_answer in item.pieces:
        if is_answer:
            yield text, piece
        text += piece
