"""Momentum token by token with a write gate: Momentum DeltaNet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from titans_kernels.memory.rules.gated_delta import GatedDelta


@dataclass(frozen=True)
class MomentumDelta(GatedDelta):
    """Momentum DeltaNet (MDN, arXiv 2605.05838): the momentum of gradients at the decayed state, and a gate.

        S_t = eta_t S_{t-1} - theta_t grad(a M_{t-1}; k_t, v_t),    M_t = a M_{t-1} + b_t S_t,
        a = 1 - alpha_t,    b_t the write gate in [0, 1]

    For a linear memory this is the published recurrence with ``mu = eta``, ``beta = b``, ``Mom = -S`` and the
    step 2 theta; "online" computes it exactly in parallel with chunks of one token.

    Differences: sigmoid gates are the published ones with learned scales of 1, and its step in [0, 2] is
    max_theta = 1. The published lower bound of mu, the angle that ties a, b and the step, and the correction
    of queries by keys are left out.

    With ``tied`` the factor is ``alpha_t b_t``, at most 1 - a as in the publication, unstable without that.
    A memory that barely forgets (`MemoryConfig.alpha_bias`) then barely writes.
    """

    extra_gates: ClassVar[int] = 1

    tied: bool = False

    def write_gate(self, alpha: Tensor, b: Tensor) -> Tensor:
        """The factor of the momentum in the weights."""
        return alpha * b if self.tied else b

    def update(
        self, weights: Tensor, momentum: Tensor, gradient: Tensor, alpha: Tensor, eta: Tensor, theta: Tensor,
        *extra: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        momentum = eta * momentum - theta * gradient
        return (1 - alpha) * weights + self.write_gate(alpha, *extra) * momentum, momentum
