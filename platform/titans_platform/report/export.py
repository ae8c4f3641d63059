"""The table for other programs: CSV for a spreadsheet, LaTeX for a paper."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from titans_platform.report.render import DAGGERS, body_name, count, footnotes, has_paper, number, title
from titans_platform.report.table import Entry, Table, TableRow, best_rows
from titans_platform.study.spec import Column


def summary_csv(table: Table) -> str:
    """A line for each row and column: mean, sd, seeds done, the paper's number."""
    names = ["row", "column", "mean", "sd", "seeds", "chance", "paper", "parameters", "state_bytes"]
    lines: list[list[Any]] = []
    for row in table.rows:
        sizes = [row.figure_of("parameters"), row.figure_of("state_bytes")]
        for key, entry in row.entries.items():
            numbers = [entry.mean, entry.sd, len(entry.values), table.chance.get(key), entry.paper, *sizes]
            lines.append([row.row.name, key, *numbers])
    return _csv(names, lines)


def cells_csv(table: Table) -> str:
    """A line for each finished cell: where it lies and what it measured."""
    columns = list(table.study.columns)
    fields = ["cell", "seed", "commit", "mlflow_run_id", "train_seconds", "eval_seconds", "tokens"]
    lines = [
        [row.row.name, *map(result.get, fields), *map(result["columns"].get, columns)]
        for row in table.rows
        for result in row.results
    ]
    return _csv(["row", *fields, *columns], lines)


def _csv(names: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([["" if value is None else value for value in line] for line in lines])
    return out.getvalue()


ESCAPES = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "±": r"$\pm$",
    "·": r"$\cdot$",
    "—": "--",
    "³": "$^3$",
    **dict(zip(DAGGERS, (r"$\dagger$", r"$\ddagger$", r"\S{}", r"\P{}"), strict=True)),
}


def tex(text: str) -> str:
    """Text as LaTeX prints it."""
    return "".join(ESCAPES.get(sign, sign) for sign in text)


def latex(table: Table) -> str:
    """The table with booktabs: mean and spread, the best of each column in bold, the paper's beside."""
    columns = table.study.columns
    paired = {key: has_paper(table, key) for key in columns}
    best = {key: best_rows(table, key) for key in columns}
    lines = [
        "% \\usepackage{booktabs}",
        "\\begin{table}[t]",
        "\\centering",
        f"\\caption{{{tex(title(table))}. {tex(' '.join(footnotes(table)))}}}",
        f"\\label{{tab:{table.study.name}-{table.scale_name}}}",
        f"\\begin{{tabular}}{{l{''.join('rr' if pair else 'r' for pair in paired.values())}rr}}",
        "\\toprule",
        *_heads(columns.values(), paired.values()),
        "\\midrule",
        *(_line(table, row, paired, best) for row in table.rows),
        *_chance(table, paired),
        "\\bottomrule",
        "\\end{tabular}",
        "\\end{table}",
    ]
    return "\n".join([*lines, ""])


def _heads(columns: Iterable[Column], paired: Iterable[bool]) -> list[str]:
    over, rules, under, at = [""], [], [""], 2
    for column, pair in zip(columns, paired, strict=True):
        arrow = "↑" if column.higher_is_better else "↓"
        unit = f" ({column.unit})" if column.unit else ""
        over.append(f"\\multicolumn{{{1 + pair}}}{{c}}{{{tex(f'{column.title}{unit} {arrow}')}}}")
        rules.append(f"\\cmidrule(lr){{{at}-{at + pair}}}")
        under += ["ours", "paper"] if pair else ["ours"]
        at += 1 + pair
    return [
        " & ".join([*over, "", ""]) + r" \\",
        " ".join(rules),
        " & ".join([*under, "params", "state"]) + r" \\",
    ]


def _line(table: Table, row: TableRow, paired: dict[str, bool], best: dict[str, set[str]]) -> str:
    fields = [tex(body_name(table, row))]
    for key, column in table.study.columns.items():
        entry = row.entries[key]
        fields.append(_ours(entry, column, row.row.name in best[key], bool(row.failures)))
        if paired[key]:
            fields.append("--" if entry.paper is None else f"{entry.paper:.2f}")
    sizes = [count(row.figure_of("parameters")), count(row.figure_of("state_bytes"))]
    return " & ".join([*fields, *map(tex, sizes)]) + r" \\"


def _ours(entry: Entry, column: Column, best: bool, failed: bool) -> str:
    if entry.mean is None:
        return "failed" if failed else "--"
    mean = number(entry.mean, column.decimals)
    spread = f"_{{\\pm {number(entry.sd, column.decimals)}}}" if entry.sd is not None else ""
    shown = f"\\mathbf{{{mean}}}" if best else mean
    return f"${shown}{spread}$"


def _chance(table: Table, paired: dict[str, bool]) -> list[str]:
    if not table.chance:
        return []
    fields = ["\\emph{chance}"]
    for key, column in table.study.columns.items():
        level = table.chance.get(key)
        fields += ["" if level is None else number(level, column.decimals), *[""] * paired[key]]
    return ["\\midrule", " & ".join([*fields, "", ""]) + r" \\"]
