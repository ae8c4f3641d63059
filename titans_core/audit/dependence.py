"""Checks that an output depends on no later token, other row or earlier call, and not on the length."""

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
ROWS = 16
"""Most rows of a batch that tries as many tokens at once."""


@check("d y[t] / d x[s] = 0 for all s > t, in evaluation mode and, for a third of t, in training mode")
def causal_gradient(s: Subject) -> Outcome:
    """Check that no output depends on a later token, by the exact derivative."""
    tolerance = s.tolerance

    def attempt(length: int) -> Outcome:
        return worst((pair for mode in MODES for pair in _future_gradients(s, length, mode)), tolerance)

    return s.smallest(attempt)


def _future_gradients(s: Subject, length: int, training: bool) -> Iterator[tuple[float, Example]]:
    """Yield, for each token, the largest derivative of its output with respect to a later input."""
    adapter = s.build(training=training)
    x, mode = s.inputs(adapter, length, 1), "in training mode" if training else ""
    for block in s.tokens(length, training).split(ROWS):
        y, leaf = differentiable(s, adapter, x.repeat_interleave(len(block), 0))
        weights = torch.randn(y.shape[-1], generator=torch.Generator().manual_seed(3)).to(y)
        outputs = (y[torch.arange(len(block)), block] * weights).sum()
        (grad,) = torch.autograd.grad(outputs, leaf, allow_unused=True)
        if grad is None:
            raise NotApplicable("no derivative with respect to the inputs; see causal_perturbation")
        for t, size_T in zip(block.tolist(), grad.abs().amax(-1), strict=True):
            if len(later := size_T[t + 1 :]):
                leak = float(later.max() / size_T.max().clamp(min=1e-12))
                yield leak, Example(length, leak, t, t + 1 + int(later.argmax()), mode)


def differentiable(s: Subject, adapter: Adapter, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs with a graph, and the floating-point inputs that they depend on: x, or its embedding."""
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


@check("tokens from p on are replaced, for every p, also by larger ones; outputs before p must not move")
def causal_perturbation(s: Subject) -> Outcome:
    """Check that no output depends on a later token, derivative or not."""

    def attempt(length: int) -> Outcome:
        return worst((pair for mode in MODES for pair in _future_changes(s, length, mode)), s.tolerance)

    return s.smallest(attempt)


def _future_changes(s: Subject, length: int, training: bool) -> Iterator[tuple[float, Example]]:
    """Yield, for each cut, the largest change before it in a row that differs from the cut on."""
    adapter = s.build(training=training)
    x, mode = s.inputs(adapter, length, 1), "in training mode" if training else ""
    cuts = s.tokens(length, training)
    other = {scale: s.other(adapter, x, scale=scale)[0] for scale in (1.0, 10.0)}
    for block in cuts[cuts > 0].split(ROWS):
        same = x.repeat_interleave(len(block), 0)
        changed = same.clone()
        for row, p in enumerate(block.tolist()):
            changed[row, p:] = other[10.0 if (p + training) % 2 else 1.0][p:]
        y = _first_call(s, adapter, same, training)
        new = _first_call(s, adapter, changed, training)
        for row, p in enumerate(block.tolist()):
            size, example = compare(new[row, None, :p], y[row, None, :p], s.tolerance)
            yield size, Example(length, size, example.position, p, mode)


def _first_call(s: Subject, adapter: Adapter, x: Tensor, training: bool) -> Tensor:
    """Return the outputs of a fresh layer: in training mode a call may change running statistics."""
    return s.forward(s.build(training=True) if training else adapter, x)


@check("all other rows are replaced, also by larger ones, in evaluation and training mode")
def rows(s: Subject) -> Outcome:
    """Check that no output depends on another row of the batch."""

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


@check("y(x[:n]) = y(x)[:n] for every n, the gradients of parameters too; earlier tokens count")
def short_inputs(s: Subject) -> Outcome:
    """Check that an input of any length gives the outputs of a longer one's start, also below a chunk."""
    adapter = s.build()
    x = s.inputs(adapter)
    y = s.forward(adapter, x)

    def prefixes() -> Iterator[tuple[float, Example]]:
        usual = {6, 7, *s.positions(s.length)}
        for n in range(1, s.length):

            def shorter(layer: Adapter, n: int = n) -> tuple[float, Example]:
                short = s.forward(layer, x[:, :n])
                return compare(short, y[:, :n], s.tolerance, "the outputs of a shorter input differ")

            try:
                yield s.measured(shorter, adapter)
            except Exception as error:
                yield torch.inf, Example(n, torch.inf, note=one_line(error))
                continue
            if n > 1 and n in usual:
                # some earlier token must reach the last output
                before = s.other(adapter, x)[:, : n - 1]
                moved = s.forward(adapter, torch.cat([before, x[:, n - 1 : n]], 1))
                if float(difference(moved[:, -1:], y[:, n - 1 : n]).max()) <= s.tolerance:
                    note = "no earlier token reaches the last output"
                    yield torch.inf, Example(n, torch.inf, n - 1, note=note)

    def gradients() -> Iterator[tuple[float, Example]]:
        parameters = {name: p for name, p in adapter.module.named_parameters() if p.requires_grad}
        whole = s.forward(adapter, row := x[:1], grad=True)
        weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(9)).to(whole)
        for n in range(1, s.length) if parameters and whole.requires_grad else ():
            try:
                short = s.forward(adapter, row[:, :n], grad=True)
            except Exception:  # reported above
                continue
            actual, expected = (
                torch.autograd.grad(
                    (out[:, :n] * weights[:, :n]).sum(), list(parameters.values()), retain_graph=True,
                    allow_unused=True,
                )
                for out in (short, whole)
            )  # fmt: skip
            for name, p, a, b in zip(parameters, parameters.values(), actual, expected, strict=True):
                a, b = (torch.zeros_like(p) if grad is None else grad for grad in (a, b))
                value = float((a - b).abs().max() / (10 * b.abs().max()).clamp(min=1e-6))
                yield value, Example(n, value, note=f"the gradient of {name} differs")

    return worst([*prefixes(), *gradients()], s.tolerance)


@check("in evaluation mode twice, then after calls with other inputs, of other lengths and numbers of rows")
def repeatable(s: Subject) -> Outcome:
    """Check that the same input gives the same output: nothing random, nothing kept from earlier calls."""

    def repeats(length: int) -> Iterator[tuple[float, Example]]:
        adapter = s.build()
        x = s.inputs(adapter, length)
        kept = x.clone()
        y = s.forward(adapter, x).clone()
        yield compare(s.forward(adapter, x, seed=None), y, s.tolerance, "called twice")
        s.forward(adapter, s.other(adapter, x), seed=None)
        for tokens, rows_ in ((length + 3, s.batch), (max(1, length - 5), 1), (length + 8, s.batch + 2)):
            s.forward(adapter, s.inputs(adapter, tokens, rows_, seed=4), seed=None)
        yield compare(s.forward(adapter, x, seed=None), y, s.tolerance, "after other inputs")
        if not torch.equal(x, kept):
            yield torch.inf, Example(length, torch.inf, note="the input was changed in place")

    return s.smallest(lambda length: worst(repeats(length), s.tolerance))


@check("each row alone, in batches of other sizes, and in reversed order")
def batch_size(s: Subject) -> Outcome:
    """Check that a row's outputs do not depend on the size of the batch or on the row's place in it."""

    def batches(length: int) -> Iterator[tuple[float, Example]]:
        adapter = s.build()
        x = s.inputs(adapter, length)
        y = s.forward(adapter, x)
        alone = torch.cat([s.forward(s.build(), x[i : i + 1]) for i in range(len(x))])
        yield compare(alone, y, s.tolerance, "each row alone")
        for more in (1, 2, len(x), 5, 13):
            others = s.inputs(adapter, length, more, seed=2)
            larger = s.forward(s.build(), torch.cat([others, x]))[more:]
            yield compare(larger, y, s.tolerance, f"in a batch of {more + len(x)} rows")
        yield compare(s.forward(s.build(), x.flip(0)).flip(0), y, s.tolerance, "in reversed order")

    return s.smallest(lambda length: worst(batches(length), s.tolerance))


@check("y in training mode with dropout 0 equals y in evaluation mode, before and after training")
def modes(s: Subject) -> Outcome:
    """Check that training and evaluation compute the same function, and training leaves no trace in it."""

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
