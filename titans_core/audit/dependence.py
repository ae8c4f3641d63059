"""What an output may depend on: no later token, other row or earlier call, not the length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from titans_core.audit.adapter import Adapter
from titans_core.audit.report import Example, NotApplicable, Outcome, check
from titans_core.audit.subject import Subject, compare, difference, one_line, worst

MODES = (False, True)
"""Evaluation and training mode: statistics of a batch are used in training only."""


@check("d y[t] / d x[s] = 0 for s > t, t around usual chunk borders, in evaluation and training mode")
def causal_gradient(s: Subject) -> Outcome:
    """No output depends on a later token, by the exact derivative."""
    tolerance = s.tolerance

    def attempt(length: int) -> Outcome:
        return worst((pair for mode in MODES for pair in _future_gradients(s, length, mode)), tolerance)

    return s.smallest(attempt)


def _future_gradients(s: Subject, length: int, training: bool) -> Iterator[tuple[float, Example]]:
    adapter = s.build(training=training)
    y, x = differentiable(s, adapter, s.inputs(adapter, length))
    weights = torch.randn(y.shape[-1], generator=torch.Generator().manual_seed(3)).to(y)
    for t in [0, *s.positions(length)][:: 3 if training else 1]:
        (grad,) = torch.autograd.grad((y[0, t] * weights).sum(), x, retain_graph=True, allow_unused=True)
        if grad is None:
            raise NotApplicable("no derivative with respect to the inputs; see causal_perturbation")
        size_T = grad[0].abs().amax(-1)
        later = size_T[t + 1 :]
        if len(later):
            leak = float(later.max() / size_T.max().clamp(min=1e-12))
            mode = "in training mode" if training else ""
            yield leak, Example(length, leak, t, t + 1 + int(later.argmax()), mode)


def differentiable(s: Subject, adapter: Adapter, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs with a graph, and the floating-point inputs that they depend on: x, or its embedding."""
    if adapter.vocab is None:
        x = x.to(s.dtype_of(adapter)).requires_grad_()
        return s.forward(adapter, x, grad=True), x
    if adapter.embedding is None:
        raise NotApplicable("tokens without an `embedding` in the adapter; see causal_perturbation")
    embedded: list[Tensor] = []

    def keep(_module: Any, _inputs: Any, out: Tensor) -> Tensor:
        leaf = out.detach().requires_grad_() if not embedded else out
        if not embedded:
            embedded.append(leaf)
        return leaf

    handle = adapter.embedding.register_forward_hook(keep)
    try:
        y = s.forward(adapter, x, grad=True)
    finally:
        handle.remove()
    if not embedded or embedded[0].shape[:2] != x.shape:
        raise NotApplicable("the embedding of tokens is not called on tokens [B, T]; see causal_perturbation")
    return y, embedded[0]


@check("tokens from p on are replaced, by ones ten times larger too; outputs before p must not move")
def causal_perturbation(s: Subject) -> Outcome:
    """No output depends on a later token, derivative or not."""

    def attempt(length: int) -> Outcome:
        return worst((pair for mode in MODES for pair in _future_changes(s, length, mode)), s.tolerance)

    return s.smallest(attempt)


def _future_changes(s: Subject, length: int, training: bool) -> Iterator[tuple[float, Example]]:
    adapter = s.build(training=training)
    x = s.inputs(adapter, length)
    y = _first_call(s, adapter, x, training)
    mode = "in training mode" if training else ""
    for i, p in enumerate(s.positions(length)[:: 3 if training else 1]):
        scale = 10.0 if i % 2 and adapter.vocab is None else 1.0
        changed = torch.cat([x[:, :p], s.other(adapter, x, scale=scale)[:, p:]], 1)
        new = _first_call(s, adapter, changed, training)
        size, example = compare(new[:, :p], y[:, :p], s.tolerance, mode, source=p)
        yield size, Example(length, size, example.position, p, mode)


def _first_call(s: Subject, adapter: Adapter, x: Tensor, training: bool) -> Tensor:
    """The outputs of a fresh layer: in training mode a call may change running statistics."""
    return s.forward(s.build(training=True) if training else adapter, x)


@check("all other rows are replaced, also by larger ones, in evaluation and training mode")
def rows(s: Subject) -> Outcome:
    """No output depends on another row of the batch."""

    def changes(length: int) -> Iterator[tuple[float, Example]]:
        for training in MODES:
            adapter = s.build(training=training)
            x = s.inputs(adapter, length)
            y = s.forward(adapter, x)
            for row in {0, s.batch - 1}:
                for scale in (1.0, 10.0):
                    changed = s.other(adapter, x, scale=scale)
                    changed[row] = x[row]
                    new = s.forward(s.build(training=training), changed)
                    note = f"row {row}" + (" in training mode" if training else "")
                    yield compare(new[row : row + 1], y[row : row + 1], s.tolerance, note)

    return s.smallest(lambda length: worst(changes(length), s.tolerance))


@check("y(x[:n]) = y(x)[:n], n = 1, 2, 3 ... and around chunk borders; earlier tokens reach the last output")
def short_inputs(s: Subject) -> Outcome:
    """An input of any length gives the outputs of the start of a longer one, also below a chunk."""
    adapter = s.build()
    x = s.inputs(adapter)
    y = s.forward(adapter, x)

    def prefixes() -> Iterator[tuple[float, Example]]:
        for n in sorted({1, 6, 7, *s.positions(s.length)}):
            try:
                short = s.forward(s.build(), x[:, :n])
            except Exception as error:
                yield torch.inf, Example(n, torch.inf, note=one_line(error))
                continue
            yield compare(short, y[:, :n], s.tolerance, "the outputs of a shorter input differ")
            if n > 1:
                # some earlier token must reach the last output
                before = s.other(adapter, x)[:, : n - 1]
                moved = s.forward(s.build(), torch.cat([before, x[:, n - 1 : n]], 1))
                if float(difference(moved[:, -1:], short[:, -1:]).max()) <= s.tolerance:
                    note = "no earlier token reaches the last output"
                    yield torch.inf, Example(n, torch.inf, n - 1, note=note)

    return worst(prefixes(), s.tolerance)


@check("in evaluation mode twice, then after calls with other inputs and of another length")
def repeatable(s: Subject) -> Outcome:
    """The same input gives the same output: nothing random, nothing kept from earlier calls."""

    def repeats(length: int) -> Iterator[tuple[float, Example]]:
        adapter = s.build()
        x = s.inputs(adapter, length)
        kept = x.clone()
        y = s.forward(adapter, x).clone()
        yield compare(s.forward(adapter, x, seed=None), y, s.tolerance, "called twice")
        s.forward(adapter, s.other(adapter, x), seed=None)
        s.forward(adapter, s.inputs(adapter, length + 3, seed=4), seed=None)
        yield compare(s.forward(adapter, x, seed=None), y, s.tolerance, "after other inputs")
        if not torch.equal(x, kept):
            yield torch.inf, Example(length, torch.inf, note="the input was changed in place")

    return s.smallest(lambda length: worst(repeats(length), s.tolerance))


@check("each row alone, in a batch of twice the size, and in reversed order")
def batch_size(s: Subject) -> Outcome:
    """A row's outputs do not depend on the size of the batch or on the row's place in it."""

    def batches(length: int) -> Iterator[tuple[float, Example]]:
        adapter = s.build()
        x = s.inputs(adapter, length)
        y = s.forward(adapter, x)
        alone = torch.cat([s.forward(s.build(), x[i : i + 1]) for i in range(len(x))])
        yield compare(alone, y, s.tolerance, "each row alone")
        doubled = s.forward(s.build(), torch.cat([s.other(adapter, x), x]))[len(x) :]
        yield compare(doubled, y, s.tolerance, "in a batch of twice the size")
        yield compare(s.forward(s.build(), x.flip(0)).flip(0), y, s.tolerance, "in reversed order")

    return s.smallest(lambda length: worst(batches(length), s.tolerance))


@check("y in training mode with dropout 0 equals y in evaluation mode, before and after training")
def modes(s: Subject) -> Outcome:
    """Training and evaluation compute the same function, and training leaves no trace in it."""

    def both(length: int) -> Iterator[tuple[float, Example]]:
        adapter = s.build()
        without_dropout(adapter)
        x = s.inputs(adapter, length)
        y = s.forward(adapter, x)
        adapter.module.train()
        trained = [s.forward(adapter, s.other(adapter, x), seed=8)]
        trained += [s.forward(adapter, x, seed=seed) for seed in (5, 6)]
        adapter.module.eval()
        yield compare(s.forward(adapter, x), y, s.tolerance, "evaluation after training")
        if float(difference(trained[1], trained[2]).max()) > s.tolerance:
            raise NotApplicable("random in training mode beyond dropout")
        yield compare(trained[1], y, s.tolerance, "training and evaluation mode differ")

    return s.smallest(lambda length: worst(both(length), s.tolerance))


def without_dropout(adapter: Adapter) -> None:
    """Set every dropout probability of the module to 0: of layers, and of attributes with such a name."""
    for module in adapter.module.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
