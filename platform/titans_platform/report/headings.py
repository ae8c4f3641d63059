"""How a column of the table is called: in the terminal, Markdown, LaTeX, CSV, the page and the figures."""

from __future__ import annotations

from titans_platform.study.spec import Column


def titled(column: Column) -> str:
    """A measure with its unit."""
    return f"{column.title} ({column.unit})" if column.unit else column.title


def arrow(column: Column) -> str:
    """The way that is better, as a sign."""
    return "↑" if column.higher_is_better else "↓"


def better(column: Column) -> str:
    """The way that is better, in words."""
    return "higher is better" if column.higher_is_better else "lower is better"


def heading(column: Column) -> str:
    """A measure with its unit and the way that is better."""
    return f"{titled(column)} {arrow(column)}"


def stacked(column: Column) -> str:
    """The same word by word, one below the other: narrow enough for a terminal of 80 columns."""
    return "\n".join([*column.title.split(), f"{column.unit} {arrow(column)}".strip()])


def machine(key: str, column: Column) -> str:
    """A column's key with the unit its numbers have, for CSV."""
    return f"{key} ({column.unit})" if column.unit else key
