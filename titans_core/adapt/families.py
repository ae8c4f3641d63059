"""Families of pretrained models that can get a memory: where their attention is, and its projections.

A family whose attention has q_proj, k_proj, v_proj, o_proj and rotary positions is one line of `FAMILIES`.

Shapes: B rows, T tokens, D model width, H query heads, G heads of keys and values, E head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

Heads = tuple[Tensor, Tensor, Tensor]
"""q [B, T, H, E], k and v [B, T, G, E], before positions."""


class Family(NamedTuple):
    """The parts of a family; the defaults are Llama's."""

    layers: str = "layers"
    """The list of layers in the base model."""
    attention: str = "self_attn"
    """The attention of a layer."""
    rotary: bool = True
    """False: positions are a learned table, which ends."""
    heads: Callable[[Any, Tensor], Heads] = lambda attention, x: _projected(attention, x)
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Of an attention, which low-rank changes apply to."""
    output: Callable[[Any, Tensor], Tensor] = lambda attention, y: attention.o_proj(y)
    """Map the heads' outputs [B, T, H E] to [B, T, D]."""


def _projected(attention: Any, x_BTD: Tensor) -> Heads:
    split = lambda y: y.unflatten(-1, (-1, attention.head_dim))  # noqa: E731
    q, k = split(attention.q_proj(x_BTD)), split(attention.k_proj(x_BTD))
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm(q), attention.k_norm(k)
    return q, k, split(attention.v_proj(x_BTD))


def _gpt2_heads(attention: Any, x_BTD: Tensor) -> Heads:
    q, k, v = attention.c_attn(x_BTD).unflatten(-1, (3, attention.num_heads, -1)).unbind(-3)
    return q, k, v


FAMILIES = {
    "llama": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "gpt2": Family(
        "h",
        "attn",
        False,
        _gpt2_heads,
        ("c_attn", "c_proj"),
        lambda attention, y: attention.resid_dropout(attention.c_proj(y)),
    ),
}
"""By ``model_type`` of transformers."""


def find_family(model_type: str) -> Family:
    """Return the family of a ``model_type``. Raises ValueError if it is unknown."""
    if model_type not in FAMILIES:
        raise ValueError(f"{model_type} is not a family that can get a memory; {', '.join(FAMILIES)} are")
    return FAMILIES[model_type]
