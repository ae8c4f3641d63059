"""The table as files: CSV for a spreadsheet, LaTeX for a paper, Markdown for a web page."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from titans_platform.report.content import (
    DAGGERS,
    Shown,
    body,
    bold_note,
    chance_line,
    footnotes,
    has_paper,
    summaries,
    title,
)
from titans_platform.report.headings import heading, machine
from titans_platform.report.table import Table
from titans_platform.text import NONE, commit

ESCAPES = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "±": r"$\pm$",
    "·": r"$\cdot$",
    NONE: "--",
    "³": "$^3$",
    **dict(zip(DAGGERS, (r"$\dagger$", r"$\ddagger$", r"\S{}", r"\P{}"), strict=True)),
}


def summary_csv(table: Table) -> str:
    """A line for each row and column, in the column's unit: mean, sd, seeds done, the paper's number."""
    names = ["row", "column", "mean", "sd", "seeds", "chance", "paper", "parameters", "state_bytes"]
    lines: list[list[Any]] = []
    for row in table.rows:
        models = [row.figure_of("parameters"), row.figure_of("state_bytes")]
        for key, entry in row.entries.items():
            numbers = [entry.mean, entry.sd, len(entry.values), table.chance.get(key), entry.paper, *models]
            lines.append([row.row.name, key, *numbers])
    return _csv(names, lines)


def cells_csv(table: Table) -> str:
    """A line for each finished cell: its folder and what it measured, in the columns' units."""
    columns = table.study.columns
    fields = ["cell", "seed", "commit", "mlflow_run_id", "train_seconds", "eval_seconds", "tokens"]
    lines = []
    for row in table.rows:
        for result in row.results:
            values = [(column.factor, result["columns"].get(key)) for key, column in columns.items()]
            numbers = [value if value is None else factor * value for factor, value in values]
            lines.append([row.row.name, *map(result.get, fields), *numbers])
    return _csv(["row", *fields, *(machine(key, column) for key, column in columns.items())], lines)


def _csv(names: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    # None is written as nothing
    writer.writerows(lines)
    return out.getvalue()


def tex(text: str) -> str:
    """Text as LaTeX prints it."""
    return "".join(ESCAPES.get(sign, sign) for sign in text)


def latex(table: Table) -> str:
    """The table with booktabs: mean and spread, the best of each column in bold, the paper's beside."""
    paired = [has_paper(table, key) for key in table.study.columns]
    notes = " ".join([bold_note(table), *footnotes(table)])
    chance = [r"\midrule", _tex_line([r"\emph{chance}", *map(tex, chance_line(table)[1:])])]
    lines = [
        "% \\usepackage{booktabs}",
        "\\begin{table}[t]",
        "\\centering",
        f"\\caption{{{tex(f'{title(table)}. {notes}')}}}",
        f"\\label{{tab:{table.study.name}-{table.scale_name}}}",
        f"\\begin{{tabular}}{{l{''.join('rr' if pair else 'r' for pair in paired)}rr}}",
        "\\toprule",
        *_tex_heads(table, paired),
        "\\midrule",
        *(_tex_line(_tex_fields(line)) for line in body(table, ours=_tex_number)),
        *(chance if table.chance else ()),
        "\\bottomrule",
        "\\end{tabular}",
        "\\end{table}",
        "",
    ]
    return "\n".join(lines)


def _tex_line(fields: Iterable[str]) -> str:
    return " & ".join(fields) + r" \\"


def _tex_fields(line: Sequence[str]) -> list[str]:
    """The fields escaped, but for those that are LaTeX already."""
    return [tex(line[0]), *(field if field.startswith("$") else tex(field) for field in line[1:])]


def _tex_heads(table: Table, paired: Sequence[bool]) -> list[str]:
    over, rules, under, at = [""], [], [""], 2
    for column, pair in zip(table.study.columns.values(), paired, strict=True):
        over.append(f"\\multicolumn{{{1 + pair}}}{{c}}{{{tex(heading(column))}}}")
        rules.append(f"\\cmidrule(lr){{{at}-{at + pair}}}")
        under += ["ours", "paper"] if pair else ["ours"]
        at += 1 + pair
    return [_tex_line([*over, "", ""]), " ".join(rules), _tex_line([*under, "params", "state"])]


def _tex_number(found: Shown) -> str:
    if not found.mean[-1].isdigit():
        return found.mean
    mean = f"\\mathbf{{{found.mean}}}" if found.best else found.mean
    spread = f"_{{\\pm {found.sd}}}" if found.sd else ""
    return f"${mean}{spread}$"


def markdown(table: Table, pictures: Sequence[tuple[str, str]] = ()) -> str:
    """The table as Markdown, with the notes, the pictures (title, path), and where its numbers come from."""
    heads = [""]
    for key, column in table.study.columns.items():
        heads += [heading(column), *["paper"] * has_paper(table, key)]
    heads += ["parameters", "state bytes"]
    lines = [f"**{title(table)}**", "", _md(heads), "|:--|" + "--:|" * (len(heads) - 1)]
    lines += [_md(line) for line in body(table)]
    lines += [_md([f"*{text}*" if text else "" for text in chance_line(table)]), ""]
    lines += [f"- {line}" for line in (*map("; ".join, summaries(table)), *footnotes(table))]
    lines += [line for name, path in pictures for line in ("", f"![{name}]({path})", f"*{name}*")]
    lines += ["", "<details><summary>Where each number comes from</summary>", ""]
    lines += [_md(["row", "seed", "cell", "MLflow run", "commit"]), "|:--|--:|:--|:--|:--|"]
    for row in table.rows:
        for result in row.results:
            made = [result["cell"], result.get("mlflow_run_id") or NONE, commit(str(result["commit"]))]
            lines.append(_md([row.row.name, str(result["seed"]), *(f"`{name}`" for name in made)]))
    return "\n".join([*lines, "", "</details>", ""])


def _md(fields: Iterable[str]) -> str:
    return "| " + " | ".join(field.replace("|", "\\|") for field in fields) + " |"
