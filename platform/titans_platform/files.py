"""Files that are whole or not there at all, and locks that die with their process."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from titans_platform.errors import StorageError, TitansError, UsageError

log = logging.getLogger(__name__)
Value = TypeVar("Value")

PATIENCE = 300.0
"""Seconds that storage which fails is waited for."""
PASSING = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EBUSY),
    *(errno.ENODEV, errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNRESET, errno.ECONNREFUSED),
    *(errno.ECONNABORTED, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
}
"""Errors of a disk that is full and of storage that is gone: both may be over in a minute."""


def may_pass(error: BaseException) -> bool:
    """Whether a failure of storage may be over later."""
    if isinstance(error, OSError):
        return error.errno in PASSING
    # what torch makes of a full disk
    return isinstance(error, StorageError) or "PytorchStreamWriter" in str(error)


def backoff(patience: float) -> Iterator[float]:
    """Seconds to wait before each further try: 1, 2, 4 to 30, ``patience`` together."""
    waited, wait = 0.0, 1.0
    while waited < patience:
        yield wait
        waited, wait = waited + wait, min(2 * wait, 30.0)


def patiently(do: Callable[[], Value], patience: float = PATIENCE) -> Value:
    """The value of ``do``, tried again while storage fails in a way that may pass. Raises StorageError."""
    for seconds in backoff(patience):
        try:
            return do()
        except (OSError, RuntimeError) as error:
            if not may_pass(error):
                raise
            log.warning("storage: %s; trying again in %.0f s", error, seconds)
        time.sleep(seconds)
    try:
        return do()
    except OSError as error:
        raise StorageError(f"storage: {error}; the same command goes on once it is there") from error


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
        raise not_written(path, error) from error


@contextmanager
def where_there_is_room() -> Iterator[None]:
    """For a record that is not worth ending a run: where storage fails it is left out, with a warning."""
    try:
        yield
    except StorageError as error:
        log.warning("%s", error)


def not_written(path: Path, error: OSError) -> TitansError:
    """What to raise for a file that could not be written: a full disk, a folder that is read-only."""
    # some libraries put their own words in the place of the system's
    reason = os.strerror(error.errno) if error.errno else str(error)
    kind = StorageError if may_pass(error) else TitansError
    return kind(f"{path}: cannot be written: {reason}; make room there, or give another --root")


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
    """Try to hold a file lock for up to ``timeout`` seconds; yields whether it is held.

    Raises UsageError where there can be no such file.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = path.open("a")
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise UsageError(f"--root: {path.parent} cannot be written ({reason}); give another") from error
    with opened as handle:
        deadline = time.monotonic() + timeout
        while not (got := _try_lock(handle.fileno())) and time.monotonic() < deadline:
            time.sleep(0.2)
        yield got
