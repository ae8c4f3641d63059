"""The table as a person reads it: in the terminal, in Markdown, and as CSV."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from titans_platform.report.table import Discrimination, Entry, Table, TableRow, discriminate
from titans_platform.study.spec import Column

DAGGERS = "†‡§¶"
SHORTEST = 12
"""Characters of a row's name that must be left to tell rows apart."""
ERRORS = (
    "Standard errors: the larger of what seeds and what items give; of items, half of Wilson's interval at "
    "one standard error, which is not 0 where all are right or all are wrong."
)


def number(value: float | None, decimals: int) -> str:
    """A number with its column's decimals, a dash where there is none."""
    if value is None:
        return "—"
    return f"{value:.{decimals}f}" if abs(value) < 1e5 else f"{value:.1e}"


def ours(entry: Entry, column: Column, failed: bool = False) -> str:
    """Mean and spread over seeds; the count of seeds where some are missing."""
    some = f" {len(entry.values)}/{entry.wanted}" if len(entry.values) < entry.wanted else ""
    if entry.mean is None:
        return ("failed" if failed else "—") + some
    spread = f"±{number(entry.sd, column.decimals)}" if entry.sd is not None else ""
    return f"{number(entry.mean, column.decimals)}{spread}{some}"


def count(value: int | None) -> str:
    """A count in three digits: 412K, 1.3M."""
    if value is None:
        return "—"
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        # from where three digits round up to the unit
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{unit}"
    return str(value)


def footmarks(table: Table) -> dict[str, str]:
    """A mark for every other commit that made some of the table's cells; none where one made all."""
    if only_commit(table):
        return {}
    commits = sorted({commit for row in table.rows for commit in row.stale})
    return {commit: DAGGERS[min(i, len(DAGGERS) - 1)] for i, commit in enumerate(commits)}


def only_commit(table: Table) -> str:
    """The one commit that made every cell; empty where there are several."""
    made = {str(result["commit"]) for row in table.rows for result in row.results}
    return made.pop() if len(made) == 1 else ""


def title(table: Table) -> str:
    """The table's one-line title."""
    seeds = max((len(row.cells) for row in table.rows), default=0)
    plural = "s" if seeds != 1 else ""
    return f"{table.study.name} at scale {table.scale_name}: mean ± sd over {seeds} seed{plural}"


def footnotes(table: Table, failures: bool = True) -> list[str]:
    """What must be said beside the numbers: comparability, notes, errors, other commits, failures, gaps."""
    lines = []
    if not table.scale.comparable:
        lines.append(
            "The columns at this scale are small substitutes: only the order of rows, never a number, "
            "can be held against the paper's."
        )
    if table.scale.note:
        lines.append(" ".join(table.scale.note.split()))
    if any(found.above_chance is not None for found in discriminate(table)):
        lines.append(ERRORS)
    for commit, mark in footmarks(table).items():
        lines.append(f"{mark} some cells were made by commit {short(commit)}; --rerun-stale redoes them.")
    if (made := only_commit(table)) not in ("", table.commit):
        lines.append(
            f"All cells were made by commit {short(made)}, the code here is of {short(table.commit)}."
        )
    for row in table.rows if failures else ():
        lines.extend(f"{row.row.name}: failed: {reason}" for reason in row.failures)
    if table.missing:
        cells = "1 cell has" if table.missing == 1 else f"{table.missing} cells have"
        lines.append(f"{cells} no result yet: the same sweep run makes only what is missing.")
    return lines


def short(commit: str) -> str:
    """A commit in 12 digits, and that the tree was changed after it where it was."""
    head, dirty, _ = commit.partition("-dirty")
    return head[:12] + dirty


def has_paper(table: Table, key: str) -> bool:
    """Whether the paper has a number in this column."""
    return any(row.entries[key].paper is not None for row in table.rows)


def body_name(table: Table, row: TableRow) -> str:
    """The row's name with the marks of other commits."""
    marks = footmarks(table)
    return row.row.name + "".join(sorted({marks[commit] for commit in row.stale if commit in marks}))


def heading(column: Column) -> str:
    """A column's title with its unit and the way that is better."""
    unit = f" {column.unit}" if column.unit else ""
    return f"{column.title}{unit} {'↑' if column.higher_is_better else '↓'}"


def body(table: Table, keys: Sequence[str] | None = None) -> list[list[str]]:
    """The lines of the table: name, ours and the paper's for each column, parameters, state bytes.

    A column for which the paper has no number has none for it here.
    """
    columns = {key: table.study.columns[key] for key in keys or table.study.columns}
    lines = []
    for row in table.rows:
        fields = [body_name(table, row)]
        for key, column in columns.items():
            fields.append(ours(row.entries[key], column, bool(row.failures)))
            if has_paper(table, key):
                fields.append(number(row.entries[key].paper, 2))
        sizes = [count(row.figure_of("parameters")), count(row.figure_of("state_bytes"))]
        lines.append([*fields, *sizes])
    return lines


def _chance_line(table: Table, keys: Sequence[str] | None = None) -> list[str]:
    fields = ["chance"]
    for key in keys or table.study.columns:
        fields.append(number(table.chance.get(key), table.study.columns[key].decimals))
        fields += [""] * has_paper(table, key)
    return [*fields, "", ""]


def terminal(table: Table, width: int = 80) -> RenderableType:
    """The whole view for a terminal; at 80 columns only a long row name loses its end.

    Columns that do not fit beside each other stand in tables below each other.
    """
    grids = _fitting(table, list(table.study.columns), width)
    notes = [Text(note, style="dim") for note in footnotes(table)]
    said = [Text(_broken(clauses, width)) for clauses in _summaries(table)]
    return Group(title(table), *grids, *said, "", *notes)


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
    for key in keys:
        heading = _stacked(table.study.columns[key])
        grid.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
        if has_paper(table, key):
            grid.add_column("paper", justify="right", style="dim", no_wrap=True, vertical="bottom")
    last = keys[-1] == list(table.study.columns)[-1]
    for size in ("para-\nmeters", "state\nbytes") if last else ():
        grid.add_column(size, justify="right", no_wrap=True, vertical="bottom")
    kept = None if last else -2
    for row, name, line in zip(table.rows, names, body(table, keys), strict=True):
        grid.add_row(name, *line[1:kept], style="dim" if row.row.reference else "")
    grid.add_section()
    grid.add_row(*_chance_line(table, keys)[:kept], style="italic dim")
    return grid


def _cut(name: str, room: int) -> str:
    """The name in ``room`` characters where that leaves some of it; its marks stay."""
    bare = name.rstrip(DAGGERS)
    kept = room - 1 - (len(name) - len(bare))
    return name if len(name) <= room or kept < 4 else f"{bare[:kept].rstrip()}…{name[len(bare) :]}"


def _stacked(column: Column) -> str:
    """A column's heading word by word, unit and arrow last: narrow enough for 80 columns."""
    arrow = "↑" if column.higher_is_better else "↓"
    return "\n".join([*column.title.split(), f"{column.unit} {arrow}".strip()])


def _times(value: float | None) -> str:
    return "—" if value is None else f"{value:.1f}"


def _clauses(table: Table, found: Discrimination) -> list[str]:
    """How far a column tells the rows apart, in parts that a line should not break."""
    title = table.study.columns[found.column].title
    if found.best == found.worst:
        return [f"{title}: all rows are equal"]
    parts = [f"{title}: best {found.best}, worst {found.worst}"]
    if found.gap is not None:
        parts += [f"{_times(found.gap)} pooled sd apart ({_times(found.pair_gap)} by these two rows' own sd)"]
    if found.above_chance is not None:
        side = "above" if found.above_chance >= 0 else "below"
        parts += [f"{found.first} {_times(abs(found.above_chance))} standard errors {side} chance"]
    return parts


def _summaries(table: Table) -> list[list[str]]:
    return [_clauses(table, found) for found in discriminate(table)]


def _broken(clauses: list[str], width: int) -> str:
    """The clauses on as few lines as hold them whole, later lines indented."""
    lines = [clauses[0]]
    for clause in clauses[1:]:
        longer = f"{lines[-1]}; {clause}"
        if len(longer) < width:
            lines[-1] = longer
        else:
            lines[-1] += ";"
            lines.append(f"  {clause}")
    return "\n".join(lines)


def summary_lines(table: Table) -> list[str]:
    """Whether each column discriminates, a line a column."""
    return ["; ".join(clauses) for clauses in _summaries(table)]


def markdown(table: Table, pictures: Sequence[tuple[str, str]] = ()) -> str:
    """The table as Markdown, with the notes, the pictures (title, path), and where its numbers come from."""
    heads = [""]
    for key, column in table.study.columns.items():
        heads += [heading(column), *["paper"] * has_paper(table, key)]
    heads += ["parameters", "state bytes"]
    lines = [f"**{title(table)}**", "", _md(heads), "|:--|" + "--:|" * (len(heads) - 1)]
    lines += [_md(line) for line in body(table)]
    lines += [_md([f"*{text}*" if text else "" for text in _chance_line(table)]), ""]
    lines += [f"- {line}" for line in (*summary_lines(table), *footnotes(table))]
    lines += [line for name, path in pictures for line in ("", f"![{name}]({path})", f"*{name}*")]
    lines += ["", "<details><summary>Where each number comes from</summary>", "", *_provenance(table), ""]
    return "\n".join([*lines, "</details>", ""])


def _md(fields: list[str]) -> str:
    return "| " + " | ".join(field.replace("|", "\\|") for field in fields) + " |"


def _provenance(table: Table) -> list[str]:
    lines = [_md(["row", "seed", "cell", "MLflow run", "commit"]), "|:--|--:|:--|:--|:--|"]
    for row in table.rows:
        for result in row.results:
            run = str(result.get("mlflow_run_id") or "—")
            origin = [f"`{result['cell']}`", f"`{run}`", f"`{short(str(result['commit']))}`"]
            lines.append(_md([row.row.name, str(result["seed"]), *origin]))
    return lines
