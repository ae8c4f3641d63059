"""Which figures a study gets: they follow from its axes and from what was measured, by the rules below.

A rule looks at the sheet and gives pictures, or none where it does not apply. A new kind of figure is one
function and its line in ``RULES``; no study names its figures.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from matplotlib.figure import FigureBase

from titans_platform.report import plot
from titans_platform.report.curves import learning_curves
from titans_platform.report.palette import KINDS, MARKERS, Ink, ordered
from titans_platform.report.picture import (
    NARROW,
    ROWS,
    Panel,
    Picture,
    arrow,
    better,
    draw_lines,
    ends,
    groups_of,
    heading,
    mean_of,
    said,
)
from titans_platform.report.plot import Line
from titans_platform.report.series import Axis, Series, Sheet
from titans_platform.study.spec import Column

MANY = 6
"""Lines from which each gets a panel of its own, before the others in grey."""


def rows_side_by_side(sheet: Sheet) -> Iterator[Picture]:
    """Rows without an order: a panel of dots a column, the paper's numbers beside ours."""
    if sheet.axes or len(sheet.rows) > ROWS or len(sheet.columns) > MANY:
        return
    panels = [
        Panel(heading(column), said(sheet, key), partial(_dots, sheet, key))
        for key, column in sheet.columns.items()
    ]
    yield Picture(
        "columns",
        "The columns of the table",
        "Large dot and bar: mean and one standard deviation over seeds; small dots: single seeds; "
        "diamonds: the paper's numbers, on a scale of their own; dotted line: chance.",
        tuple(panels),
        (3.7, 0.75 + 0.2 * len(sheet.rows)),
    )


def _dots(sheet: Sheet, key: str, figure: FigureBase, ink: Ink) -> None:
    column = sheet.measures[key]
    plot.dots(figure, ink, sheet.rows, key, column, sheet.chance.get(key))
    figure.suptitle(heading(column), x=0.01, ha="left", fontsize=8, fontweight="bold", color=ink["ink"])
    figure.supxlabel(better(column), x=0.01, ha="left", fontsize=plot.SMALL, color=ink["muted"])


def heat_maps(sheet: Sheet) -> Iterator[Picture]:
    """Two fields with an order: a tile for each pair, a panel for each value of the other fields."""
    grid = [axis for axis in sheet.axes if axis.numeric and not axis.is_length]
    if len(grid) != 2 or any(axis.is_length for axis in sheet.axes):
        return
    down, across = grid
    rest = [axis for axis in sheet.axes if axis not in grid]
    for key, column in sheet.measures.items():
        means = [mean for row in sheet.rows if (mean := mean_of(row, key)) is not None]
        limits = (min(means), max(means)) if means else (0.0, 1.0)
        panels = [
            Panel(name, f"{name or column.title}: {said(_only(sheet, rows), key)}",
                  partial(_heat, key, column, limits, down, across, name, rows))
            for name, rows in groups_of(sheet, rest)
        ]  # fmt: skip
        yield Picture(
            f"grid-{key}",
            f"{heading(column)} over {down.title} and {across.title}",
            f"Mean over seeds; stronger colour is better, on one scale over all panels ({better(column)}). "
            "Hatched: no number.",
            tuple(panels),
            (0.5 + 0.52 * len(across.values), 0.75 + 0.3 * len(down.values)),
        )


def _heat(
    key: str,
    column: Column,
    limits: tuple[float, float],
    down: Axis,
    across: Axis,
    name: str,
    rows: Sequence[Series],
    figure: FigureBase,
    ink: Ink,
) -> None:
    axis = figure.subplots()
    tiles = {(row.axes[across.key], row.axes[down.key]): row for row in rows}
    plot.heat(axis, ink, tiles, across.values, down.values, key, column, limits)
    plot.labelled(axis, ink, name, across.title, down.title)


def _only(sheet: Sheet, rows: Sequence[Series]) -> Sheet:
    return replace(sheet, rows=tuple(rows))


def against_a_field(sheet: Sheet) -> Iterator[Picture]:
    """One field with an order, or a length among others: every measure as lines against it."""
    lengths = [axis for axis in sheet.axes if axis.is_length]
    numeric = [axis for axis in sheet.axes if axis.numeric]
    if not lengths and len(numeric) != 1:
        return
    x = (lengths or numeric)[0]
    rest = [axis for axis in sheet.axes if axis is not x]
    groups = groups_of(sheet, rest)
    colours = _colours(rest, len(groups))
    panels, legend = [], ()
    for key, column in sheet.measures.items():
        drawn = [
            Line(name or column.title, _against(rows, x.key, key), colour, marker)
            for (name, rows), (colour, marker) in zip(groups, colours, strict=True)
        ]
        legend = legend or tuple(drawn)
        panels.append(Panel(column.title, _trend(column, x.title, drawn), partial(_lines, column, x, drawn)))
    yield Picture(
        f"against-{x.key.rpartition('.')[2]}",
        f"Every measure against {x.title}",
        "Mean over seeds; bars: one standard deviation.",
        tuple(panels),
        legend=legend if len(legend) > 1 else (),
    )


def _colours(axes: Sequence[Axis], count: int) -> list[tuple[str, str]]:
    """Colour and marker of each line: shades where what tells them apart has an order."""
    names = ordered(count) if len(axes) == 1 and axes[0].numeric and count <= 4 else KINDS
    pairs = zip(itertools.cycle(names), itertools.cycle(MARKERS), strict=False)
    return list(itertools.islice(pairs, count))


def _against(rows: Iterable[Series], field: str, key: str) -> Mapping[float, tuple[float, ...]]:
    return {float(row.axes[field]): row.values[key] for row in rows if row.values.get(key)}


def _trend(column: Column, x: str, drawn: Sequence[Line]) -> str:
    return f"{heading(column)} from the smallest to the largest {x}: {ends(drawn, column.decimals)}."


def _lines(column: Column, x: Axis, drawn: Sequence[Line], figure: FigureBase, ink: Ink) -> None:
    axis = figure.subplots()
    numbers = [value for value in x.values if isinstance(value, int | float)]
    spread = min(numbers) > 0 and max(numbers) / min(numbers) >= plot.MIN_LOG_RATIO
    plot.lines(axis, ink, drawn, logarithmic=x.is_length or spread)
    plot.labelled(axis, ink, arrow(column), x.title)


def against_measured_length(sheet: Sheet) -> Iterator[Picture]:
    """What was taken at several lengths, against tokens: few rows in one panel, of many each its own."""
    taken = {
        key: [
            Line(row.name, row.lengths[key], printed=row.printed.get(key, {}))
            for row in sheet.rows
            if row.lengths.get(key)
        ]
        for key in sheet.lengths
    }
    few = {key: drawn for key, drawn in taken.items() if 0 < len(drawn) <= MANY}
    if few:
        yield _side_by_side(sheet, few)
    for key, drawn in taken.items():
        if MANY < len(drawn) <= ROWS:
            yield _one_by_one(sheet.lengths[key], key, drawn)


def _side_by_side(sheet: Sheet, few: Mapping[str, Sequence[Line]]) -> Picture:
    """A panel a measure, the rows in colours."""
    names = list(dict.fromkeys(line.label for drawn in few.values() for line in drawn))
    looks = dict(zip(names, _colours(sheet.axes, len(names)), strict=True))
    panels, legend = [], [Line(name, {}, *look) for name, look in looks.items()]
    for key, drawn in few.items():
        column = sheet.lengths[key]
        coloured = [replace(line, colour=looks[line.label][0], marker=looks[line.label][1]) for line in drawn]
        draw = partial(draw_lines, coloured, (), True, arrow(column), "tokens")
        panels.append(Panel(column.title, _trend(column, "length", drawn), draw))
    caption = "Measured at each length in tokens; mean over seeds, bars: one standard deviation."
    if any(line.printed for drawn in few.values() for line in drawn):
        caption += " Dashed: the paper's."
    return Picture("length", "Against the length that is read", caption, tuple(panels), legend=tuple(legend))


def _one_by_one(column: Column, key: str, drawn: Sequence[Line]) -> Picture:
    """A panel a row, the other rows in grey."""
    limits = plot.span(drawn)
    panels = [
        Panel(
            line.label,
            _trend(column, "length", [line]),
            partial(draw_lines, [line], drawn, True, line.label, "tokens", limits=limits),
        )
        for line in drawn
    ]
    caption = (
        f"Measured at each length in tokens; {better(column)}. Band: one standard deviation over seeds; "
        "grey: the other rows."
    )
    return Picture(f"length-{key}", f"{heading(column)} against length", caption, tuple(panels), NARROW)


def against_every_field(sheet: Sheet) -> Iterator[Picture]:
    """Three fields or more, as in a search: the first column's points against each."""
    numeric = [axis for axis in sheet.axes if axis.numeric and not axis.is_length]
    if len(numeric) < 3:
        return
    key, column = next(iter(sheet.measures.items()))
    panels = [Panel(axis.title, said(sheet, key), partial(_points, sheet, axis, key)) for axis in numeric]
    yield Picture(
        "fields",
        f"{heading(column)} against each field",
        f"A point for each run; {better(column)}.",
        tuple(panels),
        NARROW,
    )


def _points(sheet: Sheet, field: Axis, key: str, figure: FigureBase, ink: Ink) -> None:
    axis = figure.subplots()
    rows = [row for row in sheet.rows if field.key in row.axes]
    plot.points(
        axis, ink, [(row.axes[field.key], value) for row in rows for value in row.values.get(key, ())]
    )
    plot.labelled(axis, ink, "", field.title, sheet.measures[key].title)


def trials_of_a_search(sheet: Sheet) -> Iterator[Picture]:
    """What a search tried: every trial's number against each field it was given."""
    given = [trial.params.items() for trial in sheet.trials]
    numeric = {key: None for pairs in given for key, value in pairs if isinstance(value, int | float)}
    if not numeric:
        return
    panels = [
        Panel(key, f"{len(sheet.trials)} trials against {key}.", partial(_trials, sheet, key))
        for key in numeric
    ]
    yield Picture(
        "search",
        "The trials of the search",
        "The searched number, as far as each trial went, against each field it was given; "
        "dark: to the end of the training, pale: stopped before.",
        tuple(panels),
        NARROW,
    )


def _trials(sheet: Sheet, key: str, figure: FigureBase, ink: Ink) -> None:
    axis = figure.subplots()
    given = [trial for trial in sheet.trials if key in trial.params]
    whole = max(trial.steps for trial in sheet.trials)
    stopped = [(trial.params[key], trial.value) for trial in given if trial.steps < whole]
    ended = [(trial.params[key], trial.value) for trial in given if trial.steps == whole]
    plot.points(axis, ink, ended, stopped)
    plot.labelled(axis, ink, key.rpartition(".")[2].replace("_", " "))


Rule = Callable[[Sheet], Iterable[Picture]]
RULES: tuple[Rule, ...] = (
    rows_side_by_side,
    heat_maps,
    against_a_field,
    against_measured_length,
    against_every_field,
    trials_of_a_search,
    learning_curves,
)


def pictures(sheet: Sheet) -> list[Picture]:
    """Every figure of a study, in the order of the report."""
    return [picture for rule in RULES for picture in rule(sheet)]
