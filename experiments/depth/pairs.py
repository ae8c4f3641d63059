"""Keys and values for `experiments.depth.fit`: fixed pairs that a memory stores, without a model around it.

Shapes: N problems, P pairs, D width of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from titans_core.memory import NeuralMemory, Writes
from titans_platform.errors import UsageError
from titans_platform.objectives import build_objective
from titans_platform.runs.load import load_run


class Pairs(NamedTuple):
    """N independent problems, float32. Keys have norm 1, values a mean square norm of 1."""

    k: Tensor
    """[N, P, D]"""
    v: Tensor
    held_out: Pairs | None = None
    """Other pairs of the same map, which are never written; None: keys and values are unrelated."""

    def take(self, problems: slice) -> Pairs:
        """Return some of the problems."""
        return Pairs(self.k[problems], self.v[problems], self.held_out and self.held_out.take(problems))


Normal = Callable[..., Tensor]
"""Standard normal numbers of a shape, from a generator with the problem's seed."""
Map = Callable[[int], tuple[Tensor, Tensor]]
"""P to keys and values [N, P, D] of one map per problem, drawn anew at each call."""


def random(normal: Normal, N: int, D: int) -> Map:
    """Independent keys and values: nothing to generalise, capacity alone."""
    return lambda P: (normal(N, P, D), normal(N, P, D))


def clustered(normal: Normal, N: int, D: int, clusters: int = 16) -> Map:
    """Keys around 16 centres; a pair's value is its cluster's plus a third (in sd) of its own."""
    centre, value = F.normalize(normal(N, clusters, D), dim=-1), normal(N, clusters, D)

    def draw(P: int) -> tuple[Tensor, Tensor]:
        cluster = torch.arange(P) % clusters
        return centre[:, cluster] + 0.5 * D**-0.5 * normal(N, P, D), value[:, cluster] + normal(N, P, D) / 3

    return draw


def low_rank(normal: Normal, N: int, D: int, rank: int = 4) -> Map:
    """Keys in a subspace of 4 dimensions; the value is a network of them with one hidden layer of tanh."""
    basis, first, second = normal(N, rank, D), normal(N, rank, 2 * D), normal(N, 2 * D, D)

    def draw(P: int) -> tuple[Tensor, Tensor]:
        z = F.normalize(normal(N, P, rank), dim=-1)
        return z @ basis, torch.tanh(4 * z @ first) @ second

    return draw


def teacher(normal: Normal, N: int, D: int) -> Map:
    """Keys in all directions; the value is a network of them with D hidden units of tanh."""
    first, second = normal(N, D, D), normal(N, D, D)

    def draw(P: int) -> tuple[Tensor, Tensor]:
        k = F.normalize(normal(N, P, D), dim=-1)
        return k, torch.tanh(2 * k @ first) @ second

    return draw


KINDS: dict[str, Callable[[Normal, int, int], Map]] = {
    "random": random, "clustered": clustered, "low-rank": low_rank, "teacher": teacher,
}  # fmt: skip
"""Generated kinds; every map but random's has held-out pairs."""


def generate(kind: str, N: int, P: int, D: int, seed: int) -> Pairs:
    """N problems of a kind of `KINDS`, each with its own map; as many held-out pairs as stored ones."""
    generator = torch.Generator().manual_seed(seed)
    draw = KINDS[kind](lambda *shape: torch.randn(*shape, generator=generator), N, D)
    return _scaled(*draw(P), None if kind == "random" else draw(P))


def trained(run: str, N: int, P: int, root: Path, seed: int) -> Pairs:
    """Keys and values that the first memory of a trained run writes, one head of one training row a problem.

    The first P tokens of a row are stored, the next P are held out.

    Raises:
        UsageError: the run has no memory, its rows are too short, or it does not train on tokens.
    """
    model, _, cfg = load_run(run, root)
    memory = next((module for module in model.modules() if isinstance(module, NeuralMemory)), None)
    if memory is None or cfg.objective.kind != "next_token":
        raise UsageError(f"--run: {run} has no neural memory trained on next tokens")
    if cfg.data.sequence_length < 2 * P:
        raise UsageError(f"--run: {run} has rows of {cfg.data.sequence_length} tokens, fewer than {2 * P}")
    rows = -(-N // memory.heads)
    drawn = cfg.model_copy(
        update={"seed": seed, "optim": cfg.optim.model_copy(update={"global_batch_size": rows})}
    )
    tokens = build_objective(cfg).open(root).train_stream(drawn).batch(0).tokens
    seen: list[Writes] = []
    memory.watcher = _Writes(seen)
    try:
        with torch.no_grad():
            model(tokens[:, :-1])
    finally:
        memory.watcher = None
    k, v = (torch.cat(parts, 1) for parts in zip(*((w.k, w.v) for w in seen), strict=True))
    k, v = (x.float().transpose(1, 2).flatten(0, 1)[:N] for x in (k, v))
    return _scaled(k[:, :P], v[:, :P], (k[:, P : 2 * P], v[:, P : 2 * P]))


class _Writes:
    """A `Watcher` that keeps what is written."""

    def __init__(self, seen: list[Writes]):
        self.seen = seen

    def on_write(self, q: Tensor, writes: Writes, cache: object, after: object) -> None:
        self.seen.append(writes)

    def on_read(self, q: Tensor, weights: tuple[Tensor, ...]) -> None: ...


def _scaled(k: Tensor, v: Tensor, held_out: tuple[Tensor, Tensor] | None) -> Pairs:
    """Pairs of the size that `Pairs` states, held-out values on the scale of the stored ones."""
    scale = v.square().sum(-1, keepdim=True).mean(1, keepdim=True).sqrt()
    stored = Pairs(F.normalize(k, dim=-1), v / scale)
    if held_out is None:
        return stored
    return stored._replace(held_out=Pairs(F.normalize(held_out[0], dim=-1), held_out[1] / scale))
