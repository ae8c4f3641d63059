"""Studies and results of cells that were never run."""

from pathlib import Path
from typing import Any

from titans_platform.files import write_json
from titans_platform.study.grid import Cell, StudyRun
from titans_platform.study.spec import Column, Row, Scale, Study


def study_of(root: Path, *cells: Cell, commit: str = "c0ffee", **fields: Any) -> StudyRun:
    """A study of these cells, with a row for each of their names; ``fields`` are put in place of its own."""
    rows = tuple(Row(name=name) for name in dict.fromkeys(cell.row for cell in cells) or ["LMM"])
    defaults = {"columns": {"lm_ppl": Column(title="P")}, "scales": {"small": Scale()}, "rows": rows}
    return StudyRun(Study(name="tiny", **defaults | fields), "small", root, commit, cells=cells, whole=cells)


def save(root: Path, cell: Cell, **fields: Any) -> None:
    result = {"cell": cell.name, "seed": cell.seed, "commit": "c0ffee"} | fields
    write_json(cell.folder(root).path / "result.json", result)
