"""A model that answers by code, and what an evaluation of it needs."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import nn

from titans_platform.config import EvalConfig, TaskConfig
from titans_platform.data import load_tokenizer

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


def prepared(hashes=frozenset(), batches=()):
    """Data of bytes with these validation batches."""
    return SimpleNamespace(tokenizer=BYTE, item_hashes=hashes, validation=lambda rows: iter(batches))


def config(task, options, lengths=(1.0,), **more):
    """One column of one task."""
    return EvalConfig(columns={"col": (TaskConfig(task=task, options=options, lengths=lengths),)}, **more)
