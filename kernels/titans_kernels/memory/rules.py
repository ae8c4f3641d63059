"""Update rules of the memory: the inner loss, the weights at which its gradient is taken, and the update.

`Rule` is the paper's rule. A subclass may override any of the three; it is supported by the reference, by the
generic chunked form (`autograd`) and by `decode_step`. The hand-written forms support only the paper's rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from titans_kernels.memory.parts.vjp import flows, vjp
from titans_kernels.registry import find_class


@dataclass(frozen=True)
class Rule:
    """The paper's rule (eqs. 12-14, 16).

    The dataclass fields of a subclass are its parameters. Its methods must be differentiable functions of
    torch, since the gradient of the outer loss flows through them.
    """

    def loss(self, prediction: Tensor, v: Tensor) -> Tensor:
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
        self, weights: Tensor, momentum: Tensor, gradient: Tensor, alpha: Tensor, eta: Tensor, theta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Weights and momentum [B, H, D, F] of a layer after a token; its gates are [B, H, 1, 1].

        ``S' = eta S - theta gradient`` (eq. 14) and ``W' = (1 - alpha) W + S'`` (eq. 13). A rule may keep any
        state of the weights' shape as its momentum.
        """
        momentum = eta * momentum - theta * gradient
        return (1 - alpha) * weights + momentum, momentum

    def error(self, prediction: Tensor, v: Tensor) -> Tensor:
        """Gradient of the inner loss with respect to the prediction, [..., D]; derived from `loss`."""
        loss, pullback = vjp(self.loss, prediction, create_graph=flows(prediction, v), fixed=(v,))
        return pullback(torch.ones_like(loss))[0]


@dataclass(frozen=True)
class GatedDelta(Rule):
    """The gradient at the decayed state, as in Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464, eq. 10).

    Token by token, ``M_t = (1 - alpha_t) M_{t-1} + S_t`` with the gradient in S_t taken at
    ``(1 - alpha_t) M_{t-1}``, the state after forgetting and before the write. A linear memory without
    momentum (row vectors, ``W = S^T``) has the gradient ``2 k (k^T W - v^T)``, so

        W_t = a W - theta 2 k (k^T a W - v^T) = a (I - 2 theta k k^T) W + 2 theta k v^T,   a = 1 - alpha_t,

    the published ``S_t = S_{t-1} (a (I - beta k k^T)) + beta v k^T`` with ``beta = 2 theta_t``.

    Within a chunk the paper's gradients ignore what the chunk has already written (16), which makes them
    parallel. Decay does not depend on gradients, so it is kept: token t of a chunk that starts from M_{t'}
    uses the decayed state ``(1 - alpha_{t'+1}) ... (1 - alpha_t) M_{t'}``. For chunks of one token this is
    exactly the recurrence above.
    """

    def gradient_point(self, weights: Tensor, decay: Tensor) -> Tensor:
        return decay * weights


@dataclass(frozen=True)
class Huber(Rule):
    """Huber inner loss, coordinate by coordinate (MIRAS, arXiv 2504.13173, Section 5.1).

    With ``e = M(k) - v`` the loss is the sum over coordinates of ``e^2`` where ``|e| <= delta`` and of
    ``2 delta |e| - delta^2`` beyond, so outliers have a gradient of constant size. This is twice MIRAS's H,
    which has a factor 1/2 that eq. 12 lacks, so that a large delta gives the paper's rule. MIRAS also makes
    delta depend on the token; here it is a constant.
    """

    delta: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.delta < math.inf:
            raise ValueError(f"delta: {self.delta} must be above 0 and finite")

    def loss(self, prediction: Tensor, v: Tensor) -> Tensor:
        e = prediction - v
        near = e.clamp(-self.delta, self.delta)
        return (near * (2 * e - near)).sum(-1)


@dataclass(frozen=True)
class Yaad(Huber):
    """The update that MIRAS calls Yaad: a Huber loss that switches on the norm of the error.

    The gradient is that of ``||e||_2^2`` where ``||e||_2 <= delta`` and that of ``2 delta ||e||_1`` beyond;
    again twice MIRAS's. Unlike Huber's it is discontinuous at the threshold. Yaad has no momentum
    (``MemoryConfig.momentum``).
    """

    def loss(self, prediction: Tensor, v: Tensor) -> Tensor:
        e = prediction - v
        near = e.square().sum(-1) <= self.delta**2
        return torch.where(near, e.square().sum(-1), 2 * self.delta * e.abs().sum(-1))


PAPER = Rule()

RULES: dict[str, type[Rule]] = {
    "paper": Rule,
    "gated_delta": GatedDelta,
    "huber": Huber,
    "yaad": Yaad,
}
"""Built-in rules by name; ``RULES["mine"] = MyRule`` registers another one in this process."""


def find_rule(name: str, **parameters: float) -> Rule:
    """Instantiate a rule.

    Args:
        name: a key of `RULES`, or an import path ``package.module:Class`` of a subclass of `Rule`.
        **parameters: fields of the rule.

    Raises:
        ValueError: there is no such rule, or a parameter is unknown or invalid; a one-line message.
    """
    kind = find_class("rule", name, RULES, Rule)
    for parameter in parameters:
        known = [field.name for field in fields(kind)]
        if parameter not in known:
            has = ", ".join(known) or "no parameters"
            raise ValueError(f"rule_options.{parameter}: the rule {name} has {has}")
    try:
        return kind(**parameters)
    except (TypeError, ValueError) as error:
        raise ValueError(f"rule_options.{error}") from None
