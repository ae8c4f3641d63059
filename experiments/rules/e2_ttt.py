"""E2-TTT: normalised targets, reads at the chunk's start, clipped sums and fixed row norms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from experiments.rules.matrices import clip_matrix, with_row_norms_of
from titans_kernels import MemoryState, Rule
from titans_kernels.memory.forms.generic import write_chunk
from titans_kernels.memory.options import Inputs, Options, distances, whole
from titans_kernels.memory.residual import predict


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

    def chunk(self, tokens: Inputs, state: MemoryState, options: Options) -> tuple[Tensor, MemoryState]:
        if options.residual is not None:  # M(k) if f(k) were v - k
            tokens = tokens._replace(v=predict(options.residual, tokens.k, tokens.v - tokens.k))
        y, after = write_chunk(self, tokens, state, options)
        if tokens.q.shape[2] < options.chunk_size:
            return y, after
        _, kept = write_chunk(self, tokens._replace(theta=torch.zeros_like(tokens.theta)), state, options)
        moved = lambda a, b: tuple(x + clip_matrix(w - x, self.clip) for w, x in zip(a, b, strict=True))  # noqa: E731
        W = whole(moved(after.weights, kept.weights), options.base)
        start = whole(state.weights, options.base)
        W = tuple(with_row_norms_of(w, s) for w, s in zip(W, start, strict=True))
        return y, MemoryState(distances(W, options.base), moved(after.momentum, kept.momentum))
