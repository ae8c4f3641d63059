"""Generation: autoregressive sampling from the carried state.

A prompt is prefilled in pieces, as fast as in training; each new token then costs one decode step, however
long the sequence is. Prompts of different lengths form one batch without padding: each call reads as many
tokens as every row still has, so that all rows are at the same position and share one state. While the row
with the shortest prompt generates, the others read theirs token by token. A row's tokens do not depend on
the other rows.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from titans_core.config import Frozen, PositiveInt
from titans_core.state import ModelState

PREFILL_TOKENS = 8192
"""Most tokens of a prefill call, over all rows: bounds the activations of a long prompt."""

Model = Callable[..., Any]
"""``model(tokens_BT, state, last=True)`` has ``.logits`` [B, 1, V], of the last token, and ``.state``."""


class Reading(NamedTuple):
    """A sequence read so far: its state and the tokens not read yet. Immutable, so that it can be forked."""

    state: ModelState | None = None
    """After the tokens read so far, a batch of one; None before the first."""
    ahead: tuple[int, ...] = ()
    """Known tokens that are not in the state yet: the last one, whose logits give the next."""

    @property
    def tokens(self) -> int:
        """Length of the sequence, tokens ahead included."""
        return (self.state.position if self.state else 0) + len(self.ahead)


class Sampling(Frozen):
    """Settings for sampling the next token from the logits."""

    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Divides the logits; 0 is greedy decoding."""
    top_k: PositiveInt | None = None
    """Keep the k most likely tokens."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Nucleus sampling: keep the fewest tokens whose probability reaches this, after ``top_k``."""
    seed: Annotated[int, Field(ge=0, lt=2**62)] = 0
    """Row r has its own generator, seeded with seed + r."""

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


EMPTY_READING, GREEDY = Reading(), Sampling()


class Written(NamedTuple):
    """A generated token and its row."""

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
    """An iterator over the tokens of a batch as they are generated.

    Args:
        model: see `Model`; a `LanguageModel`, or anything wrapped around one.
        prompts: tokens of each row, B lists of any lengths.
        max_new_tokens: most tokens to generate for a row.
        start: the sequence that every prompt continues, or the state of B rows.
        sampling: how tokens are sampled.
        stop: tokens that end a row; they are not returned.
        device: the model's device.

    Raises:
        ValueError: a row has no token to predict from, or max_new_tokens is below 1.
    """

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        start: Reading | ModelState = EMPTY_READING,
        sampling: Sampling = GREEDY,
        stop: Sequence[int] = (),
        device: torch.device | str = "cpu",
    ):
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: {max_new_tokens} is less than 1")
        ahead = start.ahead if isinstance(start, Reading) else ()
        rows = [[*ahead, *prompt] for prompt in prompts]
        if empty := [i for i, row in enumerate(rows) if not row]:
            raise ValueError(f"prompts: row {empty[0]} is empty; it needs at least one token")
        self.model, self.sampling, self.stop, self.device = model, sampling, frozenset(stop), device
        self.readings: list[Reading | None] = [None] * len(rows)
        """The sequence of each finished row, to continue from; None while it runs."""
        seeded = [torch.Generator().manual_seed(sampling.seed + i) for i in range(len(rows))]
        self._rows = [_Row(i, row, max_new_tokens, seeded[i]) for i, row in enumerate(rows)]
        repeated = [0] * len(rows)
        self._state = start.state and start.state.take(repeated) if isinstance(start, Reading) else start
        self._position = 0

    def __iter__(self) -> Iterator[Written]:
        while self._rows:
            logits_BV = self._read()
            due = [i for i, row in enumerate(self._rows) if len(row.tokens) == self._position]
            for row, token in self._sample(logits_BV, due):
                if token in self.stop:
                    row.done = True
                    continue
                row.add(token)
                yield Written(row.index, token)
            self._remove_finished()

    def end(self, row: int) -> None:
        """Finish a row after the token it has just generated."""
        for running in self._rows:
            running.done |= running.index == row

    def _read(self) -> Tensor:
        """Read the tokens that every row still has; logits [B, V] of the next."""
        start, self._position = self._position, min(len(row.tokens) for row in self._rows)
        tokens_BT = torch.tensor(
            [row.tokens[start : self._position] for row in self._rows], device=self.device
        )
        logits_BV, self._state = prefill(self.model, tokens_BT, self._state)
        return logits_BV

    def _sample(self, logits_BV: Tensor, due: list[int]) -> list[tuple[_Row, int]]:
        """Sample the next token of the rows ``due``, whose prompts are read."""
        rows = [self._rows[i] for i in due]
        uniform = [torch.rand((), generator=row.random, dtype=torch.float64) for row in rows]
        tokens = self.sampling.draw(logits_BV[due], torch.stack(uniform)) if due else logits_BV.new_empty(0)
        return list(zip(rows, tokens.tolist(), strict=True))

    def _remove_finished(self) -> None:
        """Remove finished rows from the batch."""
        going = [i for i, row in enumerate(self._rows) if not row.done]
        if len(going) == len(self._rows):
            return
        assert self._state is not None
        for i, row in enumerate(self._rows):
            if row.done:
                self.readings[row.index] = Reading(self._state.take([i]), tuple(row.tokens[self._position :]))
        self._rows = [self._rows[i] for i in going]
        self._state = self._state.take(going) if going else None


def read(
    model: Model, tokens: Sequence[int], start: Reading = EMPTY_READING, device: torch.device | str = "cpu"
) -> Reading:
    """Read ``tokens`` after ``start``, all but the last, whose logits will give the next."""
    known = [*start.ahead, *tokens]
    if len(known) < 2:
        return Reading(start.state, tuple(known))
    _, state = prefill(model, torch.tensor([known[:-1]], device=device), start.state)
    return Reading(state, (known[-1],))


@torch.no_grad()
def prefill(model: Model, tokens_BT: Tensor, state: ModelState | None) -> tuple[Tensor, ModelState]:
    """Logits [B, V] of the token after ``tokens_BT``, and the state, in calls of at most PREFILL_TOKENS."""
    logits_BV = None
    for piece in tokens_BT.split(max(1, PREFILL_TOKENS // tokens_BT.shape[0]), 1):
        out = model(piece, state, last=True)
        logits_BV, state = out.logits[:, -1], out.state
    assert logits_BV is not None
    assert state is not None
    return logits_BV, state
