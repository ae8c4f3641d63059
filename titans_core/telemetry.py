"""A look at the inner memory while it works: its surprise, its gates, the size of its state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from titans_core.backbone import ModelState
from titans_core.memory import MemoryCache, NeuralMemory, Record


class Telemetry:
    """What the memories of a model saw during a recorded forward pass."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def summary(self) -> dict[str, float]:
        """Mean over layers and tokens of each quantity; empty where there is no memory.

        surprise: ||M_{t-1}(k_t) - v_t||^2 before the write, of all tokens but a document's first;
        alpha_mean, eta_mean, theta_mean: the gates; weight_norm, momentum_norm: Frobenius norm of a
        sequence's state after the last token. Persistent tokens and padding do not count.
        """
        if not self.records:
            return {}
        return {key: self._mean(key) for key in self.records[0]}

    def _mean(self, key: str) -> float:
        sums, counts = zip(*(record[key] for record in self.records), strict=True)
        return torch.stack(sums).sum().item() / max(1, sum(counts))


LARGE = 10.0
"""How many times what a healthy memory has is out of range."""


def healthy_limits(model: nn.Module) -> dict[str, float]:
    """The weight norm and the surprise, as `Telemetry.summary` has them, that no healthy memory comes near.

    Weights grow a few times larger than M_0 at most. A memory that predicts nothing has a surprise of 1 for
    values of norm 1, so a larger one has overshot; for values of any norm there is no limit.
    """
    memories = [m for m in model.modules() if isinstance(m, NeuralMemory)]
    if not memories:
        return {}
    with torch.no_grad():
        norms = [sum(W.square().sum() for W in m.initial_weights) ** 0.5 for m in memories]
    limits = {"weight_norm": LARGE * float(sum(norms)) / len(norms)}
    return limits | ({"surprise": LARGE} if all(m.config.value_norm for m in memories) else {})


@torch.no_grad()
def weight_norm(model: nn.Module, state: ModelState) -> dict[str, float]:
    """``weight_norm`` as `Telemetry.summary` has it, of the memories in a state; empty where it has none."""
    memories = [m for m in model.modules() if isinstance(m, NeuralMemory)]
    is_cache = lambda part: isinstance(part, MemoryCache)  # noqa: E731
    caches = [part for part in tree_leaves(state.blocks, is_leaf=is_cache) if isinstance(part, MemoryCache)]
    norms = []
    for memory, cache in zip(memories, caches, strict=True):
        weights = memory.whole(cache.memory.memory().weights)
        norms.append(sum(W.square().sum((-1, -2, -3)) for W in weights) ** 0.5)
    return {"weight_norm": float(torch.stack(norms).mean())} if norms else {}


def out_of_range(seen: dict[str, float], limits: dict[str, float]) -> str | None:
    """What of a summary is above its limit, in one line; None where nothing is."""
    over = [
        f"{name.replace('_', ' ')} {seen[name]:.3g} is above {limit:.3g}"
        for name, limit in limits.items()
        if not seen.get(name, 0.0) <= limit
    ]
    if not over:
        return None
    return (
        f"memory out of range: {', '.join(over)}; it has probably overshot: set model.memory.write_budget="
        "1, or lower model.memory.max_theta"
    )


@contextmanager
def record(model: nn.Module) -> Iterator[Telemetry]:
    """``with record(model) as seen: model(tokens)``, then ``seen.summary()``. Costs one forward more."""
    seen = Telemetry()
    memories = [m for m in model.modules() if isinstance(m, NeuralMemory)]
    for memory in memories:
        memory.recorder = seen.records
    try:
        yield seen
    finally:
        for memory in memories:
            memory.recorder = None
