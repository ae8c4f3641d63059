"""Tables of the pages, recomputed from the cells beside them."""

import csv
import re
import statistics
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent


def table(text: str) -> dict[str, list[str]]:
    """Return the rows of the Markdown tables in ``text`` by their first cell."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in rows}


def section(page: Path, heading: str) -> str:
    """Return the text under a heading of a page, up to the next heading of the first two levels."""
    text = re.split(rf"^##? {re.escape(heading)}\n", page.read_text("utf-8"), flags=re.MULTILINE)
    assert len(text) == 2, f"{page}: {len(text) - 1} headings {heading!r}"
    return text[1].partition("\n## ")[0]


def measured(cells: Path) -> dict[str, list[list[float]]]:
    """Return by row the values of each column, one for each seed that has it.

    The runs of a row on several sets are one row; on one set at several horizons, their mean.
    """
    rows: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(dict)
    with cells.open() as file:
        for line in csv.DictReader(file):
            row = re.sub(r" on .*| ETT.*", "", line["row"])
            for column in list(line)[list(line).index("tokens") + 1 :]:
                if " stderr" in column:  # over items, where the table has the spread over seeds
                    continue
                seeds = rows[row].setdefault(column, defaultdict(list))
                if line[column] not in ("", "nan"):  # nan: the row does not have the column
                    seeds[line["seed"]].append(float(line[column]))
    return {
        row: [[statistics.mean(runs) for runs in seeds.values()] for seeds in columns.values()]
        for row, columns in rows.items()
    }


def check_table(text: str, cells: Path) -> None:
    """Assert that the table in ``text`` has the mean and standard deviation of every column of ``cells``."""
    shown, rows = table(text), measured(cells)
    assert rows
    for row, columns in rows.items():
        for cell, values in zip(shown[row], columns, strict=True):
            if not values:  # not run
                assert cell == "—", row
                continue
            places = len(cell.partition("±")[0].partition(".")[2])
            expected = f"{statistics.mean(values):.{places}f}"
            if len(values) > 1:
                expected += f"±{statistics.stdev(values):.{places}f}"
            assert cell == expected, row
