"""A rule of the memory: inner loss, gradient point, update, end of a chunk, read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from titans_kernels.memory.parts.vjp import flows, vjp
from titans_kernels.memory.residual import Output


class ChunkEnd(NamedTuple):
    """A layer after the last token of a full chunk, as `Rule.end_chunk` gets it. [B, H, D, F] if not said.

    ``kept`` is what decay and momentum leave of the chunk's start, so the chunk's own gradients have moved
    the weights by ``weights - kept`` and the momentum by ``momentum - kept_momentum``.
    """

    weights: Tensor
    momentum: Tensor
    start: Tensor  # weights before the chunk
    start_momentum: Tensor
    kept: Tensor
    kept_momentum: Tensor
    decay: Tensor  # product of 1 - alpha over the chunk, [B, H, 1, 1 or F]
    eta: Tensor  # of the chunk's tokens, [B, H, b]


@dataclass(frozen=True)
class Rule:
    """The paper's rule (eqs. 12-14, 16).

    The dataclass fields of a subclass are its parameters. Its methods must be differentiable functions of
    torch, since the gradient of the outer loss flows through them.
    """

    reads: ClassVar[Literal["token", "chunk"]] = "token"
    """Whether a token reads the weights after its own write (eq. 15), or those at the start of its chunk."""
    extra_gates: ClassVar[int] = 0
    """Number of gates beside alpha, eta and theta, each in [0, 1] per token and head. They follow the other
    arguments of `loss`, as [...], and of `update`, as [B, H, 1, 1]."""
    extra_bias: ClassVar[float] = 0.0
    """Their initial bias before the sigmoid."""
    layerwise: ClassVar[bool] = False
    """Whether each layer has an inner loss of its own, as in `DeltaTTT`."""

    @property
    def decays_without_alpha(self) -> bool:
        """Whether `gates` make a decay of other gates than alpha."""
        return False

    def loss(self, prediction: Tensor, v: Tensor, *extra: Tensor) -> Tensor:
        """Inner loss ``||M(k) - v||^2`` per token (eq. 12): two [..., D] to [...]."""
        return (prediction - v).square().sum(-1)

    def target(self, k: Tensor, v: Tensor, residual: Output | None) -> Tensor:
        """What M(k) is to predict, in place of v; [B, H, T, D]."""
        return v

    def start(self, weights: Tensor) -> Tensor:
        """The weights of a layer that a memory starts from, given the learned M_0 [B, H, D, F]."""
        return weights

    def gates(self, alpha: Tensor, eta: Tensor, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gates that `update` gets, of any shape."""
        return alpha, eta, theta

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

        ``S' = eta S - theta gradient`` (eq. 14) and ``W' = (1 - alpha) W + S'`` (eq. 13); with a `step` of
        the rule's own, ``S' = eta S - gradient`` and ``W' = (1 - alpha) W + step(S', theta)``. A rule may
        keep any state of the weights' shape as its momentum.
        """
        rate = theta if type(self).step is Rule.step else 1
        momentum = eta * momentum - rate * gradient
        return (1 - alpha) * weights + self.step(momentum, theta), momentum

    def step(self, momentum: Tensor, theta: Tensor) -> Tensor:
        """What a token adds to a layer's weights: its momentum after the token.

        The momentum of a rule with a step of its own does not depend on theta, so that those of a chunk are
        known together, and its steps too.

        Args:
            momentum: [B, H, D, F], or of all tokens of a chunk [B, H, b, D, F].
            theta: [B, H, 1, 1], or [B, H, b, 1, 1].
        """
        return momentum

    def end_chunk(self, end: ChunkEnd) -> tuple[Tensor, Tensor]:
        """Weights and momentum of a layer after a full chunk; the last token already reads them.

        A chunk that is not full, such as the last one of a text, is not ended.
        """
        return end.weights, end.momentum

    def error(self, prediction: Tensor, v: Tensor, *extra: Tensor) -> Tensor:
        """Gradient of the inner loss with respect to the prediction, [..., D]; derived from `loss`."""
        if type(self).loss is Rule.loss:
            return 2 * (prediction - v)
        fixed = (v, *extra)
        loss, pullback = vjp(self.loss, prediction, create_graph=flows(prediction, *fixed), fixed=fixed)
        return pullback(torch.ones_like(loss))[0]

    def parts(self, length: int) -> tuple[int, ...]:
        """Lengths of the parts of a chunk, each with its gradients at its own start and its own end.

        More than one part needs a `linear` rule without a `window`.
        """
        return (length,)

    @property
    def window(self) -> int:
        """Number of earlier tokens whose gradients are written with a token's, weighted by ``extra``."""
        return 0

    @property
    def one_theta(self) -> bool:
        """Whether all matrices must have the same theta."""
        return self.window > 0 or self.layerwise

    @property
    def linear(self) -> bool:
        """Whether a chunk is linear in its tokens' gradients, with the coefficients of `parts.gates`."""
        return type(self).step is Rule.step and self._gradients_at_start

    @property
    def stepped(self) -> bool:
        """Whether a chunk has momenta linear in its tokens' gradients, and a `step` of each."""
        return type(self).step is not Rule.step and self._gradients_at_start and not self.ends_chunks

    @property
    def _gradients_at_start(self) -> bool:
        own = type(self)
        return own.update is Rule.update and own.gradient_point is Rule.gradient_point

    @property
    def ends_chunks(self) -> bool:
        """Whether `end_chunk` does anything."""
        return type(self).end_chunk is not Rule.end_chunk


PAPER = Rule()
