"""Inspect memories token by token over one text: surprise, gates, state norms, retrieved and retained writes.

`titans_core.telemetry` has means for training.

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

from titans_core.memory import MemoryCache, NeuralMemory, Writes
from titans_kernels import AnyState, Rule


class Nearest(NamedTuple):
    """The N written keys most similar to each token's query, [T, H, N], in descending order."""

    position: Tensor
    """Position of the token that wrote the key, int64; -1 where fewer than N were written."""
    similarity: Tensor
    """Cosine similarity of query and key."""
    share: Tensor
    """``c_i (q . k_i)`` over the sum of its absolute values over all written i, c as in `MemoryTrace`.

    For a linear memory this is the exact fraction of the read, without M_0's part, that is due to write i;
    for a deep one, of the output of its first layer. NaN where `MemoryTrace.coefficient` is.
    """

    def shifted(self, first: int) -> Nearest:
        """Return positions in the whole text of a run that starts at its token ``first``."""
        return self._replace(position=torch.where(self.position < 0, self.position, self.position + first))


class MemoryTrace(NamedTuple):
    """One memory over T tokens, on the CPU in the precision of its state; [T, H] unless stated otherwise.

    Persistent tokens belong to the initial state and have no entry.
    """

    name: str
    """Name of the module in its model, such as ``blocks.0.memory``."""
    surprise: Tensor
    """``||M_{t-1}(k_t) - v_t||^2``, before the token is written."""
    written: Tensor
    """``||M_t(k_t) - v_t||^2``, right after. With momentum, a write continues over later tokens."""
    final: Tensor
    """``||M_T(k_t) - v_t||^2``, with the memory after the last token, or the last one before it began anew:
    retention."""
    alpha: Tensor
    """A gate per channel is traced by its mean over channels."""
    eta: Tensor
    theta: Tensor
    """Output of the gate, before a write budget reduces it."""
    weight_norm: Tensor
    """Frobenius norm of the weights of all layers, at chunk ends and after the last token; NaN elsewhere."""
    momentum_norm: Tensor
    coefficient: Tensor
    """c_t, the coefficient of the token's gradient g_t in the final weights (eqs. 13, 14):
    ``M_T = beta M_0 + m S_0 - sum_t c_t g_t``, with beta = 1 if forgetting decays to M_0. NaN for rules with
    their own update and for gates per channel."""
    own: Nearest
    """Keys nearest to each token's query in ``y_t = M_t(q_t)``, including its own; of a rule that reads the
    chunk's start (`Rule.reads`), the keys before the chunk."""
    context: Nearest | None
    """MAC only: keys nearest to the query of eq. 21, which reads the memory of earlier segments."""
    restarts: Tensor
    """Tokens before which the memory began anew, int64: at the start of a shard, or of a row that was reset.
    What it held before is in no later entry."""


class Watched:
    """Collected traces of the memories of a model."""

    def __init__(self, memories: dict[str, NeuralMemory]):
        self._watches = {name: _Watch(memory) for name, memory in memories.items()}

    def traces(self, nearest: int = 5) -> list[MemoryTrace]:
        """Return a trace of each memory that was used; ``nearest`` is N."""
        return [watch.trace(name, nearest) for name, watch in self._watches.items() if watch.runs]


@contextmanager
def watch(model: nn.Module) -> Iterator[Watched]:
    """``with watch(model) as watched: model(tokens)``, then ``watched.traces()``. Costs two more passes.

    The sequence may be split over several calls. The model's call raises ValueError for more than one
    row.
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


class _Span(NamedTuple):
    """The tokens of a call within one chunk; q, k and v [T, H, E], the others [T, H]."""

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
    """theta after the write budget."""


class _Run:
    """The writes and reads of one memory from a start on, up to where it begins anew."""

    def __init__(self, first: int):
        self.first, self.tokens = first, 0
        self.pieces: list[_Span] = []
        self.chunk_starts: list[int] = []
        """Of each token, the number of tokens that were written before its chunk."""
        self.reads: list[tuple[int, Tensor]] = []
        """Of each read without a write: the number of tokens written before it, and q [T, H, E]."""
        self.border: tuple[Tensor, int] | None = None
        """The weights last read without a write, and the number of tokens they hold."""
        self.traced: AnyState | None = None
        self.after: AnyState | None = None
        """The state after the last token, here, and in the model."""

    def continues(self, state: AnyState) -> bool:
        """Return True if a state is the one that the model's last write left."""
        after = self.after
        assert after is not None
        return after.position == state.position and all(map(torch.equal, after.weights, state.weights))

    def take(self, reads: list[tuple[Tensor, Tensor]]) -> None:
        """Take reads of weights, which are the same object until a segment ends, over any number of calls."""
        for weights, q in reads:
            if self.border is None or self.border[0].data_ptr() != weights.data_ptr():
                self.border = weights, self.tokens
            self.reads.append((self.border[1], q))
        reads.clear()


class _Watch:
    """Watches one memory."""

    def __init__(self, memory: NeuralMemory):
        self.memory = memory
        self.runs: list[_Run] = []
        self.due: list[tuple[Tensor, Tensor]] = []
        """Reads since the last write, which may be reads of a memory that begins anew."""

    @torch.no_grad()
    def on_write(self, q: Tensor, writes: Writes, cache: MemoryCache, after: MemoryCache) -> None:
        if q.shape[0] != 1:
            raise ValueError(f"watch: a batch of {q.shape[0]} sequences; watch one at a time")
        if not self.runs or not self.runs[-1].continues(cache.memory):
            self.runs.append(_Run(sum(run.tokens for run in self.runs)))
        run, size = self.runs[-1], self.memory.config.chunk_size
        run.take(self.due)
        first = -cache.memory.position % size
        sizes = [min(first, q.shape[1])] if first else []
        rest = q.shape[1] - sum(sizes)
        sizes += [min(size, rest - start) for start in range(0, rest, size)]
        for part in zip(*(x.split(sizes, 1) for x in (q, *writes)), strict=True):
            run.chunk_starts += [run.tokens - cache.memory.position] * part[0].shape[1]
            piece, cache = self._piece(part[0], Writes(*part[1:]), cache)
            run.pieces.append(piece)
            run.tokens += part[0].shape[1]
        run.traced, run.after = cache.memory, after.memory

    def on_read(self, q: Tensor, weights: tuple[Tensor, ...]) -> None:
        self.due.append((weights[0], q[0].detach()))

    def _piece(self, q: Tensor, writes: Writes, cache: MemoryCache) -> tuple[_Span, MemoryCache]:
        k, (step, _) = writes.k, self.memory.steps(writes, cache)
        if self.memory.rule.reads == "token":
            first = self._recalled(k[:, :1], cache)
            following, _ = self.memory.extend(torch.roll(k, -1, 1), writes, cache)
            after_each, cache = self.memory.extend(k, writes, cache)
            before = torch.cat([first, following[:, :-1]], 1)
        else:  # a read would be of the chunk's start
            both = []
            for t in range(k.shape[1]):
                now, earlier = Writes(*(x[:, t : t + 1] for x in writes)), cache
                _, cache = self.memory.extend(now.k, now, cache)
                both.append([self._recalled(now.k, c) for c in (earlier, cache)])
            before, after_each = (torch.cat(parts, 1) for parts in zip(*both, strict=True))
        after = cache.memory.memory()
        norms = [
            _norm_at_end(part, k.shape[1])
            for part in (self.memory.absolute_weights(after.weights), after.momentum)
        ]
        errors = [_squared_error(y, writes.v)[0] for y in (before, after_each)]
        return _Span(q[0], *(x[0] for x in writes[:5]), *errors, *norms, step=step[0]), cache

    def _recalled(self, k: Tensor, cache: MemoryCache) -> Tensor:
        """Return M(k) with the memory after the last token."""
        return self.memory.predict(k, cache.memory.memory().weights)

    def trace(self, name: str, nearest: int) -> MemoryTrace:
        """Concatenate the traces of a memory from each of its starts on."""
        self.runs[-1].take(self.due)
        parts = [self._trace(name, run, nearest) for run in self.runs]
        joined = tree_map(lambda *xs: torch.cat(xs).cpu() if isinstance(xs[0], Tensor) else xs[0], *parts)
        return joined._replace(restarts=torch.tensor([run.first for run in self.runs[1:]], dtype=torch.long))

    @torch.no_grad()
    def _trace(self, name: str, run: _Run, nearest: int) -> MemoryTrace:
        """Return the trace of one run, derived from all of its tokens."""
        assert run.traced is not None
        seen = _Span(*(torch.cat(parts) for parts in zip(*run.pieces, strict=True)))
        prediction = self.memory.predict(seen.k[None], run.traced.memory().weights)
        gates = [gate if gate.ndim == 2 else gate.mean(-1) for gate in (seen.alpha, seen.eta, seen.theta)]
        rule, by_head = self.memory.rule, seen.alpha.ndim == seen.eta.ndim == seen.theta.ndim == 2
        known = by_head and type(rule).update is Rule.update and not rule.has_own_chunk
        mixed = _GradientCoefficients(seen, nearest, known)
        mixed.run(run.reads, run.chunk_starts if rule.reads == "chunk" else None)
        own, context = mixed.own.shifted(run.first), mixed.context and mixed.context.shifted(run.first)
        alpha, eta, theta = gates
        return MemoryTrace(
            name, seen.surprise, seen.written, _squared_error(prediction[0], seen.v),
            alpha, eta, theta, seen.weight_norm, seen.momentum_norm, mixed.coefficient, own, context,
            seen.q.new_empty(0),
        )  # fmt: skip


class _GradientCoefficients:
    """Tracks each token's coefficient in the weights, and finds the keys nearest to every read."""

    def __init__(self, seen: _Span, nearest: int, known: bool):
        self.seen, self.nearest, self.known = seen, nearest, known
        self.k = seen.k.transpose(0, 1).to(seen.theta.dtype)  # [H, T, E]
        self.c = seen.theta.new_zeros(self.k.shape[:2])
        self.n = torch.zeros_like(self.c)
        self.own: Nearest
        self.context: Nearest | None = None

    @property
    def coefficient(self) -> Tensor:
        """c of each token after the last one, [T, H]."""
        return self.c.T if self.known else torch.full_like(self.c.T, float("nan"))

    def run(self, reads: Sequence[tuple[int, Tensor]], chunk_starts: Sequence[int] | None) -> None:
        """Replay the writes in order, with every token's own read and ``reads`` in their places.

        With ``chunk_starts`` a token reads the memory before its chunk, else the one that it has written.
        """
        own: list[Nearest] = []
        due, context = list(reads), []  # sorted by the number of tokens written before
        for t in range(self.k.shape[1] + 1):
            while due and due[0][0] == t:
                context.append(self._nearest(*due.pop(0)))
            if chunk_starts and (tokens := chunk_starts.count(t)):
                own.append(self._nearest(t, self.seen.q[t : t + tokens]))
            if t < self.k.shape[1]:
                self._write(t)
                if chunk_starts is None:
                    own.append(self._nearest(t + 1, self.seen.q[t : t + 1]))
        self.own = _concatenate(own)
        self.context = _concatenate(context) if context else None

    def _write(self, t: int) -> None:
        """Update the coefficients of all tokens so far by token t's gates (eqs. 13, 14)."""
        alpha, eta, step = (gate[t] for gate in (self.seen.alpha, self.seen.eta, self.seen.step))
        if not self.known:  # results are then NaN
            return
        self.n *= eta[:, None]
        self.n[:, t] = step
        self.c = (1 - alpha[:, None]) * self.c + self.n

    def _nearest(self, written: int, q_THE: Tensor) -> Nearest:
        """Find the nearest among the first ``written`` keys."""
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


def _squared_error(prediction: Tensor, v: Tensor) -> Tensor:
    """``||M(k) - v||^2``."""
    return (prediction - v).square().sum(-1)


def _norm_at_end(layers: Sequence[Tensor], tokens: int) -> Tensor:
    """Return the norm of a state [1, H, D, F] over its layers, as the last of ``tokens`` rows; NaN before."""
    norm = torch.stack([W.square().sum((-1, -2)) for W in layers]).sum(0).sqrt()
    return torch.cat([norm.new_full((tokens - 1, norm.shape[1]), float("nan")), norm])


def _concatenate(parts: Sequence[Nearest]) -> Nearest:
    return Nearest(*(torch.cat(pieces) for pieces in zip(*parts, strict=True)))
