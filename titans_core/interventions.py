"""Interventions: parts of a model switched off, or its attention shortened, for some forward passes.

They change no weight and need no other model. Evaluation asks with them which part an answer came from;
training draws the window of a step with them (`OptimConfig.windows`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from torch import nn

from titans_core.attention import Attention
from titans_core.blocks.mac import MAC
from titans_core.memory import NeuralMemory


class Intervention(NamedTuple):
    """A change of a model's parts during evaluation; the defaults change nothing."""

    memory: bool = True
    """False: every neural memory outputs zeros, also where MAC reads it as context. It is still written."""
    attention: Literal["on", "cut", "off"] = "on"
    """off: attention outputs zeros. cut: it does not cross a multiple of the window, so that several layers
    together reach no further than one window; MAC's attention is always cut, at its segments."""
    decay: bool = True
    """False: alpha_t = 0 in every neural memory, for the persistent tokens too."""
    window: int | None = None
    """Attention's window in tokens, or MAC's segment; at most the model's own."""


@contextmanager
def intervene(model: nn.Module, change: Intervention) -> Iterator[None]:
    """``with intervene(model, Intervention(memory=False)): model(tokens)``. May be nested.

    A state may be carried across the border of the block: it has the same shapes with and without. A backward
    pass that recomputes activations must be inside the block.

    Raises:
        ValueError: the window does not fit the model; one line that begins with the field.
    """
    modules = [m for m in model.modules() if isinstance(m, Attention | NeuralMemory | MAC)]
    before = [dict(_switches(module)) for module in modules]
    if change.window is not None:
        for module in modules:
            _check_window(module, change.window)
    try:
        for module in modules:
            _apply(module, change)
        yield
    finally:
        for module, switches in zip(modules, before, strict=True):
            for name, value in switches.items():
                setattr(module, name, value)


def has_effect(model: nn.Module, change: Intervention) -> bool:
    """Return True if the model has the parts that an intervention switches off."""
    memories = [m for m in model.modules() if isinstance(m, NeuralMemory)]
    attentions = [m for m in model.modules() if isinstance(m, Attention)]
    in_segments = {m.attention for m in model.modules() if isinstance(m, MAC)}
    return bool(
        (not change.memory and memories)
        or (not change.decay and any(m.alpha is not None for m in memories))
        or (change.attention == "off" and attentions)
        or (change.attention == "cut" and any(a.window and a not in in_segments for a in attentions))
        or (change.window and attentions)
    )


def _switches(module: nn.Module) -> Iterator[tuple[str, object]]:
    for name in ("muted", "decays", "cut", "window", "segment_size"):
        if name in vars(module):
            yield name, getattr(module, name)


def _apply(module: nn.Module, change: Intervention) -> None:
    if isinstance(module, NeuralMemory):
        module.muted |= not change.memory
        module.decays &= change.decay
    elif isinstance(module, Attention):
        module.muted |= change.attention == "off"
        module.cut |= change.attention == "cut"
        module.window = change.window or module.window
    elif isinstance(module, MAC):
        module.segment_size = change.window or module.segment_size


def _check_window(module: nn.Module, window: int) -> None:
    if window < 1:
        raise ValueError(f"window: {window} is less than 1")
    if isinstance(module, MAC):
        chunk = module.memory.config.chunk_size
        if window % chunk:
            raise ValueError(
                f"window: {window} is not a multiple of memory.chunk_size {chunk}, as MAC's segments are"
            )
    longest = longest_window(module)
    if longest is not None and window > longest:
        raise ValueError(f"window: {window} is longer than the model's own, {longest}")


def longest_window(model: nn.Module) -> int | None:
    """Return the configured window of the model's attention, for MAC its segment; None without attention."""
    for module in model.modules():
        if isinstance(module, MAC):
            return module.attention.config.segment_size
        if isinstance(module, Attention):
            return module.config.window
    return None
