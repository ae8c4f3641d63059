"""Argument and result types shared by all forms of the operator; shapes as in `op.neural_memory`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from titans_kernels.memory.residual import Residual
from titans_kernels.memory.rules import PAPER, Rule

Layers = tuple[Tensor, ...]
"""Weights or momentum per layer, [N, H, D_in, D_out], with N rows of the batch or packed documents."""

Result = tuple[Tensor, Layers, Layers]
"""y [B, T, H, D], weights and momentum after the last token."""

_AS_ON_GPU = False


class Extension(NamedTuple):
    """Parts of a memory beyond the paper's equations; the default has none."""

    residual: Residual | None = None
    """``M(x) = x + f(x)``, or ``x + LN(f(x))``."""
    base: tuple[Tensor, ...] | None = None
    """Per layer B [H, D_in, D_out], shared by the batch: the weights decay towards B instead of zero,
    ``W_t = B + (1 - alpha_t) (W_{t-1} - B) + S_t``. Weights of calls and states are then the offsets W - B,
    so that a memory which starts at its base has zero weights."""
    rule: Rule | str = PAPER
    """The update rule, a `Rule` or a name known to `find_rule`."""
    gates: Tensor | None = None
    """The rule's own gates in [0, 1], [B, T, H, E] with E = `Rule.extra_gates`."""
    is_delta_rule: bool = False
    """True if eta, and for the rule "paper" alpha, are 0 for every token: forms of the delta rule serve."""


class Inputs(NamedTuple):
    """The per-token inputs of a call."""

    q: Tensor  # [B, T, H, D]
    k: Tensor
    v: Tensor
    alpha: Tensor  # this and the next two: [B, T, H], or [B, T, H, A] per group of columns
    eta: Tensor
    theta: Tensor
    extra: Tensor
    """[B, T, H, E], E being `Rule.extra_gates`; forms of the paper's rule ignore it"""

    @staticmethod
    def of(
        q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, eta: Tensor, theta: Tensor,
        extra: Tensor | None = None,
    ) -> Inputs:  # fmt: skip
        """Collect the inputs; ``extra`` None stands for no gates of the rule's own."""
        extra = theta.new_empty(*eta.shape[:3], 0) if extra is None else extra
        return Inputs(q, k, v, alpha, eta, theta, extra)

    @property
    def state_dtype(self) -> torch.dtype:
        """Dtype of weights and momentum: float64 for float64 input, otherwise float32."""
        return state_dtype(self.q)

    @property
    def by_column(self) -> bool:
        """True if alpha, eta or theta is per group of columns instead of per head."""
        return any(gate.ndim == self.q.ndim for gate in self[3:6])

    def to_state_dtype(self) -> Inputs:
        """Cast all inputs to the dtype of the state."""
        return Inputs(*(x.to(self.state_dtype) for x in self))


class MemoryState(NamedTuple):
    """Weights and momentum of each layer, [B, H, D_in, D_out], in float32 (float64 for float64 input)."""

    weights: Layers
    momentum: Layers

    def detach(self) -> MemoryState:
        """Return the same state, detached from the autograd graph."""
        return MemoryState(*(tuple(x.detach() for x in part) for part in self))


class Options(NamedTuple):
    """The options of a call, the same for all tokens."""

    chunk_size: int
    activation: str
    surprise_bound: float | None
    cu_seqlens: Tensor | None
    rule: Rule = PAPER
    residual: Residual | None = None
    base: Layers = ()
    """base of the decay, [H, D_in, D_out] per layer; empty for zero"""
    operands: torch.dtype | None = None
    """dtype of q, k and v in the kernels: autocast's dtype if autocast is enabled"""
    shared_start: tuple[Layers, Layers] | None = None
    """weights and momentum [1, H, D_in, D_out] if all documents start from the same state"""
    arch: int | None = None
    """architecture to select a form for, such as 90 for an H100; None: the tensors' device"""
    is_delta_rule: bool = False
    """as in `Extension`"""

    @property
    def final(self) -> bool:
        """True if the state after the last token is returned; see `op.neural_memory`."""
        return self.cu_seqlens is None or self.shared_start is None

    @property
    def norm(self) -> tuple[Tensor, ...]:
        """Weight and bias of the residual's LN; empty without LN."""
        return self.residual.norm if self.residual is not None else ()

    def refusal(
        self, inputs: Inputs, rules: tuple[type[Rule], ...] = (Rule,), *, norm: bool = True,
        columns: bool = True,
    ) -> str | None:  # fmt: skip
        """Return the reason for which a form for ``rules`` refuses a call, with or without LN and column
        gates.
        """
        if type(self.rule) not in rules:
            return f"it does not support the rule {self.rule}"
        if self.norm and not norm:
            return "it does not support LN inside the memory"
        if inputs.by_column and not columns:
            return "it does not support gates per column"
        return None


def whole(distances: Layers, base: Layers) -> Layers:
    """Full weights from their offsets from the base; unchanged without a base."""
    return tuple(B + V for V, B in zip(distances, base, strict=True)) if base else distances


def distances(weights: Layers, base: Layers) -> Layers:
    """Offsets of the weights from the base: the inverse of `whole`."""
    return tuple(W - B for W, B in zip(weights, base, strict=True)) if base else weights


def state_dtype(x: Tensor) -> torch.dtype:
    """Dtype of the state for tokens x: float64 for float64, otherwise float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Let forms be chosen as on a GPU, to trace a model on fake tensors without one."""
    global _AS_ON_GPU
    before, _AS_ON_GPU = _AS_ON_GPU, True
    try:
        yield
    finally:
        _AS_ON_GPU = before


def on_gpu(x: Tensor) -> bool:
    """Return True for a tensor on a GPU, and for any tensor within `as_on_gpu`."""
    return x.is_cuda or _AS_ON_GPU


def operand_dtype(x: Tensor) -> torch.dtype:
    """Dtype of the operands of matrix products with x: autocast's dtype if autocast is enabled."""
    kind = x.device.type
    if x.dtype == torch.float64 or x.is_meta:  # autocast does not apply
        return x.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def broadcast_gate(gate: Tensor, width: int, by_column: bool) -> Tensor:
    """Shape a gate [...], or [..., A] per group of columns, to broadcast over weights [..., D, width]."""
    gate = gate if by_column else gate[..., None]
    groups = gate.shape[-1]
    return (gate if groups in (1, width) else gate.repeat_interleave(width // groups, -1))[..., None, :]


def without_autocast(x: Tensor) -> AbstractContextManager:
    """Return a context manager that disables autocast on x's device; a no-op for meta tensors."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
