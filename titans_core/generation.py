"""Writing: tokens drawn one after the other, each from the state of all that was read before it.

A prompt is read in pieces, as fast as in training; a token then costs one step on the state, however long
the sequence is. Prompts of different lengths are one batch, without padding: each call of the model reads as
many tokens as every row has ahead of it, so all rows stand at one position and share one state. While the
row of the shortest prompt writes, the others read theirs a token at a time. No row sees anything that it
would not see alone.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from titans_core.backbone import ModelState
from titans_core.config import Frozen, PositiveInt

PIECE = 8192
"""Tokens of all rows together that one call reads at most: a bound on the memory that a long prompt takes."""

Model = Callable[..., Any]
"""``model(tokens_BT, state, last=True)`` has ``.logits`` [B, 1, V], of the last token, and ``.state``."""


class Reading(NamedTuple):
    """One sequence in the midst of being read. Nothing changes it: any number of others can go on from it."""

    state: ModelState | None = None
    """After the tokens that were read, of one row; None before the first."""
    ahead: tuple[int, ...] = ()
    """Tokens that come next and were not read: the last one known, from which the next is drawn."""

    @property
    def tokens(self) -> int:
        """Tokens of the sequence so far, those ahead included."""
        return (self.state.position if self.state else 0) + len(self.ahead)


class Sampling(Frozen):
    """How the next token is drawn from the logits."""

    temperature: Annotated[float, Field(ge=0)] = 0.0
    """What logits are divided by; 0 takes the likeliest token."""
    top_k: PositiveInt | None = None
    """Only the k likeliest tokens."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Only the likeliest tokens that together just reach this probability, after ``top_k``."""
    seed: Annotated[int, Field(ge=0, lt=2**62)] = 0
    """Row r has a generator of its own with seed + r: its tokens do not depend on the other rows."""

    def draw(self, logits_BV: Tensor, uniform_B: Tensor) -> Tensor:
        """[B] tokens; ``uniform_B`` are random numbers in [0, 1), float64."""
        if not self.temperature:
            return logits_BV.argmax(-1)
        p, token = (logits_BV.double() / self.temperature).softmax(-1).sort(descending=True, stable=True)
        if self.top_k is not None:
            p = p[:, : self.top_k] / p[:, : self.top_k].sum(-1, keepdim=True)
        if self.top_p is not None:
            p = p.masked_fill(p.cumsum(-1) - p >= self.top_p, 0)
        sums, kept = p.cumsum(-1), p.count_nonzero(-1)[:, None]
        place = torch.searchsorted(sums, uniform_B[:, None].to(p) * sums[:, -1:], right=True)
        return token.gather(-1, place.minimum(kept - 1))[:, 0]


NOTHING, GREEDY = Reading(), Sampling()


class Written(NamedTuple):
    """A token, and the row that wrote it."""

    row: int
    token: int


@dataclass
class _Row:
    index: int
    tokens: list[int]
    left: int
    random: torch.Generator
    done: bool = False

    def add(self, token: int) -> None:
        self.tokens.append(token)
        self.left -= 1
        self.done = not self.left


class Writing:
    """An iterator over the tokens of a batch as they are written.

    Args:
        model: see `Model`; a `LanguageModel`, or anything wrapped around one.
        prompts: tokens of each row, [B] lists of any lengths.
        max_new_tokens: tokens that a row writes at most.
        start: what every row goes on from.
        sampling: how tokens are drawn.
        stop: tokens that end a row; they are not part of it.
        device: where the model is.

    Raises:
        ValueError: a row without a token to go on from, or max_new_tokens below 1.
    """

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        start: Reading = NOTHING,
        sampling: Sampling = GREEDY,
        stop: Sequence[int] = (),
        device: torch.device | str = "cpu",
    ):
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: {max_new_tokens} is less than 1")
        rows = [[*start.ahead, *prompt] for prompt in prompts]
        if empty := [i for i, row in enumerate(rows) if not row]:
            raise ValueError(f"prompts: row {empty[0]} is empty; it needs a token to go on from")
        self.model, self.sampling, self.stop, self.device = model, sampling, frozenset(stop), device
        self.readings: list[Reading | None] = [None] * len(rows)
        """Of each row that has ended, its sequence up to there."""
        seeded = [torch.Generator().manual_seed(sampling.seed + i) for i in range(len(rows))]
        self._rows = [_Row(i, row, max_new_tokens, seeded[i]) for i, row in enumerate(rows)]
        self._state = start.state and start.state.take([0] * len(rows))
        self._at = 0

    def __iter__(self) -> Iterator[Written]:
        while self._rows:
            logits_BV = self._read()
            due = [i for i, row in enumerate(self._rows) if len(row.tokens) == self._at]
            for row, token in self._drawn(logits_BV, due):
                if token in self.stop:
                    row.done = True
                    continue
                row.add(token)
                yield Written(row.index, token)
            self._leave()

    def end(self, row: int) -> None:
        """End a row after the token that it has just written."""
        for running in self._rows:
            running.done |= running.index == row

    def _read(self) -> Tensor:
        """Read what every row has ahead; logits [B, V] of the token after it."""
        start, self._at = self._at, min(len(row.tokens) for row in self._rows)
        tokens_BT = torch.tensor([row.tokens[start : self._at] for row in self._rows], device=self.device)
        logits_BV, self._state = read_pieces(self.model, tokens_BT, self._state)
        return logits_BV

    def _drawn(self, logits_BV: Tensor, due: list[int]) -> list[tuple[_Row, int]]:
        """The next token of the rows at places ``due``."""
        rows = [self._rows[i] for i in due]
        uniform = [torch.rand((), generator=row.random, dtype=torch.float64) for row in rows]
        tokens = self.sampling.draw(logits_BV[due], torch.stack(uniform)) if due else logits_BV.new_empty(0)
        return list(zip(rows, tokens.tolist(), strict=True))

    def _leave(self) -> None:
        """Rows that have ended leave the batch."""
        going = [i for i, row in enumerate(self._rows) if not row.done]
        if len(going) == len(self._rows):
            return
        assert self._state is not None
        for i, row in enumerate(self._rows):
            if row.done:
                self.readings[row.index] = Reading(self._state.take([i]), tuple(row.tokens[self._at :]))
        self._rows = [self._rows[i] for i in going]
        self._state = self._state.take(going) if going else None


def read(
    model: Model, tokens: Sequence[int], start: Reading = NOTHING, device: torch.device | str = "cpu"
) -> Reading:
    """``start`` and then ``tokens``, all of them read but the last, from which the next would be drawn."""
    known = [*start.ahead, *tokens]
    if len(known) < 2:
        return Reading(start.state, tuple(known))
    _, state = read_pieces(model, torch.tensor([known[:-1]], device=device), start.state)
    return Reading(state, (known[-1],))


@torch.no_grad()
def read_pieces(model: Model, tokens_BT: Tensor, state: ModelState | None) -> tuple[Tensor, ModelState]:
    """Logits [B, V] of the token after tokens_BT, and the state."""
    logits_BV = None
    for piece in tokens_BT.split(max(1, PIECE // tokens_BT.shape[0]), 1):
        out = model(piece, state, last=True)
        logits_BV, state = out.logits[:, -1], out.state
    assert logits_BV is not None
    assert state is not None
    return logits_BV, state
