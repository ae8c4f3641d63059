"""A look at the inner memory while it works: its surprise, its gates, the size of its state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from titans_core.memory import NeuralMemory, Record


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
