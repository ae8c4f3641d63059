"""Figures by rules on a study's axes and on what was measured.

A rule looks at the data and yields pictures, none where it does not apply; ``RULES`` lists all rules. A new
kind of figure is one function and its line there; no study names its figures.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes

from titans_platform.evals.by_position import CARRIED, FRESH, WINDOW, ByPosition
from titans_platform.report import picture as plot
from titans_platform.report.picture import (
    KINDS,
    LIGHT,
    MANY,
    MARKERS,
    NARROW,
    STEPS,
    THROUGHPUT,
    Curve,
    Dimension,
    Draw,
    FigureData,
    Line,
    Picture,
    Series,
    axis_value,
    coloured,
    ordered,
    panel,
)
from titans_platform.report.table import TableRow, task_of
from titans_platform.text import NONE

ROWS = 24
"""Maximum rows with a panel or a dot each; of more, the first ones."""
MIN_LOG_RATIO = 4.0
"""Ratio of largest to smallest value from which a scale is logarithmic."""
ALONE = (4.2, 3.0)
"""Width and height in inches of a single panel."""
GREY = f"; of more than {MANY} rows, the highest and lowest at the end are coloured."
LOOKS = {
    CARRIED: ("state carried from the start", "a", "o"),
    FRESH: ("new state every row", "b", "s"),
    WINDOW: ("best window", "c", "^"),
}
POSITION = "position (tokens read)"
READ = (
    "Held-out texts read on the state carried from their start, on a new state every row and, where "
    "measured, on a new state every row after a window of rows before it. Dotted: the end of the first row."
)
GAIN = (
    "Loss on a new state every row less loss on the carried state, from the second row on: above 0 what the "
    "state holds of earlier rows helps, below 0 it harms."
)


def rows_side_by_side(data: FigureData) -> Iterator[Picture]:
    """No axes: for each column a panel with a dot per row, and the paper's numbers."""
    columns, chance, shared = data.table.columns, data.table.chance, data.table.run.scale.comparable
    if data.axes or len(data.rows) > ROWS or len(columns) > MANY:
        return
    panels = []
    for key, column in columns.items():
        options = {"rows": data.rows, "key": key, "column": column, "chance": chance.get(key)}
        panels.append(panel(column.heading, plot.dots, comparable=shared, **options))
    caption = "Large dot and bar: mean and one standard deviation over seeds; small dots: single seeds; "
    caption += "dotted line: chance."
    if any(row.paper.get(key) is not None for row in data.rows for key in columns):
        where = "on the same scale" if shared else "on a scale of their own, at the top"
        caption += f" Diamonds: the paper's numbers, {where}."
    yield Picture("columns", "The columns of the table", caption, panels, (3.7, 0.9 + 0.2 * len(data.rows)))


def heat_maps(data: FigureData) -> Iterator[Picture]:
    """Yield a heat map of two numeric axes for each value of the other axes."""
    grid = [axis for axis in data.axes if axis.numeric and not axis.is_length]
    if len(grid) != 2 or any(axis.is_length for axis in data.axes):
        return
    down, across = grid
    groups = groups_of(data, [axis for axis in data.axes if axis not in grid])
    size = (0.6 + 0.52 * len(across.values), 0.75 + 0.3 * len(down.values))
    for key, column in data.measures.items():
        means = [row.means[key] for row in data.rows if key in row.means]
        scale, panels = plot.heat_scale(means, column, data.table.chance.get(key)), []
        for name, rows in groups:
            at = {}
            for row in rows:
                missing = "failed" if row.failed else NONE
                at[row.axes[across.key], row.axes[down.key]] = row.means.get(key, missing)
            panels.append(heat_panel(name, at, across, down, column=column, scale=scale))
        caption = (
            f"Mean over seeds; stronger colour is better, on one scale over all panels ({column.better}); "
            f"what is no better than chance is palest. Hatched: no number.{_timing(data, [key])}"
        )
        title = f"{column.titled()} over {down.title} and {across.title}"
        yield Picture(f"grid-{key}", title, caption, panels, size)


def heat_panel(
    name: str, at: Mapping[Any, float | str], across: Dimension, down: Dimension, **options: Any
) -> Draw:
    """Return a panel of a heat map, with the mean or the text of each (x, y)."""
    tiles = [[at.get((x, y), "") for x in across.values] for y in down.values]
    return panel(name, plot.heat, across.title, down.title, tiles=tiles, across=across, down=down, **options)


def against_a_field(data: FigureData) -> Iterator[Picture]:
    """Yield every measure as lines against one numeric axis, or a length among others."""
    lengths = [axis for axis in data.axes if axis.is_length]
    numeric = [axis for axis in data.axes if axis.numeric]
    if not lengths and len(numeric) != 1:
        return
    x = (lengths or numeric)[0]
    rest = [axis for axis in data.axes if axis is not x]
    groups = groups_of(data, rest)
    shaded = len(rest) == 1 and rest[0].numeric and len(groups) <= len(STEPS)
    names = ordered(len(groups)) if shaded else KINDS
    looks = list(zip(itertools.cycle(names), itertools.cycle(MARKERS), groups, strict=False))
    low, high = float(x.values[0]), float(x.values[-1])
    draw = partial(plot.lines, logarithmic=x.is_length or (low > 0 and high / low >= MIN_LOG_RATIO))
    panels, shown = [], []
    for key, column in data.measures.items():
        shown = []
        for colour, marker, (name, rows) in looks:
            points = {float(row.axes[x.key]): row.values[key] for row in rows if row.values.get(key)}
            shown.append(Line(name or column.title, points, colour, marker))
        panels.append(panel(column.heading, draw, x.title, shown=shown))
    caption = f"Mean over seeds; bars: one standard deviation.{_timing(data, data.measures)}"
    key = f"against-{x.key.rpartition('.')[2]}"
    legend = shown if len(shown) > 1 else ()
    yield Picture(key, f"Every measure against {x.title}", caption, panels, legend=legend)


def against_measured_length(data: FigureData) -> Iterator[Picture]:
    """Measures at several lengths against tokens, a panel for each."""
    for key, column in data.table.columns.items():
        lines = [Line(row.name, row.lengths[key]) for row in data.rows if row.lengths.get(key)]
        if not lines:
            continue
        shown, grey = coloured(lines)
        caption = f"Measured at each length in tokens; {column.better}; bars: one standard deviation{GREY}"
        drawn = panel(column.heading, plot.lines, "tokens", logarithmic=True, shown=shown, grey=grey)
        title = f"{column.titled()} against the length that is read"
        yield Picture(f"length-{key}", title, caption, [drawn], ALONE, shown)


def depth_maps(data: FigureData) -> Iterator[Picture]:
    """Yield a heat map of depth against length for each task that has buckets of depth.

    Columns that measure a task at different lengths share a map, and columns that measure it alike have one.
    """
    by_row = {row.row.name: depths(row) for row in data.table.rows}
    drawn: list[tuple[str, Any]] = []
    for task, key in dict.fromkeys(measured for by_task in by_row.values() for measured in by_task):
        maps = {name: by_task[task, key] for name, by_task in by_row.items() if (task, key) in by_task}
        column = data.table.columns.get(key)
        if not column or (task, maps) in drawn:
            continue  # no column of the table measures it, or one before did
        suffix = f"-{key}" if any(task == other for other, _ in drawn) else ""
        drawn.append((task, maps))
        places = {place for at in maps.values() for place in at}
        across = Dimension("length", tuple(sorted({length for length, _ in places})), "tokens")
        order = sorted({depth for _, depth in places}, key=lambda depth: int(depth.partition("-")[0]))
        down = Dimension("depth", tuple(order), "depth")
        scale, panels = plot.heat_scale([0.0, column.factor], column, None), []
        for name, measured in list(maps.items())[:ROWS]:
            at = {place: column.factor * statistics.fmean(values) for place, values in measured.items()}
            panels.append(heat_panel(name, at, across, down, column=column, scale=scale))
        caption = "Accuracy by the needle's depth in the context (0%: at its beginning) and the length in "
        caption += "tokens; mean over seeds."
        size = (0.9 + 0.52 * len(across.values), 0.75 + 0.3 * len(down.values))
        yield Picture(f"depth-{task}{suffix}", f"{task}{suffix} over depth and length", caption, panels, size)


def depths(row: TableRow) -> dict[tuple[str, str], dict[tuple[float, str], list[float]]]:
    """Return accuracy at (tokens, depth) by task and its first column, a number for each seed."""
    maps: dict[tuple[str, str], dict[tuple[float, str], list[float]]] = {}
    columns: dict[tuple[str, float, str], str] = {}
    for result in row.results:
        for key, buckets in result.buckets.items():
            column, task, length = task_of(key)
            at = {(float(length or 0), d): float(x) for d, x in buckets.items() if d.endswith("%")}
            # another column may measure a task of this name, at this length, with other options
            taken = any(columns.setdefault((task, *place), column) != column for place in at)
            first = next((known for name, known in maps if name == task), column)
            measured = maps.setdefault((task, column if taken else first), {})
            for place, value in at.items():
                measured.setdefault(place, []).append(value)
    return {key: measured for key, measured in maps.items() if measured}


def loss_picture(result: ByPosition, key: str, title: str) -> Picture:
    """Draw the loss by position of one run, a line for each way of reading, and the gain of its state."""
    # each bucket at its centre on a logarithmic scale
    buckets = {math.sqrt(first * last): (first, last) for first, last in result.buckets()}
    lines = []
    for mode in result.shown:
        label, colour, marker = LOOKS[mode.partition("-")[0]]
        points = {x: (result.loss(mode, *bucket)[0],) for x, bucket in buckets.items()}
        lines.append(Line(label, points, colour, marker))
    gain = Line("gain", {x: (result.gain(*bucket)[0],) for x, bucket in buckets.items() if x > result.row})
    panels = [
        panel("Loss", plot.by_position, POSITION, "nats a token", shown=lines, row=result.row),
        panel("Gain from the carried state", plot.by_position, POSITION, "nats a token", shown=[gain]),
    ]
    return Picture(key, title, f"{READ} {GAIN}", panels, ALONE, lines)


def trials_of_a_search(data: FigureData) -> Iterator[Picture]:
    """Draw the trials of a search: the objective against each searched field."""
    params = {key: value for trial in data.trials for key, value in trial["params"].items()}
    numeric = [key for key, value in params.items() if not isinstance(axis_value(value), str)]
    if not numeric:
        return
    panels = [panel(key.rpartition(".")[2], _trials, trials=data.trials, key=key) for key in numeric]
    caption = "The objective of the search at each trial's last step, against each searched field; "
    caption += "dark: trained to the end, pale: stopped early."
    yield Picture("search", "The trials of the search", caption, panels, NARROW)


def _trials(axis: Axes, trials: Sequence[Mapping], key: str) -> None:
    whole = max(trial["steps"] for trial in trials)
    shown = [t for t in trials if not isinstance(axis_value(t["params"].get(key)), str)]
    colours = [LIGHT["accent" if trial["steps"] == whole else "ghost"] for trial in shown]
    xs = [float(trial["params"][key]) for trial in shown]
    axis.scatter(xs, [trial["value"] for trial in shown], s=10, color=colours, linewidths=0)
    if min(xs) > 0 and max(xs) / min(xs) > 10:
        axis.set_xscale("log")


def learning_curves(data: FigureData) -> Iterator[Picture]:
    """Training loss by step, a line for each row."""
    lines = []
    for row in (row for row in data.rows if row.curves):
        by_step: dict[float, list[float]] = {}
        for step, loss in itertools.chain.from_iterable(map(smoothed, row.curves)):
            by_step.setdefault(step, []).append(loss)
        means = {step: (statistics.fmean(x),) for step, x in by_step.items() if len(x) == len(row.curves)}
        lines.append(Line(row.name, means))
    if lines:
        shown, grey = coloured(lines)
        caption = f"Training loss (nats), a running mean over a twentieth of the steps, mean over seeds{GREY}"
        drawn = panel("", plot.lines, "step", log_y=True, shown=shown, grey=grey)
        yield Picture("curves", "Learning curves", caption, [drawn], (6.0, 3.2), shown)


def smoothed(curve: Curve, points: int = 60) -> list[tuple[float, float]]:
    """Return a running mean over a twentieth of the points, thinned to ``points``."""
    values, half = [loss for _, loss in curve], max(1, len(curve) // 40)
    around = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    means = [(float(step), statistics.fmean(near)) for (step, _), near in zip(curve, around, strict=True)]
    # the last point, the final loss, is always kept
    return means[:-1][:: max(1, len(means) // points)] + means[-1:]


RULES = (
    rows_side_by_side, heat_maps, against_a_field, against_measured_length, depth_maps, trials_of_a_search,
    learning_curves,
)  # fmt: skip


def pictures(data: FigureData) -> list[Picture]:
    """Return every figure of a study, in the order of the report."""
    return [picture for rule in RULES for picture in rule(data)]


def groups_of(data: FigureData, axes: Sequence[Dimension]) -> list[tuple[str, list[Series]]]:
    """Group the rows by their values on these axes; reference rows are left out."""
    groups = []
    for values in itertools.product(*(axis.values for axis in axes)):
        selected = dict(zip((axis.key for axis in axes), values, strict=True))
        rows = [row for row in data.rows if not row.reference and selected.items() <= dict(row.axes).items()]
        if rows:
            # a number after the title of its axis
            pairs = zip(axes, values, strict=True)
            texts = (value if isinstance(value, str) else f"{axis.title} {value:g}" for axis, value in pairs)
            groups.append((", ".join(texts), rows))
    return groups


def _timing(data: FigureData, keys: Iterable[str]) -> str:
    """Caption's note on throughput that was timed while other cells ran."""
    beside = [THROUGHPUT, *data.table.timed] if data.table.side_by_side else []
    timed = [data.measures[key].title for key in keys if key in beside]
    return f" {', '.join(timed)}: timed while other cells ran on the same machine." if timed else ""
