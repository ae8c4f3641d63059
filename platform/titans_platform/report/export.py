"""The table as CSV for a spreadsheet, LaTeX for a paper, Markdown for a web page, lines for a terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from titans_platform.report import content, verdict
from titans_platform.report.content import DAGGERS, SIZES, Shown, fields
from titans_platform.report.table import Table
from titans_platform.text import NONE, commit

ESCAPES = str.maketrans(
    {
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "↑": r"$\uparrow$",
        "↓": r"$\downarrow$",
        "±": r"$\pm$",
        "·": r"$\cdot$",
        NONE: "--",
        "<": "$<$",
        "³": "$^3$",
        **dict(zip(DAGGERS, (r"$\dagger$", r"$\ddagger$", r"\S{}", r"\P{}"), strict=True)),
    }
)
SHORTEST = 12
"""Characters of a row's name that must be left to tell rows apart in a terminal."""


def summary_csv(table: Table) -> str:
    """A line for each row and column, in the column's unit: mean, sd, seeds done, the paper's number."""
    lines: list[list[Any]] = [["row", "column", "mean", "sd", "seeds", "chance", "paper", *SIZES]]
    for row in table.rows:
        for key, entry in row.entries.items():
            numbers = [entry.mean, entry.sd, len(entry.values), table.chance.get(key), entry.paper]
            lines.append([row.row.name, key, *numbers, *map(row.figure_of, SIZES)])
    return _csv(lines)


def cells_csv(table: Table) -> str:
    """A line for each finished cell: its folder and what it measured, in the columns' units."""
    columns = table.columns
    names = ["cell", "seed", "commit", "mlflow_run_id", "train_seconds", "eval_seconds", "tokens"]
    lines: list[list[Any]] = [["row", *names, *(column.titled(key) for key, column in columns.items())]]
    for row in table.rows:
        for result in row.results:
            values = [(column.factor, result["columns"].get(key)) for key, column in columns.items()]
            numbers = [value if value is None else factor * value for factor, value in values]
            # its own row, where a line has several
            lines.append([result.get("row", row.row.name), *map(result.get, names), *numbers])
    return _csv(lines)


def verdict_csv(table: Table) -> str:
    """A line for each row and column beside the first row's: the difference, its interval, the verdict."""
    return _csv(verdict.verdict_rows(table))


def _csv(lines: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    # None is written as nothing
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue()


def latex(table: Table) -> str:
    """The table with booktabs: mean and spread, the best of each column in bold, the paper's beside."""
    caption = " ".join([f"{content.title(table)}.", content.bold_note(table), *content.footnotes(table)])
    chance = [r"\midrule", _tex_line([r"\emph{chance}", *map(tex, content.chance_line(table)[1:])])]
    lines = [
        "% \\usepackage{booktabs}",
        "\\begin{table}[t]",
        "\\centering",
        f"\\caption{{{tex(caption)}}}",
        f"\\label{{tab:{table.run.study.name}-{table.run.scale_name}}}",
        f"\\begin{{tabular}}{{l{'r' * len(fields(table))}rr}}",
        "\\toprule",
        *_tex_heads(table),
        "\\midrule",
        *(
            _tex_line([tex(name), *map(_tex_field, line)])
            for name, *line in content.body(table, ours=_tex_number)
        ),
        *(chance if table.chance else ()),
        "\\bottomrule",
        "\\end{tabular}",
        "\\end{table}",
        "",
    ]
    return "\n".join([*lines, *_tex_verdict(table)])


def _tex_verdict(table: Table) -> list[str]:
    """A table of its own: each row's difference to the first, and what it says of the paper's direction."""
    if (found := verdict.verdict_table(table)) is None:
        return []
    return [
        "\\begin{table}[t]",
        "\\centering",
        f"\\caption{{{tex(f'{found.sentence} {found.method}')}}}",
        f"\\label{{tab:{table.run.study.name}-{table.run.scale_name}-verdict}}",
        f"\\begin{{tabular}}{{{'l' * len(found.heads)}}}",
        "\\toprule",
        _tex_line(map(tex, found.heads)),
        "\\midrule",
        *(_tex_line(map(tex, line)) for line in found.body),
        "\\bottomrule",
        "\\end{tabular}",
        "\\end{table}",
        "",
    ]


def tex(text: str) -> str:
    """Text as LaTeX prints it."""
    return text.translate(ESCAPES)


def _tex_line(texts: Iterable[str]) -> str:
    return " & ".join(texts) + r" \\"


def _tex_field(text: str) -> str:
    """Text of the body, of which numbers are LaTeX already."""
    return text if text.startswith("$") else tex(text)


def _tex_heads(table: Table) -> list[str]:
    over, rules, at = [""], [], 2
    for key, column in table.columns.items():
        width = 1 + content.has_paper(table, key)
        over.append(f"\\multicolumn{{{width}}}{{c}}{{{tex(column.heading)}}}")
        rules.append(f"\\cmidrule(lr){{{at}-{at + width - 1}}}")
        at += width
    under = ["paper" if printed else "ours" for _, printed in fields(table)]
    return [_tex_line([*over, "", ""]), " ".join(rules), _tex_line(["", *under, "params", "state"])]


def _tex_number(found: Shown) -> str:
    if not found.mean[-1].isdigit():
        return found.mean
    mean = f"\\mathbf{{{found.mean}}}" if found.best else found.mean
    spread = f"_{{\\pm {found.sd}}}" if found.sd else ""
    return f"${mean}{spread}$"


def markdown(table: Table, pictures: Sequence[tuple[str, str]] = ()) -> str:
    """The table as Markdown, with the notes, the pictures (title, path), and where its numbers come from."""
    columns = table.columns
    heads = ["paper" if printed else columns[key].heading for key, printed in fields(table)]
    heads = ["", *heads, "parameters", "state bytes"]
    lines = [f"**{content.title(table)}**", "", _md(heads), "|:--|" + "--:|" * (len(heads) - 1)]
    lines += [_md(line) for line in content.body(table)]
    lines += [_md([f"*{text}*" if text else "" for text in content.chance_line(table)]), ""]
    lines += [f"- {line}" for line in (*map("; ".join, content.summaries(table)), *content.footnotes(table))]
    if found := verdict.verdict_table(table):
        lines += [
            "",
            f"{found.sentence} {found.method}",
            "",
            _md(found.heads),
            "|:--" * len(found.heads) + "|",
        ]
        lines += [_md(line) for line in found.body]
    lines += [line for name, path in pictures for line in ("", f"![{name}]({path})", f"*{name}*")]
    lines += ["", "<details><summary>Where each number comes from</summary>", ""]
    lines += [_md(["row", "seed", "cell", "MLflow run", "commit"]), "|:--|--:|:--|:--|:--|"]
    for row in table.rows:
        for result in row.results:
            made = [result["cell"], result.get("mlflow_run_id") or NONE, commit(str(result["commit"]))]
            lines.append(_md([row.row.name, str(result["seed"]), *(f"`{name}`" for name in made)]))
    return "\n".join([*lines, "", "</details>", ""])


def _md(texts: Iterable[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def terminal(table: Table, width: int = 80) -> RenderableType:
    """The whole view for a terminal; at 80 columns only a long row name loses its end.

    Columns that do not fit beside each other stand in tables below each other.
    """
    grids = _fitting(table, list(table.columns), width)
    notes = [Text(note, style="dim") for note in content.footnotes(table)]
    found = [Text(_broken(clauses, width)) for clauses in content.summaries(table)]
    return Group(content.title(table), *grids, *found, *_verdict(table), "", *notes)


def _verdict(table: Table) -> list[RenderableType]:
    if (found := verdict.verdict_table(table, intervals=False)) is None:
        return []
    grid = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for head in found.heads:
        grid.add_column(head, vertical="bottom")
    for line in found.body:
        grid.add_row(*line)
    return ["", found.sentence, grid, Text(found.method, style="dim")]


def _fitting(table: Table, keys: list[str], width: int) -> list[RichTable]:
    """One table, or several of fewer columns; the last has the sizes of the models."""
    grid = _grid(table, keys, width)
    over = Console(width=1000).measure(grid).maximum - width
    if over <= 0:
        return [grid]
    # one line a row, and no number cut
    room = max((len(line[0]) for line in content.body(table, keys)), default=0) - over
    if room < SHORTEST and len(keys) > 1:
        half = (len(keys) + 1) // 2
        return _fitting(table, keys[:half], width) + _fitting(table, keys[half:], width)
    return [_grid(table, keys, width, room)]


def _grid(table: Table, keys: Sequence[str], width: int, room: int = 1000) -> RichTable:
    """A table of these columns whose row names have ``room`` characters."""
    grid = RichTable(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1) if width >= 100 else 0, show_edge=False)
    grid.add_column("", vertical="bottom")
    heads = []
    for key, printed in fields(table, keys):
        column = table.columns[key]
        # word by word, one below the other: narrow enough for a terminal of 80 columns
        stacked = "\n".join([*column.title.split(), f"{column.unit} {column.arrow}".strip()])
        heads.append(("paper", "dim") if printed else (stacked, ""))
    last = keys[-1] == list(table.columns)[-1]
    heads += [("para-\nmeters", ""), ("state\nbytes", "")] if last else []
    for head, style in heads:
        grid.add_column(head, justify="right", style=style, no_wrap=True, vertical="bottom")
    kept = None if last else -2
    for row, (name, *line) in zip(table.rows, content.body(table, keys), strict=True):
        grid.add_row(_cut(name, room), *line[:kept], style="dim" if row.row.reference else "")
    grid.add_section()
    grid.add_row(*content.chance_line(table, keys)[:kept], style="italic dim")
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
