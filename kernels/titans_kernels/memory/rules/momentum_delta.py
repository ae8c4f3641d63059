"""Momentum token by token with a write gate: Momentum DeltaNet."""

from __future__ import annotations

import math
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
    max_theta = 1. The published lower bound of mu is left out. Its correction of queries by keys is
    `query_correction` of titans_core's `MemoryConfig`, for any rule.

    The publication keeps ``b <= 1 - a``, and is unstable without that. ``angle`` ties both to the step as it
    does, by ``w = arctan(2 theta_t angle)``:

        a = cos^2(w) (1 - alpha_t),    b = sin^2(w) b_t

    where the published e^f in place of ``angle`` is trained, one per head; it starts in [0, 4]. ``tied`` has
    ``b = alpha_t b_t``: a memory that barely forgets (`MemoryConfig.alpha_bias`) then barely writes.
    """

    extra_gates: ClassVar[int] = 1

    tied: bool = False
    angle: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.angle < math.inf:
            raise ValueError(f"angle: {self.angle} must be finite, and 0 or more")
        if self.tied and self.angle:
            raise ValueError(
                f"tied: {self.tied} and angle {self.angle} both limit the write gate; leave out one"
            )

    @property
    def one_theta(self) -> bool:
        """Whether decay, one per head, depends on it."""
        return self.angle > 0

    @property
    def decays_without_alpha(self) -> bool:
        return self.angle > 0

    def gates(self, alpha: Tensor, eta: Tensor, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.angle:
            tangent = (2 * self.angle * theta).square()
            alpha = 1 - (1 - alpha) / (1 + (tangent[..., None] if alpha.ndim > theta.ndim else tangent))
        return alpha, eta, theta

    def write_gate(self, alpha: Tensor, theta: Tensor, b: Tensor) -> Tensor:
        """The factor of the momentum in the weights, from alpha and theta of `gates`."""
        if self.angle:
            tangent = (2 * self.angle * theta).square()
            return b * tangent / (1 + tangent)
        return alpha * b if self.tied else b

    def update(
        self, weights: Tensor, momentum: Tensor, gradient: Tensor, alpha: Tensor, eta: Tensor, theta: Tensor,
        *extra: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        momentum = eta * momentum - theta * gradient
        return (1 - alpha) * weights + self.write_gate(alpha, theta, *extra) * momentum, momentum
