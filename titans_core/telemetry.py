"""A look at the inner memory while it works: its surprise, its gates, the size of its state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from titans_core.memory import NeuralMemory


class Telemetry:
    """What the memories of a model saw during a recorded forward pass."""

    def __init__(self) -> None:
        self.records: list[dict[str, Tensor]] = []

    def summary(self) -> dict[str, float]:
        """Mean over layers and calls of each quantity; empty where there is no memory.

        surprise: ||M_{t-1}(k_t) - v_t||^2 before the write; alpha_mean, eta_mean, theta_mean: the gates;
        weight_norm, momentum_norm: Frobenius norm of a sequence's state after the last token.
        """
        if not self.records:
            return {}
        return {key: torch.stack([r[key] for r in self.records]).mean().item() for key in self.records[0]}


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
