"""The rule of the memory: its inner loss, where a gradient is taken, and what a token's gradient becomes.

`Rule` is the paper's rule; a subclass replaces any of its three parts and is served by the reference, by the
generic chunked form (`autograd`) and by `decode_step`. The hand-written forms take the paper's rule alone.
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

    The fields of a subclass are its parameters. Its parts are plain differentiable functions of torch, since
    the gradient of the outer loss goes through them.
    """

    def loss(self, prediction: Tensor, v: Tensor) -> Tensor:
        """Inner loss of each token, [..., D] and [..., D] to [...]: ``||M(k) - v||^2`` (12)."""
        return (prediction - v).square().sum(-1)

    def gradient_point(self, weights: Tensor, decay: Tensor) -> Tensor:
        """The weights of a layer at which the gradient of a token is taken.

        ``weights`` are those its chunk starts from; ``decay`` is the product of 1 - alpha over the tokens of
        the chunk up to and with this one, of a shape that multiplies ``weights``. The paper takes the
        gradient at the weights as they are (16).
        """
        return weights

    def update(
        self, weights: Tensor, momentum: Tensor, gradient: Tensor, alpha: Tensor, eta: Tensor, theta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Weights and momentum [B, H, D, F] of a layer after a token, whose gates are [B, H, 1, 1].

        ``S' = eta S - theta gradient`` (14) and ``W' = (1 - alpha) W + S'`` (13). The momentum is whatever
        a rule keeps beside the weights, of their shape.
        """
        momentum = eta * momentum - theta * gradient
        return (1 - alpha) * weights + momentum, momentum

    def error(self, prediction: Tensor, v: Tensor) -> Tensor:
        """Gradient of the inner loss with respect to the prediction, [..., D]. Follows from `loss`."""
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

    In chunks, the paper's gradients leave out of M_{t-1} what the chunk has written (16), which is what
    makes them parallel. Forgetting depends on no gradient, so it stays: token t of a chunk that starts from
    M_{t'} meets the decayed state ``(1 - alpha_{t'+1}) ... (1 - alpha_t) M_{t'}``. For chunks of one token
    this is the recurrence above, exactly.
    """

    def gradient_point(self, weights: Tensor, decay: Tensor) -> Tensor:
        return decay * weights


@dataclass(frozen=True)
class Huber(Rule):
    """Huber inner loss, coordinate by coordinate (MIRAS, arXiv 2504.13173, Section 5.1).

    With ``e = M(k) - v`` the loss is the sum over coordinates of ``e^2`` where ``|e| <= delta`` and of
    ``2 delta |e| - delta^2`` beyond: an outlier pulls with a constant force. This is twice MIRAS's H, whose
    square has a half that eq. 12 has not, so that a large delta gives the paper's rule. MIRAS also makes
    delta a function of the token; here it is one number.
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
    """The update that MIRAS publishes as Yaad, a Huber loss switched by the norm of the error.

    The gradient is that of ``||e||_2^2`` where ``||e||_2 <= delta`` and that of ``2 delta ||e||_1`` beyond;
    again twice MIRAS's. Unlike Huber's it is not continuous at the threshold. Yaad has no momentum
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
"""The rules with a short name; ``RULES["mine"] = MyRule`` adds one to this process."""


def find_rule(name: str, **parameters: float) -> Rule:
    """The rule of a name in `RULES`, or at an import path ``package.module:Class``, with its parameters.

    Raises:
        ValueError: there is no such rule, or it does not take these parameters; one line.
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
