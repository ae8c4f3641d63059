"""What a memory did token by token while it read: surprise, gates, state, what reads find, what is kept.

`titans_core.telemetry` has the means of a training step; this has every token of one text.

Shapes: B = 1, T tokens, H heads, E head width, N nearest keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from titans_core.memory import NeuralMemory, Writes
from titans_kernels import DecodeState, MemoryState, OpenChunk, Rule


class Nearest(NamedTuple):
    """The written keys nearest to each token's query, [T, H, N], most similar first."""

    position: Tensor
    """Token that wrote the key, int64; -1 where fewer than N were written."""
    similarity: Tensor
    """Cosine of query and key."""
    share: Tensor
    """``c_i (q . k_i)`` over the sum of its absolute value over all written i, c as in `MemoryTrace`.

    Of a linear memory this is exactly how much of the read, beyond what M_0 gives, is the write of i; of a
    deep one, of what its first layer makes of the query. NaN where `MemoryTrace.coefficient` is.
    """


class MemoryTrace(NamedTuple):
    """One memory over T tokens, on the CPU in the precision of its state; [T, H] where nothing else is said.

    Persistent tokens are part of what the memory starts from and have no entry.
    """

    name: str
    """The memory's name in its model: ``blocks.0.memory``."""
    surprise: Tensor
    """``||M_{t-1}(k_t) - v_t||^2``, before the token is written."""
    written: Tensor
    """``||M_t(k_t) - v_t||^2``, right after. With momentum, writing goes on for some tokens."""
    final: Tensor
    """``||M_T(k_t) - v_t||^2``, under the memory after the last token: what has been kept of it."""
    alpha: Tensor
    """Where it is one a channel, their mean."""
    eta: Tensor
    theta: Tensor
    """As the gate gives it; the write budget of a chunk, where there is one, may leave less of it."""
    weight_norm: Tensor
    """Frobenius norm of the weights of all layers after the token; known where a chunk ends and after the
    last token, else NaN."""
    momentum_norm: Tensor
    coefficient: Tensor
    """c_t, by which the token's gradient g_t stands in the weights after the last token (eqs. 13, 14):
    ``M_T = beta M_0 + m S_0 - sum_t c_t g_t``, or with M_0 whole where forgetting leads to it. NaN for a rule
    with an update of its own, and where alpha is one a channel."""
    own: Nearest
    """Keys near each token's query in ``y_t = M_t(q_t)``, its own among them."""
    context: Nearest | None
    """MAC alone: keys near the query of eq. 21, which reads the memory of the segments before."""


class Watched:
    """What the memories of a model were seen to do, in order."""

    def __init__(self, memories: dict[str, NeuralMemory]):
        self._watches = {name: _Watch(memory) for name, memory in memories.items()}

    def traces(self, nearest: int = 5) -> list[MemoryTrace]:
        """A trace of each memory that has read something; ``nearest`` is N."""
        return [watch.trace(name, nearest) for name, watch in self._watches.items() if watch.pieces]


@contextmanager
def watch(model: nn.Module) -> Iterator[Watched]:
    """``with watch(model) as seen: model(tokens)``, then ``seen.traces()``. Costs two passes more.

    The sequence may come in any number of calls. Raises ValueError, from the model's call, where a batch has
    more than one row.
    """
    memories = {name: m for name, m in model.named_modules() if isinstance(m, NeuralMemory)}
    seen = Watched(memories)
    for name, memory in memories.items():
        memory.watcher = seen._watches[name]
    try:
        yield seen
    finally:
        for memory in memories.values():
            memory.watcher = None


class _Piece(NamedTuple):
    """The tokens of a call that are of one chunk; [T, H] and, of q, k and v, [T, H, E]."""

    q: Tensor
    k: Tensor
    v: Tensor
    alpha: Tensor
    eta: Tensor
    theta: Tensor
    surprise: Tensor
    written: Tensor
    weight_norm: Tensor
    momentum_norm: Tensor
    step: Tensor
    """theta as the write budget leaves it."""


class _Watch:
    """Watches one memory."""

    def __init__(self, memory: NeuralMemory):
        self.memory, self.tokens = memory, 0
        self.pieces: list[_Piece] = []
        self.reads: list[tuple[int, Tensor]] = []
        """Tokens written so far, and q [T, H, E] of a read without a write."""
        self.border: tuple[Tensor, int] | None = None
        """Weights last read without a write, and the tokens they hold."""
        self.after: MemoryState | None = None

    @torch.no_grad()
    def wrote(self, q: Tensor, writes: Writes, state: DecodeState | OpenChunk) -> None:
        if q.shape[0] != 1:
            raise ValueError(f"watch: one sequence at a time, not {q.shape[0]}")
        size, first = self.memory.config.chunk_size, -state.position % self.memory.config.chunk_size
        sizes = [min(first, q.shape[1])] if first else []
        rest = q.shape[1] - sum(sizes)
        sizes += [min(size, rest - start) for start in range(0, rest, size)]
        for part in zip(*(x.split(sizes, 1) for x in (q, *writes)), strict=True):
            piece, state = self._piece(part[0], Writes(*part[1:]), state)
            self.pieces.append(piece)
        self.after = state.memory()
        self.tokens += q.shape[1]

    def read(self, q: Tensor, weights: tuple[Tensor, ...]) -> None:
        # the weights of a segment's start stay the same until it ends, however many calls that takes
        if self.border is None or self.border[0].data_ptr() != weights[0].data_ptr():
            self.border = weights[0], self.tokens
        self.reads.append((self.border[1], q[0].detach()))

    def _piece(
        self, q: Tensor, writes: Writes, state: DecodeState | OpenChunk
    ) -> tuple[_Piece, DecodeState | OpenChunk]:
        k, step = writes.k, self.memory.steps(writes, state)
        first = self.memory.predict(k[:, :1], state.memory().weights)
        following, _ = self.memory.extend(torch.roll(k, -1, 1), writes, state)
        after_each, state = self.memory.extend(k, writes, state)
        before = torch.cat([first, following[:, :-1]], 1)
        after = state.memory()
        norms = [_at_end(part, k.shape[1]) for part in (self.memory.whole(after.weights), after.momentum)]
        errors = [_error(y, writes.v)[0] for y in (before, after_each)]
        return _Piece(q[0], *(x[0] for x in writes), *errors, *norms, step=step[0]), state

    @torch.no_grad()
    def trace(self, name: str, nearest: int) -> MemoryTrace:
        """All pieces as one."""
        assert self.after is not None
        seen = _Piece(*(torch.cat(parts) for parts in zip(*self.pieces, strict=True)))
        prediction = self.memory.predict(seen.k[None], self.after.weights)
        one_alpha = seen.alpha.ndim == seen.theta.ndim
        alpha = seen.alpha if one_alpha else seen.alpha.mean(-1)
        mixed = _Mixed(seen, nearest, one_alpha and type(self.memory.rule).update is Rule.update)
        mixed.run(self.reads)
        found = MemoryTrace(
            name, seen.surprise, seen.written, _error(prediction[0], seen.v),
            alpha, seen.eta, seen.theta, seen.weight_norm, seen.momentum_norm,
            mixed.coefficient, mixed.own, mixed.context,
        )  # fmt: skip
        return tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, found)


class _Mixed:
    """Goes through the tokens with the coefficients by which their gradients stand in the weights."""

    def __init__(self, seen: _Piece, nearest: int, known: bool):
        self.seen, self.nearest, self.known = seen, nearest, known
        self.k = seen.k.transpose(0, 1).to(seen.theta.dtype)  # [H, T, E]
        self.c = seen.theta.new_zeros(self.k.shape[:2])
        self.n = torch.zeros_like(self.c)
        self.own: Nearest
        self.context: Nearest | None = None

    @property
    def coefficient(self) -> Tensor:
        """Of each token after the last, [T, H]."""
        return self.c.T if self.known else torch.full_like(self.c.T, float("nan"))

    def run(self, reads: Sequence[tuple[int, Tensor]]) -> None:
        """Every token's own read, and ``reads`` after as many tokens as were written before each."""
        own: list[Nearest] = []
        due, context = list(reads), []  # in the order of what was written before them
        for t in range(self.k.shape[1] + 1):
            while due and due[0][0] == t:
                context.append(self._nearest(*due.pop(0)))
            if t < self.k.shape[1]:
                self._write(t)
                own.append(self._nearest(t + 1, self.seen.q[t : t + 1]))
        self.own = _joined(own)
        self.context = _joined(context) if context else None

    def _write(self, t: int) -> None:
        """What momentum and forgetting make of all gradients so far, token t's among them (eqs. 13, 14)."""
        alpha, eta, step = (gate[t] for gate in (self.seen.alpha, self.seen.eta, self.seen.step))
        alpha = alpha if alpha.ndim == eta.ndim else torch.zeros_like(eta)  # then nothing here is known
        self.n *= eta[:, None]
        self.n[:, t] = step
        self.c = (1 - alpha[:, None]) * self.c + self.n

    def _nearest(self, written: int, q_THE: Tensor) -> Nearest:
        """The nearest of the first ``written`` keys."""
        q = q_THE.transpose(0, 1).to(self.k.dtype)
        keys, short = self.k[:, :written], max(0, self.nearest - written)
        cosine = F.normalize(q, dim=-1) @ F.normalize(keys, dim=-1).mT  # [H, T, written]
        taken = self.c[:, None, :written] * (q @ keys.mT)
        share = taken / taken.abs().sum(-1, keepdim=True).clamp(min=1e-30)
        similarity, position = cosine.topk(min(self.nearest, written), -1)
        share = share.gather(-1, position) if self.known else torch.full_like(similarity, float("nan"))
        padded = [F.pad(x, (0, short), value=fill) for x, fill in
                  ((position, -1), (similarity, float("nan")), (share, float("nan")))]  # fmt: skip
        return Nearest(*(x.transpose(0, 1) for x in padded))


def _error(prediction: Tensor, v: Tensor) -> Tensor:
    """``||M(k) - v||^2`` in the precision of the gates and the state."""
    return (prediction - v).square().sum(-1)


def _at_end(layers: Sequence[Tensor], tokens: int) -> Tensor:
    """The norm of a state [1, H, D, F] over its layers, in the last of ``tokens`` rows; NaN above."""
    norm = torch.stack([W.square().sum((-1, -2)) for W in layers]).sum(0).sqrt()
    return torch.cat([norm.new_full((tokens - 1, norm.shape[1]), float("nan")), norm])


def _joined(parts: Sequence[Nearest]) -> Nearest:
    return Nearest(*(torch.cat(pieces) for pieces in zip(*parts, strict=True)))
