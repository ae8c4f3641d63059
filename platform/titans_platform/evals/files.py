"""Local files that tasks read: text or jsonl, plain, .gz or .xz."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

from titans_platform.errors import UsageError

OPENERS = {".gz": gzip.open, ".xz": lzma.open}


def read_text(path: str) -> str:
    """Text of a UTF-8 file, decompressed. Raises UsageError where it cannot be read."""
    try:
        with OPENERS.get(Path(path).suffix, open)(path, "rt", encoding="utf-8") as file:
            return file.read()
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise UsageError(f"options.path: cannot read {path}: {error}") from None


def read_jsonl(path: str) -> list[dict[str, Any]]:
    """The objects of a .jsonl file. Raises UsageError: cannot be read, empty, or a line is no JSON object."""
    records = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if line.strip():
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise UsageError(f"options.path: {path}, line {number}: {error.msg}") from None
            if not isinstance(record, dict):
                raise UsageError(f"options.path: {path}, line {number}: not a JSON object")
            records.append(record)
    if not records:
        raise UsageError(f"options.path: {path} holds no records")
    return records
