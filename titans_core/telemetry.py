"""Telemetry of the memories of a model: means of surprise, gates and state norms over a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from titans_core.memory import MemoryCache, NeuralMemory, Writes
from titans_core.state import ModelState
from titans_kernels import MemoryState


class Telemetry:
    """Statistics that `record` collected from the memories of a model."""

    def __init__(self) -> None:
        self.records: list[dict[str, tuple[Tensor, int]]] = []
        """Of each call and memory: the sum of each quantity, and the count to divide it by."""

    @torch.no_grad()
    def on_update(
        self, memory: NeuralMemory, read: Callable[[Tensor], Tensor], writes: Writes, after: MemoryState,
        cu_seqlens: Tensor | None,
    ) -> None:  # fmt: skip
        """Record one call. Reading with the next token's key gives M_{t-1}(k_t), before its write; a rule
        that reads the chunk's start is read with the token's own key.
        """
        ahead = memory.rule.reads == "token"
        errors = (read(writes.k.roll(-ahead, 1)) - writes.v.roll(-ahead, 1)).square().sum(-1)
        errors = errors[:, :-1] if ahead else errors
        if ahead and cu_seqlens is not None:  # the token before a document's first belongs to another memory
            inside = torch.ones(writes.k.shape[1], dtype=torch.bool, device=errors.device)
            inside[cu_seqlens[:-1].long()] = False
            errors = errors[:, inside[1:]]
        tokens = writes.eta[..., 0].numel()
        means = {f"{gate}_mean": getattr(writes, gate).mean() for gate in ("alpha", "eta", "theta")}
        states = {"weight_norm": memory.absolute_weights(after.weights), "momentum_norm": after.momentum}
        for name, layers in states.items():
            means[name] = torch.stack([W.square().sum((-1, -2, -3)) for W in layers]).sum(0).sqrt().mean()
        record = {name: (mean * tokens, tokens) for name, mean in means.items()}
        self.records.append({"surprise": (errors.sum(), errors.numel()), **record})

    def summary(self) -> dict[str, float]:
        """Mean over layers and tokens of each quantity; empty for a model without memories.

        surprise: ||M_{t-1}(k_t) - v_t||^2 before the write, of all tokens but a document's first; of a rule
        that reads the chunk's start (`Rule.reads`), of every token with M at the start of its chunk;
        alpha_mean, eta_mean, theta_mean: the gates; weight_norm, momentum_norm: Frobenius norm of a
        sequence's state after the last token. Persistent tokens and padding do not count.
        """
        if not self.records:
            return {}
        return {key: self._mean(key) for key in self.records[0]}

    def _mean(self, key: str) -> float:
        sums, counts = zip(*(record[key] for record in self.records), strict=True)
        return torch.stack(sums).sum().item() / max(1, sum(counts))


OUT_OF_RANGE_FACTOR = 10.0
"""Multiple of a healthy memory's values above which a value is out of range."""


def healthy_limits(model: nn.Module) -> dict[str, float]:
    """Upper limits of ``weight_norm`` and ``surprise`` of `Telemetry.summary`, far above a healthy memory's.

    Weights grow to a few times M_0 at most. A memory that predicts zero has a surprise of 1 for values of
    norm 1, so a larger one has overshot; values that are not normalised have no limit.
    """
    memories = [m for m in model.modules() if isinstance(m, NeuralMemory)]
    if not memories:
        return {}
    with torch.no_grad():
        norms = [sum(W.square().sum() for W in m.start_weights) ** 0.5 for m in memories]
    limits = {"weight_norm": OUT_OF_RANGE_FACTOR * float(sum(norms)) / len(norms)}
    return limits | ({"surprise": OUT_OF_RANGE_FACTOR} if all(m.config.value_norm for m in memories) else {})


@torch.no_grad()
def weight_norm(model: nn.Module, state: ModelState) -> dict[str, float]:
    """``weight_norm`` of the memories in a state, as in `Telemetry.summary`; empty without memories."""
    memories = [m for m in model.modules() if isinstance(m, NeuralMemory)]
    is_cache = lambda part: isinstance(part, MemoryCache)  # noqa: E731
    caches = [part for part in tree_leaves(state.blocks, is_leaf=is_cache) if isinstance(part, MemoryCache)]
    norms = []
    for memory, cache in zip(memories, caches, strict=True):
        weights = memory.absolute_weights(cache.memory.memory().weights)
        norms.append(sum(W.square().sum((-1, -2, -3)) for W in weights) ** 0.5)
    return {"weight_norm": float(torch.stack(norms).mean())} if norms else {}


def out_of_range(seen: dict[str, float], limits: dict[str, float]) -> str | None:
    """Name the quantities of a summary above their limits in one line; None if there are none."""
    over = [
        f"{name.replace('_', ' ')} {seen[name]:.3g} is above {limit:.3g}"
        for name, limit in limits.items()
        if not seen.get(name, 0.0) <= limit
    ]
    if not over:
        return None
    return (
        f"memory out of range: {', '.join(over)}; it has probably overshot: set model.memory.write_budget, "
        "and lower model.memory.surprise_bound or max_theta"
    )


@contextmanager
def record(model: nn.Module) -> Iterator[Telemetry]:
    """``with record(model) as telemetry: model(tokens)``, then ``telemetry.summary()``.

    Costs one more pass of the memories. Compiled blocks run eagerly meanwhile.
    """
    seen = Telemetry()
    memories = [m for m in model.modules() if isinstance(m, NeuralMemory)]
    # a compiled block that recomputes may not append to a list, and MAC's has spare tokens
    compiled = [(m, m._compiled_call_impl) for m in model.modules() if m._compiled_call_impl is not None]
    for block, _ in compiled:
        block._compiled_call_impl = None
    for memory in memories:
        memory.recorder = seen
    try:
        yield seen
    finally:
        for block, call in compiled:
            block._compiled_call_impl = call
        for memory in memories:
            memory.recorder = None
