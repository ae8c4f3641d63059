"""Inner losses that outliers move less than the squared error: MIRAS's Huber and Yaad."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from titans_kernels.memory.rules.base import Rule


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

    def loss(self, prediction: Tensor, v: Tensor, *extra: Tensor) -> Tensor:
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

    def loss(self, prediction: Tensor, v: Tensor, *extra: Tensor) -> Tensor:
        e = prediction - v
        near = e.square().sum(-1) <= self.delta**2
        return torch.where(near, e.square().sum(-1), 2 * self.delta * e.abs().sum(-1))
