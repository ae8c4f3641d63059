"""Shared by tests of the memory's forms: run a call in several forms, compare results and gradients."""

from collections.abc import Iterable
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from titans_kernels import (
    DecodeState,
    MemoryState,
    OutputActivation,
    Residual,
    decode_step,
    extend_memory,
    native,
    neural_memory,
)

needs_compiler = pytest.mark.skipif(native.library(torch.float64) is None, reason="no C++ compiler")
NATIVE = pytest.param("native", marks=needs_compiler)


class Call:
    """The inputs of a call; a subclass draws them."""

    tokens: list[Tensor]
    """q, k, v, alpha, eta, theta, and for a rule with gates of its own these."""
    state: MemoryState
    residual: Residual | None = None
    base: tuple[Tensor, ...] | None = None

    @property
    def leaves(self) -> list[Tensor]:
        """All that has a gradient."""
        norm = self.residual.norm if self.residual else ()
        return [*self.tokens, *self.state.weights, *self.state.momentum, *norm, *(self.base or ())]

    def whole(self, **options) -> list[Tensor]:
        """y and the state after the last token."""
        *tokens, extra = with_extra(self.tokens)
        around = {"extra": extra, "residual": self.residual, "base": self.base}
        y, after = neural_memory(*tokens, *self.state, **(around | options))
        return [y, *after.weights, *after.momentum]

    def pieces(self, sizes: list[int], form=extend_memory, **options) -> list[Tensor]:
        """The results of `whole`, by calls on pieces of the sequence."""
        state, outputs = DecodeState.of(self.state), []
        for part in zip(*(x.split(sizes, 1) for x in self.tokens), strict=True):
            *tokens, extra = with_extra(part)
            around = {"extra": extra, "residual": self.residual, "base": self.base} | options
            y, state = form(*tokens, state, **around)
            outputs.append(y)
        after = state.memory()
        return [torch.cat(outputs, 1), *after.weights, *after.momentum]

    def check(self, *backends: str, cuts: Iterable[list[int]] = (), decoded: bool = False, **options) -> None:
        """These forms, a sequence cut into pieces and one read token by token: each is the recurrence."""
        expected = self.whole(backend="reference", **options)
        for backend in backends:
            assert_same(expected, self.whole(backend=backend, **options), self.leaves)
        for sizes in cuts:
            assert_same(expected, self.pieces(sizes, **options), self.leaves)
        if decoded:
            ones = [1] * self.tokens[0].shape[1]
            assert_same(expected, self.pieces(ones, decode_step, **options), self.leaves)

    def apart(self, borders: list[int], **options) -> list[Tensor]:
        """The results of `whole` on packed documents, by a call for each that has tokens."""
        around, found = {"residual": self.residual, "base": self.base} | options, []
        for i, (start, end) in enumerate(pairwise(borders)):
            *tokens, extra = with_extra(x[:, start:end] for x in self.tokens)
            y, own = tokens[2], MemoryState(*(tuple(x[i : i + 1] for x in part) for part in self.state))
            if start < end:
                y, own = neural_memory(*tokens, *own, extra=extra, **around)
            found.append([y, *own.weights, *own.momentum])
        return [torch.cat(parts, 0 if n else 1) for n, parts in enumerate(zip(*found, strict=True))]


class Case(Call):
    """Random float64 inputs of two heads of width 4; gates are 0 and 1 at some tokens.

    ``groups`` is the A of an alpha by column, ``kind`` what is around the memory, ``base`` whether it decays
    towards random weights.
    """

    def __init__(
        self, T: int, depth: int = 2, *, kind: str = "none", groups: int | None = None, batch: int = 1,
        documents: int | None = None, widths: list[int] | None = None, base: bool = False,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(100 * T + depth)
        rand = lambda *s: torch.rand(*s, generator=generator, dtype=torch.float64)  # noqa: E731
        widths = widths or [4, *[8] * (depth - 1), 4]
        tokens = [F.normalize(rand(batch, T, 2, widths[0]) - 0.5, dim=-1) for _ in range(3)]
        alpha = 0.05 * rand(batch, T, 2, *([groups] if groups else []))
        eta, theta = 0.9 * rand(batch, T, 2), 0.05 * rand(batch, T, 2)
        alpha[rand(*alpha.shape) < 0.1], eta[rand(*eta.shape) < 0.1] = 0, 0
        alpha[0, T // 2, 0], eta[0, T // 3, 1] = 1, 1
        rows = documents or batch
        shapes = [(rows, 2, *pair) for pair in pairwise(widths)]
        self.tokens = [x.requires_grad_() for x in (*tokens, alpha, eta, theta)]
        self.state = MemoryState(
            tuple(((rand(*s) - 0.5) * 4 / s[-2] ** 0.5).requires_grad_() for s in shapes),
            tuple((0.1 * (rand(*s) - 0.5)).requires_grad_() for s in shapes),
        )
        norm = 1 + 0.2 * rand(2, widths[0]), rand(2, widths[0]) - 0.5
        kinds = {"none": None, "input": Residual(), "norm": Residual(*(x.requires_grad_() for x in norm))}
        self.residual = kinds[kind] if kind in kinds else OutputActivation(kind)
        if base:
            generator.manual_seed(T)
            randn = (torch.randn(s[1:], generator=generator, dtype=torch.float64) for s in shapes)
            self.base = tuple((x / x.shape[1] ** 0.5).requires_grad_() for x in randn)


def with_extra(tokens: Iterable[Tensor]) -> tuple[Tensor | None, ...]:
    """The tokens of a call and the rule's own gates or None."""
    given = tuple(tokens)
    return given if len(given) > 6 else (*given, None)


def assert_same(
    expected: list[Tensor],
    found: list[Tensor],
    leaves: list[Tensor],
    results: tuple[float, float] = (1e-10, 1e-11),
    gradients: tuple[float, float] = (1e-8, 1e-9),
) -> None:
    """Equal results, and equal gradients of all leaves from a random functional of them; relative and
    absolute tolerances.
    """
    assert all(torch.isfinite(x).all() and x.abs().max() < 100 for x in expected)
    torch.testing.assert_close(found, expected, rtol=results[0], atol=results[1])
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in expected]
    total = lambda outputs: sum((x * w).sum() for x, w in zip(outputs, weights, strict=True))  # noqa: E731
    grads = [torch.autograd.grad(total(outputs), leaves, retain_graph=True) for outputs in (expected, found)]
    torch.testing.assert_close(grads[1], grads[0], rtol=gradients[0], atol=gradients[1])
