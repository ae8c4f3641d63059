"""LaCT: large chunks, an inner product as the loss, orthogonalised steps and fixed row norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from titans_kernels.memory.parts.norms import newton_schulz, with_row_norms_of
from titans_kernels.memory.rules.base import ChunkEnd, Rule


@dataclass(frozen=True)
class LaCT(Rule):
    """Large-chunk test-time training (LaCT, arXiv 2505.23884; `lact_llm/lact_model/ttt_operation.py`).

        y_t = M(q_t)  at the weights W_0 of the chunk's start
        dW  = -sum_t theta_t grad (-<M(k_t), v_t>)  at W_0
        dW += mean_t(eta_t) dW of the chunk before
        W   = W_0 + NS5(dW), its rows at their length in W_0

    The momentum slot holds dW before `parts.norms.newton_schulz` (Muon; ``muon: 0`` leaves it out). Nothing
    decays: alpha has no effect, only the row norm bounds the weights. A row is all inputs of one output. A
    chunk that is not full is not ended. Published with `chunk_size: 2048`, `activation: swiglu` and
    `theta_per: matrix`.
    """

    reads: ClassVar[Literal["token", "chunk"]] = "chunk"
    muon: float = 1.0

    def loss(self, prediction: Tensor, v: Tensor, *extra: Tensor) -> Tensor:
        return -(prediction * v).sum(-1)

    def error(self, prediction: Tensor, v: Tensor, *extra: Tensor) -> Tensor:
        return -v

    def gates(self, alpha: Tensor, eta: Tensor, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return 0 * alpha, 0 * eta, theta  # inside a chunk a plain sum

    def end_chunk(self, end: ChunkEnd) -> tuple[Tensor, Tensor]:
        step = end.weights - end.start + end.eta.mean(-1)[..., None, None] * end.start_momentum
        moved = end.start + (newton_schulz(step) if self.muon else step)
        return with_row_norms_of(moved, end.start), step
