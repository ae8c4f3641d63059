"""Configs of data."""

import json
from pathlib import Path

from titans_platform.config import DataConfig
from titans_platform.data import RowStream


def config(*sources: dict, length: int = 8, **fields) -> DataConfig:
    """Rows of ``length`` tokens of these sources."""
    value = {"sources": sources, "sequence_length": length} | fields
    return DataConfig.model_validate_json(json.dumps(value))


def global_rows(stream: RowStream, step: int) -> list[tuple[int, int]]:
    """(source, row) of every row of the global batch, over all workers."""
    which, rows = stream.drawn(step)
    return list(zip(which.tolist(), rows.tolist(), strict=True))


def documents(path: Path, *texts: str, **fields) -> dict:
    """A source of these texts, written to ``path`` as JSON lines."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {"kind": "files", "path": str(path), "validation_fraction": 0.0} | fields
