"""E2-TTT: normalised targets, reads at the chunk's start, clipped sums and fixed row norms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from titans_kernels.memory.parts.norms import clip_matrix, with_row_norms_of
from titans_kernels.memory.residual import Output, predict
from titans_kernels.memory.rules.base import ChunkEnd, Rule


@dataclass(frozen=True)
class E2TTT(Rule):
    """The memory of E2-TTT (arXiv 2608.21308; `e2_ttt_mlp/chunk_momentum.py` of the authors' code).

        target = w * LN(v - k) + b                       with w, b of M(x) = x + w * LN(f(x)) + b
        y_t = q_t + w * LN(f(q_t)) + b                   at the weights W_0 of the chunk's start
        g_t = grad ||w * LN(f(k_t)) + b - target_t||^2   at W_0
        S_t = eta_t S_{t-1} - theta_t g_t,  W_t = (1 - alpha_t) W_{t-1} + S_t
        W_end = W_kept + clip(W_T - W_kept), its rows at their length in W_0
        S_end = S_kept + clip(S_T - S_kept)

    "Kept" is what decay and momentum leave of the chunk's start; ``clip`` bounds the Frobenius norm of each
    head and matrix. A row is all inputs of one output. The published loss has a factor 1/2, so its rate is
    twice our theta. Without LN the target is v. Published with `residual: norm`, `expansion: 4`,
    `activation: gelu`, `chunk_size: 512` and gates of other ranges: theta = 0.005 sigmoid / 512, alpha at
    most 0.001, eta = sigmoid^(1/16); set `max_theta`, `max_alpha` and `eta_bias`. A chunk that is not full
    is not ended, and no token reads it, as in the authors' training.
    """

    reads: ClassVar[Literal["token", "chunk"]] = "chunk"
    clip: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.clip < math.inf:
            raise ValueError(f"clip: {self.clip} must be above 0 and finite")

    def target(self, k: Tensor, v: Tensor, residual: Output | None) -> Tensor:
        return v if residual is None else predict(residual, k, v - k)  # M(k) if f(k) were v - k

    def end_chunk(self, end: ChunkEnd) -> tuple[Tensor, Tensor]:
        W = end.kept + clip_matrix(end.weights - end.kept, self.clip)
        S = end.kept_momentum + clip_matrix(end.momentum - end.kept_momentum, self.clip)
        return with_row_norms_of(W, end.start), S
