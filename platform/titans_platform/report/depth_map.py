"""How deep a needle lay, against how long the row was: a tile for each, a panel a row of the study."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from titans_platform.report import plot
from titans_platform.report.figure_data import Axis, FigureData, Series
from titans_platform.report.picture import Picture, panel
from titans_platform.report.table import TableRow, task_of

PER_ROW = 12
"""Rows from which a panel each says nothing any more."""


def depth_maps(data: FigureData) -> Iterator[Picture]:
    """A picture for each task whose results have depths, over all lengths it was taken at."""
    rows = [row for row in data.table.rows if row.results]
    found = {row.row.name: depths(row) for row in rows}
    for task in dict.fromkeys(task for tiles in found.values() for task in tiles):
        shown = {name: tiles[task] for name, tiles in found.items() if task in tiles}
        owner = next(key for key in data.table.columns if _has(rows, key, task))
        places = [place for tiles in shown.values() for place in tiles]
        across = Axis("length", tuple(sorted({length for length, _ in places})), "tokens")
        down = Axis("depth", tuple(sorted({depth for _, depth in places}, key=_start)), "depth")
        if len(shown) > PER_ROW or not across.numeric:
            continue
        column = data.table.columns[owner]
        scale = plot.heat_scale([0.0, column.factor], column, None)
        panels = []
        for name, tiles in shown.items():
            at = {
                place: Series(name, {}, {task: tuple(column.factor * value for value in values)}, {})
                for place, values in tiles.items()
            }
            grid = [[at.get((float(x), str(y))) for x in across.values] for y in down.values]
            draw = partial(plot.heat, tiles=grid, key=task, column=column, scale=scale)
            means = [series.means[task] for series in at.values()]
            alt = f"{name}: from {min(means):.0f} to {max(means):.0f} {column.unit}"
            panels.append(panel(name, alt, draw, across.title, down.title, across=across, down=down))
        caption = (
            "Right answers by the needle's depth in the row (0%: at its beginning) and by the row's tokens; "
            "mean over seeds."
        )
        size = (0.9 + 0.52 * len(across.values), 0.75 + 0.3 * len(down.values))
        yield Picture(f"depth-{task}", f"{task} over depth and length", caption, panels, size)


def depths(row: TableRow) -> dict[str, dict[tuple[float, str], tuple[float, ...]]]:
    """Of each task, the share that is right at (tokens, depth), a number for each seed."""
    found: dict[str, dict[tuple[float, str], tuple[float, ...]]] = {}
    for result in row.results:
        for key, buckets in result.get("buckets", {}).items():
            _, task, length = task_of(key)
            for depth, value in _by_depth(buckets).items():
                places = found.setdefault(task, {})
                places[float(length or 0), depth] = (
                    *places.get((float(length or 0), depth), ()),
                    float(value),
                )
    return found


def _by_depth(buckets: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in buckets.items() if name.endswith("%")}


def _has(rows: list[TableRow], column: str, task: str) -> bool:
    keys = (task_of(key) for row in rows for result in row.results for key in result.get("buckets", {}))
    return any(owner == column and name == task for owner, name, _ in keys)


def _start(depth: str) -> int:
    return int(depth.partition("-")[0])
