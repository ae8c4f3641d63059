"""Results of cells that were never run."""

from pathlib import Path
from typing import Any

from titans_platform.files import write_json
from titans_platform.study.grid import Cell


def save(root: Path, cell: Cell, **fields: Any) -> None:
    """Write the result of a cell."""
    result = {"cell": cell.name, "seed": cell.seed, "commit": "c0ffee"} | fields
    write_json(cell.folder(root).path / "result.json", result)
