"""Whether a layer is trained as it says: every parameter gets a gradient, and it is the derivative."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from titans_core.audit.adapter import Adapter
from titans_core.audit.report import Example, NotApplicable, Outcome, check
from titans_core.audit.subject import Subject, compare, worst

LENGTH = 80
"""Tokens of the inputs for finite differences: more than a chunk of the usual 64."""


def _loss(s: Subject, adapter: Adapter, x: Tensor, grad: bool) -> Tensor:
    """A scalar of all outputs, of order 1."""
    y = s.forward(adapter, x, grad=grad)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).to(y)
    return (y * weights).sum() / y.numel() ** 0.5


def _trainable(adapter: Adapter) -> dict[str, nn.Parameter]:
    return {name: p for name, p in adapter.module.named_parameters() if p.requires_grad}


@check("each trainable parameter has a finite gradient that is not 0 for a random loss of all outputs")
def parameters(s: Subject) -> Outcome:
    """Every parameter is trained."""
    adapter = s.build(training=True)
    trainable = _trainable(adapter)
    if not trainable:
        raise NotApplicable("no trainable parameter")
    x = s.inputs(adapter)
    loss = _loss(s, adapter, x, grad=True)
    if not loss.requires_grad:
        return Outcome(len(trainable), 0, Example(s.length, torch.inf, note="the outputs have no gradient"))
    grads = torch.autograd.grad(loss, list(trainable.values()), allow_unused=True)
    named = list(zip(trainable, grads, strict=True))
    missing = [name for name, grad in named if grad is None or not grad.any()]
    bad = [name for name, grad in named if grad is not None and not bool(grad.isfinite().all())]
    if bad:
        return Outcome(len(bad), 0, Example(s.length, torch.inf, note=f"gradient not finite: {_few(bad)}"))
    example = (
        Example(s.length, float(len(missing)), note=f"no gradient: {_few(missing)}") if missing else None
    )
    return Outcome(len(missing), 0, example, f"{len(trainable)} parameters")


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@check("finite differences along random directions of each parameter and the inputs, in training mode")
def finite_differences(s: Subject) -> Outcome:
    """Gradients are the derivatives of what is computed, an inner loop's too: nothing is detached."""
    exact = s.precision is torch.float64
    tolerance, steps = (1e-4, (1e-5, 1e-6)) if exact else (0.05, (1e-2, 3e-3))

    def attempt(length: int) -> Outcome:
        return worst(_directions(s, min(length, LENGTH), tolerance, steps), tolerance)

    return s.smallest(attempt, (2, 3, 5, 9, 17, 33))


def _directions(
    s: Subject, length: int, tolerance: float, steps: tuple[float, ...]
) -> Iterator[tuple[float, Example]]:
    adapter = s.build(training=True)
    x = s.inputs(adapter, length, 2)
    leaves: dict[str, Tensor] = dict(_trainable(adapter))
    if adapter.vocab is None:
        x = x.to(s.dtype_of(adapter)).requires_grad_()
        leaves["the inputs"] = x
    loss = _loss(s, adapter, x, grad=True)
    if not loss.requires_grad:
        raise NotApplicable("the outputs have no gradient; see parameters")
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    generator = torch.Generator().manual_seed(6)
    directions = {}
    for (name, p), grad in zip(leaves.items(), grads, strict=True):
        for _ in range(2):
            # as large as the parameter, so that one step suits all
            u = torch.randn(p.shape, generator=generator, dtype=torch.float32).to(p)
            u *= p.detach().abs().square().mean().sqrt().clamp(min=0.01)
            slope = 0.0 if grad is None else float((grad.conj() * u).real.sum())
            directions[name] = [*directions.get(name, []), (u, slope)]
    scale = max((abs(slope) for pairs in directions.values() for _, slope in pairs), default=0.0)
    with torch.no_grad():
        for name, pairs in directions.items():
            for u, slope in pairs:
                size = torch.inf
                for step in steps:  # a smaller one where a kink is in between
                    found = _slope(s, adapter, x, leaves[name], u, step)
                    floor = max(abs(found), abs(slope), 1e-3 * scale, 1e-9)
                    size = min(size, abs(found - slope) / floor)
                    if size <= tolerance:
                        break
                yield size, Example(length, size, note=name)


def _slope(s: Subject, adapter: Adapter, x: Tensor, p: Tensor, u: Tensor, step: float) -> float:
    """The central difference of the loss along u."""
    before = p.detach().clone()
    values = []
    for sign in (1, -1):
        p.copy_(before + sign * step * u)
        values.append(float(_loss(s, adapter, x, grad=False)))
    p.copy_(before)
    return (values[0] - values[1]) / (2 * step)


@check("outputs, and gradients of a random loss with respect to the inputs and every parameter")
def reference(s: Subject) -> Outcome:
    """The fast form computes what the reference does, outputs and gradients."""
    adapter = s.build()
    slow = adapter.reference
    if slow is None:
        raise NotApplicable("the adapter has no `reference`")

    def attempt(length: int) -> Outcome:
        x = s.inputs(adapter, length)
        y, grads = _with_gradients(s, adapter, x, slow=False)
        y_slow, slow_grads = _with_gradients(s, adapter, x, slow=True)
        pairs = [compare(y, y_slow, s.tolerance, "outputs")]
        for name, grad in grads.items():
            gap = float((grad - slow_grads[name]).abs().max() / slow_grads[name].abs().max().clamp(min=1e-9))
            pairs.append((gap, Example(length, gap, note=f"gradient of {name}")))
        return worst(pairs, 10 * s.tolerance)

    return s.smallest(attempt)


def _with_gradients(s: Subject, adapter: Adapter, x: Tensor, slow: bool) -> tuple[Tensor, dict[str, Tensor]]:
    assert adapter.reference is not None
    y = s.call(adapter.reference if slow else adapter.forward, adapter, x, grad=True)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).to(y)
    trainable = _trainable(adapter)
    grads = torch.autograd.grad((y * weights).sum(), list(trainable.values()), allow_unused=True)
    zeros = [torch.zeros_like(p) if g is None else g for p, g in zip(trainable.values(), grads, strict=True)]
    return y.detach(), dict(zip(trainable, zeros, strict=True))
