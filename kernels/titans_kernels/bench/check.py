"""Checks an op against a reference before it is timed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from titans_kernels.bench.inputs import BenchInputs, make
from titans_kernels.bench.shapes import BenchShape

TOLERANCE = {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Allowed RMS(error) / RMS(reference) of each output and gradient, by the dtype of q, k and v."""
INTERPRETED = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""The same in Triton's interpreter, whose products are exact."""

SEED = 20250101


def interpreting() -> bool:
    """Return True if Triton kernels run in its interpreter, which is for checks only, not for timing."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


@dataclass(frozen=True)
class Verdict:
    """Result of a check: the relative error of every output and gradient by name."""

    errors: dict[str, float]
    tolerance: float
    shape: BenchShape
    """The sizes it was checked on."""

    @property
    def worst(self) -> str:
        """Name of the output with the largest error; NaN counts as the largest."""
        return max(self.errors, key=lambda name: self.errors[name])

    @property
    def green(self) -> bool:
        """True if all errors are within the tolerance."""
        return self.errors[self.worst] <= self.tolerance

    def __str__(self) -> str:
        sign = "<=" if self.green else ">"
        return f"{self.worst} {self.errors[self.worst]:.1e} {sign} {self.tolerance:.0e}"


class Judge(NamedTuple):
    """Inputs and their expected results."""

    inputs: BenchInputs
    expected: dict[str, Tensor]
    tolerance: float

    def verdict(self, call: Callable[[BenchInputs], Sequence[Tensor]]) -> Verdict:
        """Errors of ``call``, including all its gradients."""
        computed = results(self.inputs, call, self.inputs.tokens[0].dtype)
        errors = {name: relative_error(computed[name], right) for name, right in self.expected.items()}
        return Verdict(errors, self.tolerance, self.inputs.shape)


def judges(shape: BenchShape, dtype: torch.dtype, device: torch.device, *, seed: int = SEED) -> list[Judge]:
    """Judge by the token-by-token recurrence on a few chunks, and by the float64 parallel form at full size.

    The second is itself checked against the first. Interpreted kernels get only the first, with one head.
    """
    if interpreting():
        return [judge(shape.short(heads=1), "reference", dtype, device, seed)]
    return [
        judge(shape.short(), "reference", dtype, device, seed),
        judge(shape.checked(), "chunked", dtype, device, seed + 1),
    ]


def judge(
    shape: BenchShape, backend: str, dtype: torch.dtype, device: torch.device, seed: int = SEED
) -> Judge:
    """Draw the inputs of a shape, and compute the results of ``backend`` in float64."""
    inputs = make(shape, dtype, device, seed=seed, whole=True)
    expected = results(inputs.double(), lambda exact: exact.call(backend), dtype)
    return Judge(inputs, expected, (INTERPRETED if interpreting() else TOLERANCE)[dtype])


def results(
    inputs: BenchInputs, call: Callable[[BenchInputs], Sequence[Tensor]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return outputs by name, and the gradient of a random functional of them with respect to every leaf.

    The functional's weights are rounded to ``dtype``, so that they are the same for outputs of every dtype.
    """
    outputs = call(inputs)
    generator = torch.Generator(outputs[0].device).manual_seed(SEED)
    randn = lambda x: torch.randn(x.shape, generator=generator, device=x.device)  # noqa: E731
    gradients = torch.autograd.grad(
        list(outputs), inputs.leaves, [randn(x).to(dtype).to(x.dtype) for x in outputs]
    )
    states = [name for name in inputs.names if "[" in name]
    tensors = dict(zip(["y", *states], (x.detach() for x in outputs), strict=True))
    return tensors | dict(zip((f"d{name}" for name in inputs.names), gradients, strict=True))


def relative_error(computed: Tensor, expected: Tensor) -> float:
    """RMS(found - expected) / RMS(expected) in float64; inf if anything is not finite."""
    expected = expected.double()
    error = (computed.double() - expected).norm().item()
    error = error / (expected.norm().item() or 1.0)
    return error if math.isfinite(error) else math.inf
