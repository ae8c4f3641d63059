"""A delta rule in each layer: DeltaTTT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from titans_kernels.memory.rules.base import Rule


@dataclass(frozen=True)
class DeltaTTT(Rule):
    """Each layer has an inner loss of its own, ``||x W - v||^2`` of its input x (DeltaTTT, arXiv 2610.08553).

    For two layers A and B, activation f and the rates r, one token is

        A += r1 k^T (v - k A)              (9)
        h = f(k A),  B += r2 h^T (v - h B) (11)
        y = f(q A) B                       (12)

    where h reads A before its write, or with ``post`` after it (10). Each layer is a linear memory, so
    "online" computes one after the other, exactly in parallel. It exists with chunk_size 1 alone, and each
    layer must be as wide as the value.

    The paper does not print how rates are made: here ``r1 = 2 theta_t`` in [0, 2 max_theta], and r2 is a gate
    in [0, 1] of its own. Decay, momentum and a surprise bound (then token by token) work as in other rules;
    the published rule has none of them. A write budget limits r1.
    """

    extra_gates: ClassVar[int] = 1
    layerwise: ClassVar[bool] = True

    post: bool = False

    @property
    def linear(self) -> bool:
        """False: the gradients are not those of one loss."""
        return False

    def later_theta(self, extra: Tensor) -> Tensor:
        """theta of all layers but the first, from the rule's own gates [..., 1]."""
        return extra[..., 0] / 2
