"""Momentum token by token with a write gate: Momentum DeltaNet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from titans_kernels.memory.rules import GatedDelta


@dataclass(frozen=True)
class MomentumDelta(GatedDelta):
    """Momentum DeltaNet (MDN, arXiv 2605.05838): the momentum of gradients at the decayed state, and a gate.

        S_t = eta_t S_{t-1} - theta_t grad(a M_{t-1}; k_t, v_t),    M_t = a M_{t-1} + b_t S_t,
        a = 1 - alpha_t,    b_t the write gate in [0, 1]

    For a linear memory with chunks of one token this is the published recurrence with ``mu = eta``,
    ``beta = b``, ``Mom = -S`` and the step 2 theta.

    Differences: sigmoid gates are the published ones with learned scales of 1, and its step in [0, 2] is
    max_theta = 1. The published lower bound of mu, the correction of queries by keys and the angle that
    ties both gates to the step are left out; without the last it may diverge unless ``tied``, which has
    ``b = alpha_t b_t``.
    """

    extra_gates: ClassVar[int] = 1

    tied: float = 0.0

    def update(
        self, weights: Tensor, momentum: Tensor, gradient: Tensor, alpha: Tensor, eta: Tensor, theta: Tensor,
        *extra: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        momentum = eta * momentum - theta * gradient
        write = alpha * extra[0] if self.tied else extra[0]
        return (1 - alpha) * weights + write * momentum, momentum
