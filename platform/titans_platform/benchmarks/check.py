"""Is the operator right? Asked before it is timed: a fast wrong one is worth nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from titans_platform.errors import TitansError

TOLERANCE = 1e-9


def operator_error(chunk_size: int, length: int) -> float:
    """Largest relative error of the parallel form's outputs and gradients, in float64."""
    from titans_kernels import neural_memory

    generator = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    q, k, v = (torch.nn.functional.normalize(randn(1, length, 2, 4), dim=-1) for _ in range(3))
    alpha, eta, theta = (scale * randn(1, length, 2).sigmoid() for scale in (0.05, 0.9, 0.1))
    weights = tuple((randn(2, *pair) / 2).requires_grad_() for pair in ((4, 8), (8, 4)))
    inputs = [x.requires_grad_() for x in (q, k, v, alpha, eta, theta)]
    seed = randn(1, length, 2, 4)

    def results(backend: str) -> list[Tensor]:
        y, state = neural_memory(
            q, k, v, alpha, eta, theta, weights,
            chunk_size=chunk_size, surprise_bound=0.5, backend=backend,
        )  # fmt: skip
        gradients = torch.autograd.grad((y * seed).sum(), [*inputs, *weights])
        return [y, *state.weights, *state.momentum, *gradients]

    pairs = zip(results("reference"), results("auto"), strict=True)
    return max(((a - b).norm() / a.norm()).item() for a, b in pairs)


def require_right(chunk_size: int) -> float:
    """The error; TitansError where it is too large."""
    error = operator_error(chunk_size, 2 * chunk_size + 3)
    if not error < TOLERANCE:
        raise TitansError(
            f"the operator is {error:.1e} off its reference (allowed: {TOLERANCE:.0e}), so it is not timed"
        )
    return error
