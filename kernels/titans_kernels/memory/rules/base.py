"""A rule of the memory: the inner loss, the weights at which its gradient is taken, and the update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from titans_kernels.memory.parts.vjp import flows, vjp


@dataclass(frozen=True)
class Rule:
    """The paper's rule (eqs. 12-14, 16).

    The dataclass fields of a subclass are its parameters. Its methods must be differentiable functions of
    torch, since the gradient of the outer loss flows through them.
    """

    extra_gates: ClassVar[int] = 0
    """Number of gates beside alpha, eta and theta, each in [0, 1] per token and head. They follow the other
    arguments of `loss`, as [...], and of `update`, as [B, H, 1, 1]."""
    extra_bias: ClassVar[float] = 0.0
    """Their initial bias before the sigmoid."""

    def loss(self, prediction: Tensor, v: Tensor, *extra: Tensor) -> Tensor:
        """Inner loss ``||M(k) - v||^2`` per token (eq. 12): two [..., D] to [...]."""
        return (prediction - v).square().sum(-1)

    def gradient_point(self, weights: Tensor, decay: Tensor) -> Tensor:
        """The weights of a layer at which a token's gradient is taken.

        The paper uses the weights at the start of the chunk, unchanged (eq. 16).

        Args:
            weights: weights at the start of the token's chunk.
            decay: product of 1 - alpha over the chunk's tokens up to and including this one, broadcastable to
                ``weights``.
        """
        return weights

    def update(
        self, weights: Tensor, momentum: Tensor, gradient: Tensor, alpha: Tensor, eta: Tensor, theta: Tensor,
        *extra: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Weights and momentum [B, H, D, F] of a layer after a token; its gates are [B, H, 1, 1].

        ``S' = eta S - theta gradient`` (eq. 14) and ``W' = (1 - alpha) W + S'`` (eq. 13). A rule may keep any
        state of the weights' shape as its momentum.
        """
        momentum = eta * momentum - theta * gradient
        return (1 - alpha) * weights + momentum, momentum

    def error(self, prediction: Tensor, v: Tensor, *extra: Tensor) -> Tensor:
        """Gradient of the inner loss with respect to the prediction, [..., D]; derived from `loss`."""
        fixed = (v, *extra)
        loss, pullback = vjp(self.loss, prediction, create_graph=flows(prediction, *fixed), fixed=fixed)
        return pullback(torch.ones_like(loss))[0]


PAPER = Rule()
