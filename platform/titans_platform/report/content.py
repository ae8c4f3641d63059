"""What every view of the table shows: its numbers as text, its title, and the notes below it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from titans_platform.report.table import Discrimination, Table, TableRow, best_rows, discriminate
from titans_platform.text import NONE, commit, count, number, plural

DAGGERS = "†‡§¶"
ERRORS = (
    "Standard errors: the larger of what seeds and what items give; of items, half of Wilson's interval at "
    "one standard error, which is not 0 where all are right or all are wrong."
)
BOLD = "Bold: the best row of a column, where it is better than chance"


@dataclass(frozen=True)
class Shown:
    """One number of the table as text: the mean over seeds and what stands beside it."""

    mean: str
    """The mean; `failed` or a dash where there is none."""
    sd: str
    seeds: str
    """`2/3` where seeds are missing."""
    paper: str
    best: bool

    def __str__(self) -> str:
        spread = f"±{self.sd}" if self.sd else ""
        return f"{self.mean}{spread} {self.seeds}".rstrip()


def shown(table: Table, row: TableRow, key: str) -> Shown:
    """A row's number in a column."""
    entry, decimals = row.entries[key], table.study.columns[key].decimals
    missing = "failed" if row.failures else NONE
    return Shown(
        missing if entry.mean is None else number(entry.mean, decimals),
        "" if entry.sd is None else number(entry.sd, decimals),
        f"{len(entry.values)}/{entry.wanted}" if len(entry.values) < entry.wanted else "",
        number(entry.paper, 2),
        row.row.name in best_rows(table, key),
    )


def sizes(row: TableRow) -> list[str]:
    """Parameters and state bytes of a row's model."""
    return [count(row.figure_of("parameters")), count(row.figure_of("state_bytes"))]


def body(
    table: Table, keys: Sequence[str] | None = None, ours: Callable[[Shown], str] = str
) -> list[list[str]]:
    """The lines of the table: name, ours and the paper's for each column, parameters, state bytes.

    A column for which the paper has no number has none for it here.
    """
    lines = []
    for row in table.rows:
        fields = [body_name(table, row)]
        for key in keys or table.study.columns:
            found = shown(table, row, key)
            fields += [ours(found), *[found.paper] * has_paper(table, key)]
        lines.append([*fields, *sizes(row)])
    return lines


def chance_line(table: Table, keys: Sequence[str] | None = None) -> list[str]:
    """What guessing measures in each column, laid out as a line of the body."""
    fields = ["chance"]
    for key in keys or table.study.columns:
        level = number(table.chance.get(key), table.study.columns[key].decimals)
        fields += [level, *[""] * has_paper(table, key)]
    return [*fields, "", ""]


def has_paper(table: Table, key: str) -> bool:
    """Whether the paper has a number in this column."""
    return any(row.entries[key].paper is not None for row in table.rows)


def body_name(table: Table, row: TableRow) -> str:
    """The row's name with the marks of other commits."""
    return row.row.name + marks_of(table, row)


def marks_of(table: Table, row: TableRow) -> str:
    """The marks of the commits, other than the present one, that made some of the row's cells."""
    marks = footmarks(table)
    return "".join(sorted({marks[made] for made in row.stale if made in marks}))


def footmarks(table: Table) -> dict[str, str]:
    """A mark for every other commit that made some of the table's cells; none where one made all."""
    if only_commit(table):
        return {}
    commits = sorted({made for row in table.rows for made in row.stale})
    return {made: DAGGERS[min(i, len(DAGGERS) - 1)] for i, made in enumerate(commits)}


def only_commit(table: Table) -> str:
    """The one commit that made every cell; empty where there are several."""
    made = {str(result["commit"]) for result in table.results}
    return made.pop() if len(made) == 1 else ""


def title(table: Table) -> str:
    """The table's one-line title."""
    seeds = max((len(row.cells) for row in table.rows), default=0)
    return f"{table.study.name} at scale {table.scale_name}: mean ± sd over {plural(seeds, 'seed')}"


def bold_note(table: Table) -> str:
    """What bold means, and which rows it leaves out."""
    apart = [row.row.name for row in table.rows if row.row.reference]
    return BOLD + (f"; {', '.join(apart)} left out, for reference only." if apart else ".")


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
    if table.side_by_side and table.timed:
        timed = ", ".join(table.study.columns[key].title for key in table.timed)
        lines.append(f"{timed}: timed while other cells ran on the same machine.")
    for made, mark in footmarks(table).items():
        lines.append(f"{mark} some cells were made by commit {commit(made)}; --rerun-stale redoes them.")
    if (made := only_commit(table)) not in ("", table.commit):
        lines.append(
            f"All cells were made by commit {commit(made)}; the code here is {commit(table.commit)}."
        )
    for row in table.rows if failures else ():
        lines += [f"{row.row.name}: failed: {reason[:200]}" for reason in row.failures]
    if table.missing:
        has = "has" if table.missing == 1 else "have"
        cells = plural(table.missing, "cell")
        lines.append(f"{cells} {has} no result yet; the same sweep run makes only what is missing.")
    return lines


def summaries(table: Table) -> list[list[str]]:
    """How far each column tells the rows apart, in clauses that a line should not break."""
    return [_clauses(table, found) for found in discriminate(table)]


def _clauses(table: Table, found: Discrimination) -> list[str]:
    column = table.study.columns[found.column].title
    if found.best == found.worst:
        return [f"{column}: all rows are equal"]
    parts = [f"{column}: best {found.best}, worst {found.worst}"]
    if found.gap is not None:
        own = f"({number(found.pair_gap, 1)} by these two rows' own sd)"
        parts.append(f"{number(found.gap, 1)} pooled sd apart {own}")
    if found.above_chance is not None:
        side = "above" if found.above_chance >= 0 else "below"
        parts.append(f"{found.first} {number(abs(found.above_chance), 1)} standard errors {side} chance")
    return parts
