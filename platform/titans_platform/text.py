"""Formatting of numbers, times and nested settings for people."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from jinja2 import Environment
    from rich.console import Console
    from rich.table import Table

NONE = "—"
"""Placeholder for a missing number."""


def number(value: float | None, decimals: int) -> str:
    """Format a number with its column's decimals; a dash for None."""
    if value is None:
        return NONE
    return f"{value:.{decimals}f}" if abs(value) < 1e5 else f"{value:.1e}"


def count(value: float | None) -> str:
    """Format a count in three digits: 412K, 1.3M."""
    if value is None:
        return NONE
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        # from where three digits round up to the unit
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{unit}"
    return f"{value:g}"


def short(value: float, decimals: int | None = None) -> str:
    """Format a number for a small space, such as a tick: 50K, 1234, 1.5; no more digits than needed."""
    if abs(value) >= 10_000:
        return count(value)
    if decimals is None:
        return f"{value:g}"
    return f"{value:.{decimals}f}" if abs(value) < 1000 else f"{value:.0f}"


def tokens(value: float) -> str:
    """Format a number of tokens as people write it: 512, 2K, 16K; K is 1024."""
    return f"{value / 1024:g}K" if value >= 1024 and value % 1024 == 0 else f"{value:g}"


def clock(seconds: float | None) -> str:
    """Seconds as people write them: 45s, 3m05s, 2h10m."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    if not minutes:
        return f"{rest}s"
    hours, left = divmod(minutes, 60)
    return f"{hours}h{left:02d}m" if hours else f"{minutes}m{rest:02d}s"


def plural(n: int, noun: str) -> str:
    """Format a number of things: 1 seed, 3 seeds."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def commit(name: str) -> str:
    """Shorten a commit to 12 digits; `-dirty` is kept."""
    head, dirty, _ = name.partition("-dirty")
    return head[:12] + dirty


def plain(text: str) -> str:
    """Return a text as every command reads it: lines end in \\n, without a byte order mark, and U+FFFD in
    place of half a surrogate pair, which JSON may have.
    """
    text = text.removeprefix("\ufeff")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text if text.isascii() else re.sub("[\ud800-\udfff]", "\ufffd", text)


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return every leaf of nested mappings by its dotted name: ``{"a": {"b": 1}}`` is ``{"a.b": 1}``.

    A list that holds mappings is flattened too, its items keyed by index; any other list is a leaf.
    """
    if isinstance(value, list | tuple) and any(isinstance(inner, Mapping) for inner in value):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return {prefix: value}
    fields: dict[str, Any] = {}
    for key, inner in value.items():
        fields |= flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    return fields


def texts(value: Any) -> Iterator[str]:
    """Yield every text in a JSON value, keys apart."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from texts(inner)


def plain_console(**options: Any) -> Console:
    """Return a console that prints text as it is: without markup, names may contain brackets."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False, **options)


def table(*headings: str, left: int = 1, vertical: Literal["top", "bottom"] = "top", **options: Any) -> Table:
    """Create an empty table for a terminal; the first ``left`` columns are text, the others are numbers."""
    from rich import box
    from rich.table import Table

    options.setdefault("box", box.SIMPLE_HEAD)
    grid = Table(**options)
    for i, heading in enumerate(headings):
        how: dict[str, Any] = {"overflow": "fold"} if i < left else {"justify": "right", "no_wrap": True}
        grid.add_column(heading, vertical=vertical, **how)
    return grid


def render(template: Path, **values: Any) -> str:
    """Render a file as a template with these values, which are escaped in HTML only."""
    return _templates(template.parent).get_template(template.name).render(**values)


@cache
def _templates(folder: Path) -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

    options = {"autoescape": select_autoescape(["html"]), "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=FileSystemLoader(folder), undefined=StrictUndefined, **options)
    environment.filters.update(number=number, count=count, commit=commit, quote=shlex.quote)
    environment.filters["json"] = partial(json.dumps, ensure_ascii=False)
    environment.globals.update(none_sign=NONE)
    return environment
