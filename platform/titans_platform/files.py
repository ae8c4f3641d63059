"""Files that are whole or not there at all, and locks that die with their process."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titans_platform.errors import TitansError


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object of a file, or None where there is no such file or nothing readable in it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: Path, value: Any) -> None:
    """Write a file that is whole or not there at all."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file that is whole or not there at all. Raises TitansError that names the file."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file that is whole or not there at all. Raises TitansError that names the file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise TitansError(
            f"{path}: cannot be written: {error.strerror}; make room there, or give another --root"
        ) from error


def _try_lock(descriptor: int, shared: bool = False) -> bool:
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Whether a living process holds the lock; looking does not take it from anyone, and writes nothing."""
    try:
        with path.open("r") as handle:
            return not _try_lock(handle.fileno(), shared=True)
    except OSError:
        return False


@contextmanager
def held(path: Path, timeout: float = 0.0) -> Iterator[bool]:
    """Try to hold a file lock for up to ``timeout`` seconds; yields whether it is held."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        deadline = time.monotonic() + timeout
        while not (got := _try_lock(handle.fileno())) and time.monotonic() < deadline:
            time.sleep(0.2)
        yield got
