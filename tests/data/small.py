"""Configs of data."""

import json
from pathlib import Path
from typing import Any

from titans_platform.config import DataConfig, OptimConfig, RunConfig

PREPARE = """
import sys; from pathlib import Path; from titans_platform.config import DataConfig
from titans_platform.data import prepare
print(prepare(DataConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2])).fingerprint)
"""


def config(*sources: dict, length: int = 8, **fields) -> DataConfig:
    """Rows of ``length`` tokens of these sources."""
    value = {"sources": sources, "sequence_length": length} | fields
    return DataConfig.model_validate_json(json.dumps(value))


def drawing(rows: int, seed: int = 0, order: Any = "shuffled", **optim) -> RunConfig:
    """A run that draws so many rows a step, shuffled or of streams."""
    data = DataConfig(rows=order, sequence_length=8)
    return RunConfig(seed=seed, data=data, optim=OptimConfig(global_batch_size=rows, **optim))


def documents(path: Path, *texts: str, **fields) -> dict:
    """A source of these texts, written to ``path`` as JSON lines."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {"kind": "files", "path": str(path), "validation_fraction": 0.0} | fields
