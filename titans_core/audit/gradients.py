"""Checks that every parameter gets a gradient, and that it is the derivative of what is computed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from titans_core.audit.adapter import Adapter
from titans_core.audit.report import Example, NotApplicable, Outcome, check
from titans_core.audit.subject import Subject, compare, worst

ROWS = 16
"""Most rows of a batch that tries as many tokens at once."""
ODD_LENGTHS = 5
"""Seeded lengths at which a fast form is compared with its reference, beside the audit's own."""


def _loss(s: Subject, adapter: Adapter, x: Tensor, grad: bool) -> Tensor:
    """Return a scalar of order 1 that depends on all outputs."""
    y = s.forward(adapter, x, grad=grad)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).to(y)
    return (y * weights).sum() / y.numel() ** 0.5


def _trainable(adapter: Adapter) -> dict[str, nn.Parameter]:
    return {name: p for name, p in adapter.module.named_parameters() if p.requires_grad}


@check("each trainable parameter has a finite gradient that is not 0 for a random loss of all outputs")
def parameters(s: Subject) -> Outcome:
    """Check that every parameter is trained."""
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


@check(
    "finite differences along random directions of each parameter and the inputs, and across every 4th token"
)
def finite_differences(s: Subject) -> Outcome:
    """Check that gradients are derivatives of what is computed, an inner loop's too: nothing is detached."""
    exact = s.precision is torch.float64
    tolerance, steps = (1e-4, (1e-5, 1e-6, 1e-7)) if exact else (0.05, (1e-2, 3e-3))

    def attempt(length: int) -> Outcome:
        # an odd length, which no usual chunk divides
        pairs = [*_directions(s, length - 5 if length > 20 else length, tolerance, steps[:2])]
        return worst([*pairs, *_across(s, length, tolerance, steps)], tolerance)

    return s.smallest(attempt, (2, 3, 5, 9, 17, 33))


def _across(
    s: Subject, length: int, tolerance: float, steps: tuple[float, ...]
) -> Iterator[tuple[float, Example]]:
    """Compare the derivative of outputs from p on with respect to inputs before p to a difference quotient.

    A state that is detached once would hardly change the derivative of all outputs.
    """
    if s.build().vocab is not None:
        return
    generator = torch.Generator().manual_seed(8)
    cuts = list(range(1 + s.seed % 4, length, 4))
    x = s.inputs(s.build(), length, 1).to(s.dtype_of(s.build(training=True)))
    u = torch.randn(x.shape, generator=generator, dtype=torch.float32).to(x)
    for some in (cuts[i : i + ROWS] for i in range(0, len(cuts), ROWS)):
        slopes = _slopes_across(s, x, u, some, steps[0])
        for p, sizes in zip(some, slopes, strict=True):
            if sizes > tolerance:  # alone: rows may depend on each other, and a kink may be in between
                sizes = min(_slopes_across(s, x, u, [p], step)[0] for step in steps)
            note = f"from inputs before token {p} to outputs from it on"
            yield sizes, Example(length, sizes, p, p - 1, note)


def _slopes_across(s: Subject, x: Tensor, u: Tensor, cuts: list[int], step: float) -> list[float]:
    """Return the gap between derivative and central difference at each cut, relative to the larger."""
    adapter = s.build(training=True)
    rows = max(2, len(cuts))  # batch statistics need two
    cuts_R = torch.tensor([*cuts, *cuts][:rows])
    before_RT = torch.arange(x.shape[1]) < cuts_R[:, None]
    x, u = x.repeat_interleave(rows, 0), u * before_RT[..., None]
    leaf = x.clone().requires_grad_()
    generator = torch.Generator().manual_seed(4)

    def losses(y: Tensor, weights: Tensor) -> Tensor:
        return (y * weights * ~before_RT[..., None]).sum((1, 2))

    y = s.forward(adapter, leaf, grad=True)
    weights = torch.randn(y.shape[1:], generator=generator).to(y)
    if not y.requires_grad:
        return [0.0] * len(cuts)  # `parameters` reports it
    (grad,) = torch.autograd.grad(losses(y, weights).sum(), leaf, allow_unused=True)
    slope = torch.zeros(rows) if grad is None else (grad * u).sum((1, 2))
    ends = [losses(s.forward(adapter, x + sign * step * u), weights) for sign in (1, -1)]
    central = (ends[0] - ends[1]) / (2 * step)
    size = torch.maximum(slope.abs(), central.abs())
    return ((slope - central).abs() / size.clamp(min=1e-3 * float(size.max()) + 1e-9)).tolist()[: len(cuts)]


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
                    quotient = _slope(s, adapter, x, leaves[name], u, step)
                    floor = max(abs(quotient), abs(slope), 1e-3 * scale, 1e-9)
                    size = min(size, abs(quotient - slope) / floor)
                    if size <= tolerance:
                        break
                yield size, Example(length, size, note=name)


def _slope(s: Subject, adapter: Adapter, x: Tensor, p: Tensor, u: Tensor, step: float) -> float:
    """Return the central difference of the loss along u."""
    before = p.detach().clone()
    values = []
    for sign in (1, -1):
        p.copy_(before + sign * step * u)
        values.append(float(_loss(s, adapter, x, grad=False)))
    p.copy_(before)
    return (values[0] - values[1]) / (2 * step)


@check("outputs, and gradients of a random loss with respect to every parameter, at seeded lengths too")
def reference(s: Subject) -> Outcome:
    """Check that the fast form computes what the reference does, outputs and gradients."""
    adapter = s.build()
    slow = adapter.reference
    if slow is None:
        raise NotApplicable("the adapter has no `reference`")

    def attempt(length: int) -> Outcome:
        if length < s.length:
            return worst(compared(length), 10 * s.tolerance)
        lengths = random.Random(s.seed).sample(range(1, min(length, 80)), min(ODD_LENGTHS, length - 1))
        return worst([pair for n in (*lengths, length) for pair in compared(n)], 10 * s.tolerance)

    def compared(length: int) -> list[tuple[float, Example]]:
        x = s.inputs(adapter, length)
        y, grads = _with_gradients(s, adapter, x, slow=False)
        y_slow, slow_grads = _with_gradients(s, adapter, x, slow=True)
        pairs = [compare(y, y_slow, s.tolerance, "outputs")]
        for name, grad in grads.items():
            gap = float((grad - slow_grads[name]).abs().max() / slow_grads[name].abs().max().clamp(min=1e-9))
            pairs.append((gap, Example(length, gap, note=f"gradient of {name}")))
        return pairs

    return s.smallest(attempt)


def _with_gradients(s: Subject, adapter: Adapter, x: Tensor, slow: bool) -> tuple[Tensor, dict[str, Tensor]]:
    assert adapter.reference is not None
    y = s.call(adapter.reference if slow else adapter.forward, adapter, x, grad=True)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).to(y)
    trainable = _trainable(adapter)
    grads = torch.autograd.grad((y * weights).sum(), list(trainable.values()), allow_unused=True)
    zeros = [torch.zeros_like(p) if g is None else g for p, g in zip(trainable.values(), grads, strict=True)]
    return y.detach(), dict(zip(trainable, zeros, strict=True))
