"""Nested settings as dotted fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Every leaf of nested mappings by its dotted name: ``{"a": {"b": 1}}`` is ``{"a.b": 1}``.

    A list that holds mappings is opened too, its items named by their place; another list is a leaf.
    """
    if isinstance(value, Mapping):
        items = [(str(key), inner) for key, inner in value.items()]
    elif isinstance(value, list | tuple) and any(isinstance(inner, Mapping) for inner in value):
        items = [(str(i), inner) for i, inner in enumerate(value)]
    else:
        return {prefix: value}
    fields: dict[str, Any] = {}
    for key, inner in items:
        fields |= flatten(inner, f"{prefix}.{key}" if prefix else key)
    return fields
