"""Random tokens and weights for a shape, with the scale that a layer produces, never zeros."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from titans_kernels import neural_memory, write_budget
from titans_kernels.bench.shapes import BenchShape

NAMES = ("q", "k", "v", "alpha", "eta", "theta")


class BenchInputs(NamedTuple):
    """Arguments of `neural_memory`; every tensor is a leaf that requires a gradient."""

    shape: BenchShape
    tokens: tuple[Tensor, ...]
    """q, k, v in the requested dtype, alpha, eta, theta in float32."""
    weights: tuple[Tensor, ...]
    momentum: tuple[Tensor, ...]
    """Empty: none is given."""

    @property
    def leaves(self) -> list[Tensor]:
        """All tensors of a call, in the order of `names`."""
        return [*self.tokens, *self.weights, *self.momentum]

    @property
    def names(self) -> list[str]:
        """Names of the leaves."""
        numbered = lambda kind, layers: [f"{kind}[{l}]" for l in range(len(layers))]  # noqa: E731
        return [*NAMES, *numbered("weights", self.weights), *numbered("momentum", self.momentum)]

    def double(self) -> BenchInputs:
        """Return the same numbers in float64."""
        parts = (self.tokens, self.weights, self.momentum)
        return BenchInputs(
            self.shape, *(tuple(x.detach().double().requires_grad_() for x in p) for p in parts)
        )

    def call(self, backend: str) -> list[Tensor]:
        """y, weights and momentum after the last token."""
        q, k, v, alpha, eta, theta = self.tokens
        if self.shape.budget:
            theta = write_budget(k, eta, theta, self.shape.chunk_size, budget=self.shape.budget)
        y, state = neural_memory(
            q, k, v, alpha, eta, theta, self.weights, self.momentum or None, backend=backend,
            chunk_size=self.shape.chunk_size, surprise_bound=self.shape.bound,
        )  # fmt: skip
        return [y, *state.weights, *state.momentum]


def make(
    shape: BenchShape, dtype: torch.dtype, device: torch.device, *, seed: int, whole: bool = False
) -> BenchInputs:
    """Fresh inputs; a ``whole`` state has a batch and a momentum, and some gates stand at their ends."""
    generator = torch.Generator(device).manual_seed(seed)
    rand = lambda *size: torch.rand(*size, generator=generator, device=device)  # noqa: E731
    randn = lambda *size: torch.randn(*size, generator=generator, device=device)  # noqa: E731
    tokens = shape.batch, shape.length, shape.heads
    q, k, v = (F.normalize(randn(*tokens, shape.head_dim), dim=-1).to(dtype) for _ in range(3))
    # forgetting e^2 over all tokens: with more, random tokens leave a deep memory as good as 0
    gates = (min(0.05, 4 / shape.length), 0.9, 0.1 / shape.depth)
    alpha, eta, theta = (most * rand(*tokens) for most in gates)
    if whole:
        # in every chunk somewhere a momentum ends, in every second head at one token the memory
        eta[rand(*tokens) < 1 / shape.chunk_size] = 0
        forgetful = alpha[:, :, ::2]
        at = shape.length * rand(*forgetful[:, :1].shape)
        forgetful.scatter_(1, at.long(), 1.0)
    rows = (shape.batch, shape.heads) if whole else (shape.heads,)
    weights = tuple(randn(*rows, *pair) / pair[0] ** 0.5 for pair in shape.pairs)
    momentum = tuple(randn(*rows, *pair) / 20 for pair in shape.pairs) if whole else ()
    parts = (q, k, v, alpha, eta, theta), weights, momentum
    return BenchInputs(shape, *(tuple(x.requires_grad_() for x in part) for part in parts))
