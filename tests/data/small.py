"""Configs of data."""

import json

from titans_platform.config import DataConfig


def config(*sources: dict, length: int = 8, **fields) -> DataConfig:
    """Rows of ``length`` tokens of these sources."""
    value = {"sources": sources, "sequence_length": length} | fields
    return DataConfig.model_validate_json(json.dumps(value))
