"""The Omega rule of ATLAS, which writes each token together with the ones before it, and Atlas itself."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from titans_kernels.memory.parts.norms import newton_schulz
from titans_kernels.memory.rules.base import Rule


@dataclass(frozen=True)
class Omega(Rule):
    """The Omega rule of ATLAS (arXiv 2505.23735, eqs. 9, 10 and 16): OmegaNet, and with momentum.

        G_t = sum of gamma_{t,i} grad ||M(k_i) - v_i||^2 over i = t-c+1 .. t
        S_t = eta_t S_{t-1} - theta_t G_t,    M_t = (1 - alpha_t) M_{t-1} + S_t

    OmegaNet is `momentum: false`. All gradients of G_t are taken at the start of t's chunk, also those of the
    c - 1 tokens before it, whose keys and values are part of the state. Only tokens of the same document
    count. The text does not say how gamma is made: here it is a gate of the token t for each i before it, and
    1 for i = t. ``c = 1`` is the paper's rule.

    Left out: LN of the weights at a chunk's end. `Atlas` adds Muon; polynomial features of keys and queries
    are `feature_degree` of titans_core's `MemoryConfig`.
    """

    c: float = 4

    def __post_init__(self) -> None:
        if self.c < 1 or self.c != int(self.c):
            raise ValueError(f"c: {self.c} is not a whole number of tokens, at least 1")

    @property
    def window(self) -> int:
        return int(self.c) - 1

    @property
    def extra_gates(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.window


@dataclass(frozen=True)
class Atlas(Omega):
    """ATLAS: the Omega rule with Muon's update (eqs. 32 and 33, with the signs of its appendix D.4).

        S_t = eta_t S_{t-1} - G_t,    M_t = (1 - alpha_t) M_{t-1} + theta_t NS5(S_t)

    theta is the size of the step, not of the gradient: NS5 (`parts.norms.newton_schulz`) brings the singular
    values of each step near theta. The momenta of a chunk do not depend on its weights (eq. 39), so NS5 takes
    those of all its tokens at once (eq. 40), and a scan gives the weights (eq. 41), which are formed for
    every token. ATLAS's own ablation has the lower perplexity without Muon, which is `Omega`.
    """

    def step(self, momentum: Tensor, theta: Tensor) -> Tensor:
        return theta * newton_schulz(momentum)
