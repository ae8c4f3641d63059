"""LaCT: large chunks, an inner product as the loss, orthogonalised steps and fixed row norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from experiments.rules.matrices import EndedRule, newton_schulz, with_row_norms_of
from titans_kernels import MemoryState
from titans_kernels.memory.options import Inputs


@dataclass(frozen=True)
class LaCT(EndedRule):
    """Large-chunk test-time training (LaCT, arXiv 2505.23884; `lact_llm/lact_model/ttt_operation.py`).

        y_t = M(q_t)  at the weights W_0 of the chunk's start
        dW  = -sum_t theta_t grad (-<M(k_t), v_t>)  at W_0
        dW += mean_t(eta_t) dW of the chunk before
        W   = W_0 + NS5(dW), its rows at their length in W_0

    The momentum slot holds dW before `matrices.newton_schulz` (Muon; ``muon = 0`` leaves it out). Nothing
    decays: alpha has no effect, only the row norm bounds the weights. A row is all inputs of one output.
    Published with chunks of 2,048 tokens, SwiGLU between two layers and a theta for each matrix, which the
    operator had at 6d21fe7.
    """

    reads: ClassVar[Literal["token", "chunk"]] = "chunk"
    muon: float = 1.0

    def loss(self, prediction: Tensor, v: Tensor, *extra: Tensor) -> Tensor:
        return -(prediction * v).sum(-1)

    def error(self, prediction: Tensor, v: Tensor, *extra: Tensor) -> Tensor:
        return -v

    def inside(self, tokens: Inputs) -> Inputs:
        """Drop decay and momentum, for a plain sum."""
        zero = torch.zeros_like
        return tokens._replace(alpha=zero(tokens.alpha), eta=zero(tokens.eta))

    def end(self, start: MemoryState, after: MemoryState, tokens: Inputs) -> MemoryState:
        eta, weights, steps = tokens.eta.mean(-1)[..., None, None], [], []
        for W0, S, W in zip(*start, after.weights, strict=True):
            step = W - W0 + eta * S
            moved = W0 + (newton_schulz(step) if self.muon else step)
            weights.append(with_row_norms_of(moved, W0))
            steps.append(step)
        return MemoryState(tuple(weights), tuple(steps))
