"""The table in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from titans_platform.report.content import (
    DAGGERS,
    body,
    body_name,
    chance_line,
    footnotes,
    has_paper,
    summaries,
    title,
)
from titans_platform.report.headings import stacked
from titans_platform.report.table import Table

SHORTEST = 12
"""Characters of a row's name that must be left to tell rows apart."""


def terminal(table: Table, width: int = 80) -> RenderableType:
    """The whole view for a terminal; at 80 columns only a long row name loses its end.

    Columns that do not fit beside each other stand in tables below each other.
    """
    grids = _fitting(table, list(table.study.columns), width)
    notes = [Text(note, style="dim") for note in footnotes(table)]
    found = [Text(_broken(clauses, width)) for clauses in summaries(table)]
    return Group(title(table), *grids, *found, "", *notes)


def _fitting(table: Table, keys: list[str], width: int) -> list[RichTable]:
    """One table, or several of fewer columns; the last has the sizes of the models."""
    names = [body_name(table, row) for row in table.rows]
    grid = _grid(table, names, keys, width)
    if (over := Console(width=1000).measure(grid).maximum - width) > 0:
        # one line a row, and no number cut
        room = max(map(len, names)) - over
        if room < SHORTEST and len(keys) > 1:
            half = (len(keys) + 1) // 2
            return _fitting(table, keys[:half], width) + _fitting(table, keys[half:], width)
        grid = _grid(table, [_cut(name, room) for name in names], keys, width)
    return [grid]


def _grid(table: Table, names: list[str], keys: Sequence[str], width: int) -> RichTable:
    grid = RichTable(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1) if width >= 100 else 0, show_edge=False)
    grid.add_column("", vertical="bottom")
    heads = []
    for key in keys:
        heads += [(stacked(table.study.columns[key]), ""), *[("paper", "dim")] * has_paper(table, key)]
    last = keys[-1] == list(table.study.columns)[-1]
    heads += [("para-\nmeters", ""), ("state\nbytes", "")] if last else []
    for head, style in heads:
        grid.add_column(head, justify="right", style=style, no_wrap=True, vertical="bottom")
    kept = None if last else -2
    for row, name, line in zip(table.rows, names, body(table, keys), strict=True):
        grid.add_row(name, *line[1:kept], style="dim" if row.row.reference else "")
    grid.add_section()
    grid.add_row(*chance_line(table, keys)[:kept], style="italic dim")
    return grid


def _cut(name: str, room: int) -> str:
    """The name in ``room`` characters where that leaves some of it; its marks stay."""
    bare = name.rstrip(DAGGERS)
    kept = room - 1 - (len(name) - len(bare))
    return name if len(name) <= room or kept < 4 else f"{bare[:kept].rstrip()}…{name[len(bare) :]}"


def _broken(clauses: list[str], width: int) -> str:
    """The clauses on as few lines as hold them whole, later lines indented."""
    lines = [clauses[0]]
    for clause in clauses[1:]:
        if len(lines[-1]) + len(clause) + 2 < width:
            lines[-1] += f"; {clause}"
        else:
            lines[-1] += ";"
            lines.append(f"  {clause}")
    return "\n".join(lines)
