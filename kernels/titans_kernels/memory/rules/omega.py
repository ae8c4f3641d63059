"""The Omega rule: each token is written together with the ones before it."""

from __future__ import annotations

from dataclasses import dataclass

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

    Left out: ATLAS's Muon (its own ablation has the lower perplexity without), polynomial features, and LN of
    the weights at a chunk's end.
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
