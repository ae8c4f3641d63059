"""Adapters through which the audit calls a layer; a plain layer needs none, state and documents do."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from titans_core.audit.report import AuditError

WIDTHS = ("d_model", "dim", "hidden_size", "embed_dim", "n_embd", "input_size", "width", "model_dim", "d")
"""Names under which layers take and keep their width."""
STATES = ("state", "cache", "hidden", "hx", "past_state", "prev_state", "memory_state")
"""Names under which layers take the state of an earlier call."""


@dataclass
class Adapter:
    """A layer, and functions that call it; a check whose function is missing does not apply.

    Each function closes over ``module``. Inputs x are [B, T, D], or [B, T] int64 with ``vocab``.
    """

    module: nn.Module
    forward: Callable[[Tensor], Tensor]
    """x to outputs [B, T, E]."""
    width: int | None = None
    """D of the inputs; None for tokens."""
    vocab: int | None = None
    """Number of tokens; None for [B, T, D]."""
    embedding: nn.Module | None = None
    """The embedding of tokens, whose output the exact causality check differentiates."""
    step: Callable[[Tensor, Any], tuple[Tensor, Any]] | None = None
    """(x, state or None) to outputs and the state after them, for any number of tokens."""
    decode: Callable[[Tensor, Any], tuple[Tensor, Any]] | None = None
    """(x of one token, state or None) to the output and the state; ``step`` unless given."""
    packed: Callable[[Tensor, Tensor], Tensor] | None = None
    """(x of one row, cu_seqlens [N + 1] int32) to outputs: documents one after another in the row."""
    reference: Callable[[Tensor], Tensor] | None = None
    """x to outputs by a slow form that is known to be right, with the same parameters."""
    changes_state: bool = False
    """True if ``step`` may change the given state in place, by design (a mutable cache)."""
    state_grows: Literal["constant", "linear"] = "linear"
    """The claimed growth of the state with the length."""
    time_grows: Literal["linear", "quadratic"] = "quadratic"
    """The claimed growth of the time with the length."""
    notes: str = ""
    """The adapter's treatment of the layer, for the report."""

    def __post_init__(self) -> None:
        if (self.width is None) == (self.vocab is None):
            raise AuditError("adapter: give either width, for inputs [B, T, D], or vocab, for tokens [B, T]")
        if self.decode is None:
            self.decode = self.step


def first_tensor(output: Any) -> Tensor:
    """Return a call's output, the first of a tuple, its ``logits`` or its ``last_hidden_state``."""
    for name in ("logits", "last_hidden_state"):
        if isinstance(output_tensor := getattr(output, name, None), Tensor):
            return output_tensor
    if isinstance(output, tuple | list) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        raise AuditError(f"forward: returned {type(output).__name__}; write an adapter that returns a tensor")
    return output


def as_adapter(layer: nn.Module | Adapter, width: int | None = None) -> Adapter:
    """Return ``layer`` if it is an adapter, else an adapter guessed for the plain module.

    Raises:
        AuditError: the module maps neither [B, T, D] to [B, T, E] nor tokens [B, T] to [B, T, V].
    """
    if isinstance(layer, Adapter):
        return layer
    if not isinstance(layer, nn.Module):
        raise AuditError(
            f"factory: made a {type(layer).__name__}; the audit takes an nn.Module or an Adapter"
        )
    if isinstance(layer, nn.RNNBase) and not layer.batch_first:
        raise AuditError(f"{type(layer).__name__}: build it with batch_first=True; inputs are [B, T, D]")
    forward = lambda x: first_tensor(layer(x))  # noqa: E731
    embedding = next((m for m in layer.modules() if isinstance(m, nn.Embedding)), None)
    width = width or _width(layer)
    failures = []
    if width is not None:
        if (problem := _problem(forward, torch.randn(2, 5, width))) is None:
            return Adapter(layer, forward, width=width, step=_step(layer, torch.randn(2, 5, width)))
        failures.append(f"[2, 5, {width}]: {problem}")
    if embedding is not None:
        vocab = embedding.num_embeddings
        tokens = torch.randint(0, vocab, (2, 5))
        if (problem := _problem(forward, tokens)) is None:
            return Adapter(layer, forward, vocab=vocab, embedding=embedding, step=_step(layer, tokens))
        failures.append(f"tokens [2, 5]: {problem}")
    tried = "; ".join(failures) or "its width is not known: give one"
    raise AuditError(f"{type(layer).__name__}: cannot be called without an adapter: {tried}")


def _width(module: nn.Module) -> int | None:
    for name in WIDTHS:
        if isinstance(width := getattr(module, name, None), int):
            return width
    linear = next((m for m in module.modules() if isinstance(m, nn.Linear)), None)
    return linear.in_features if linear is not None else None


def _problem(forward: Callable[[Tensor], Tensor], x: Tensor) -> str | None:
    """Return the reason for which the module does not map x [B, T, ...] to [B, T, E]; None if it does."""
    try:
        with torch.no_grad():
            y = forward(x)
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    if y.ndim != 3 or y.shape[:2] != x.shape[:2]:
        return f"returns {list(y.shape)}, not [2, 5, E]"
    return None


def _step(module: nn.Module, x: Tensor) -> Callable[[Tensor, Any], tuple[Tensor, Any]] | None:
    """``module(x, state=...)``, if the second thing that it returns can be given back under a usual name."""
    names = [name for name in inspect.signature(module.forward).parameters if name in STATES]
    for name in names:

        def step(x: Tensor, state: Any, name: str = name) -> tuple[Tensor, Any]:
            output = module(x) if state is None else module(x, **{name: state})
            state = getattr(output, "state", None)
            if state is None and isinstance(output, tuple | list):
                state = output[1]
            return first_tensor(output), state

        try:
            with torch.no_grad():
                _, state = step(x, None)
                if state is None:
                    continue
                step(x, state)
            return step
        except Exception:  # not a state that the module takes back
            continue
    return None
