"""Shared by tests of the memory's forms: run a call in several forms, compare results and gradients."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from titans_kernels import DecodeState, Extension, MemoryState, Residual, Rule, extend_memory, neural_memory
from titans_kernels.native import library

needs_compiler = pytest.mark.skipif(library(torch.float64) is None, reason="no C++ compiler")
NATIVE = pytest.param("native", marks=needs_compiler)
PARALLEL = ["chunked"] if library(torch.float64) is None else ["chunked", "native"]
"""Fast forms of the paper's rule that a CPU has."""


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

    def extension(self, gates: Sequence[Tensor] = (), rule: Rule | str = "paper") -> Extension:
        """Parts beyond the paper's equations; ``gates`` are the rule's own, if it has any."""
        return Extension(self.residual, self.base, rule, *gates)

    def whole(self, *, rule: Rule | str = "paper", **options) -> list[Tensor]:
        """y and the state after the last token."""
        extension = self.extension(self.tokens[6:], rule)
        y, after = neural_memory(*self.tokens[:6], *self.state, extension=extension, **options)
        return [y, *after.weights, *after.momentum]

    def pieces(self, sizes: list[int], *, rule: Rule | str = "paper", **options) -> list[Tensor]:
        """The results of `whole`, by calls on pieces of the sequence."""
        state, outputs = DecodeState.of(self.state), []
        for part in zip(*(x.split(sizes, 1) for x in self.tokens), strict=True):
            extension = self.extension(part[6:], rule)
            y, state = extend_memory(*part[:6], state, extension=extension, **options)
            outputs.append(y)
        after = state.memory()
        return [torch.cat(outputs, 1), *after.weights, *after.momentum]

    def check(
        self, *backends: str, cuts: Iterable[list[int]] = (), decoded: bool = False, form: str = "reference",
        **options,
    ) -> None:  # fmt: skip
        """These forms, a sequence cut into pieces and one read token by token: each equals ``form``."""
        expected = self.whole(backend=form, **options)
        grads = graded(expected, self.leaves)
        for backend in backends:
            assert_same(expected, self.whole(backend=backend, **options), self.leaves, known=grads)
        for sizes in (*cuts, *([[1] * self.tokens[0].shape[1]] if decoded else [])):
            assert_same(expected, self.pieces(sizes, **options), self.leaves, known=grads)

    def cast(self, dtype: torch.dtype) -> None:
        """Replace the inputs by leaves of a type."""
        low = lambda xs: tuple(x.detach().to(dtype).requires_grad_() for x in xs)  # noqa: E731
        self.tokens, self.state = list(low(self.tokens)), MemoryState(*map(low, self.state))
        self.residual = self.residual and Residual(*low(self.residual.norm))
        self.base = self.base and low(self.base)


class Case(Call):
    """Random float64 inputs of two heads of width 4; gates are 0 and 1 at some tokens.

    ``groups`` is the A of an alpha by column, or of alpha, eta and theta, ``kind`` what is around the memory,
    ``base`` whether it decays towards random weights, ``extra`` the number of gates of the rule's own.
    """

    def __init__(
        self, T: int, depth: int = 2, *, kind: str = "none", groups: int | tuple | None = None,
        batch: int = 1, documents: int | None = None, widths: list[int] | None = None, base: bool = False,
        extra: int = 0,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(100 * T + depth)
        rand = lambda *s: torch.rand(*s, generator=generator, dtype=torch.float64)  # noqa: E731
        widths = widths or [4, *[8] * (depth - 1), 4]
        ends = widths[0], widths[0], widths[-1]
        tokens = [F.normalize(rand(batch, T, 2, n) - 0.5, dim=-1) for n in ends]
        sizes = groups if isinstance(groups, tuple) else (groups, None, None)
        gates = [rand(batch, T, 2, *([n] if n else [])) for n in sizes]
        alpha, eta, theta = (most * gate for most, gate in zip((0.05, 0.9, 0.05), gates, strict=True))
        alpha[rand(*alpha.shape) < 0.1], eta[rand(*eta.shape) < 0.1] = 0, 0
        alpha[0, T // 2, 0], eta[0, T // 3, 1] = 1, 1
        shapes = [(documents or batch, 2, *pair) for pair in pairwise(widths)]
        self.tokens = [x.requires_grad_() for x in (*tokens, alpha, eta, theta)]
        self.state = MemoryState(
            tuple(((rand(*s) - 0.5) * 4 / s[-2] ** 0.5).requires_grad_() for s in shapes),
            tuple((0.1 * (rand(*s) - 0.5)).requires_grad_() for s in shapes),
        )
        norm = 1 + 0.2 * rand(2, widths[0]), rand(2, widths[0]) - 0.5
        kinds = {"none": None, "input": Residual(), "norm": Residual(*(x.requires_grad_() for x in norm))}
        self.residual = kinds[kind]
        if extra:
            self.tokens.append(rand(batch, T, 2, extra).requires_grad_())
        if base:
            generator.manual_seed(T)
            randn = (torch.randn(s[1:], generator=generator, dtype=torch.float64) for s in shapes)
            self.base = tuple((x / x.shape[1] ** 0.5).requires_grad_() for x in randn)


def graded(outputs: list[Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of all leaves from a random functional of the outputs."""
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in outputs]
    total = torch.stack([(x * w).sum() for x, w in zip(outputs, weights, strict=True)]).sum()
    return torch.autograd.grad(total, leaves, retain_graph=True)


def assert_same(
    expected: list[Tensor], actual: list[Tensor], leaves: list[Tensor],
    results: tuple[float, float] = (1e-10, 1e-11), gradients: tuple[float, float] = (1e-8, 1e-9),
    known: tuple[Tensor, ...] | None = None,
) -> None:  # fmt: skip
    """Equal results and equal gradients, by relative and absolute tolerances; ``known`` are the expected."""
    assert all(torch.isfinite(x).all() and x.abs().max() < 100 for x in expected)
    torch.testing.assert_close(actual, expected, rtol=results[0], atol=results[1])
    expected_grads = known or graded(expected, leaves)
    torch.testing.assert_close(graded(actual, leaves), expected_grads, rtol=gradients[0], atol=gradients[1])
