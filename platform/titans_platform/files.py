"""Atomic writes, retries while storage fails, and file locks that end with their process."""

from __future__ import annotations

import bz2
import errno
import gzip
import hashlib
import io
import json
import logging
import lzma
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from titans_platform.errors import NotWritable, StorageError, TitansError, UsageError

log = logging.getLogger(__name__)
Value = TypeVar("Value")

PATIENCE = 300.0
"""Seconds for which a failing storage is retried."""
TRANSIENT_ERRNOS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EBUSY),
    *(errno.ENODEV, errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNRESET, errno.ECONNREFUSED),
    *(errno.ECONNABORTED, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
}
"""A full disk, or a network file system that is gone: both may recover."""


def is_transient(error: BaseException) -> bool:
    """Return True if a storage error is transient, so that a retry may succeed."""
    if isinstance(error, OSError):
        return error.errno in TRANSIENT_ERRNOS
    # what torch makes of a full disk
    return isinstance(error, StorageError) or "PytorchStreamWriter" in str(error)


def backoff(patience: float) -> Iterator[float]:
    """Seconds to wait before each further try: 1, 2, 4 to 30, ``patience`` together."""
    waited, wait = 0.0, 1.0
    while waited < patience:
        yield wait
        waited, wait = waited + wait, min(2 * wait, 30.0)


def retry_transient(do: Callable[[], Value]) -> Value:
    """Return the value of ``do``, retried with backoff on transient errors. Raises StorageError."""
    for seconds in backoff(PATIENCE):
        try:
            return do()
        except (OSError, RuntimeError) as error:
            if not is_transient(error):
                raise
            log.warning("storage: %s; retrying in %.0f s", error, seconds)
        time.sleep(seconds)
    try:
        return do()
    except OSError as error:
        raise StorageError(f"storage: {error}; run the same command again to resume") from error


def read_json(path: Path) -> dict[str, Any] | None:
    """Read the JSON object of a file; None if there is no such file or it is not readable."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _open_zstd(file: Any, mode: str = "rb") -> io.BufferedReader:
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))


OPENERS: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open, ".zst": _open_zstd,
}  # fmt: skip
"""Openers of compressed files, by suffix; each takes a path or an open file, and "rb"."""
COMPRESSED = f"optionally compressed ({', '.join(OPENERS)})"


@contextmanager
def opened(name: str) -> Iterator[Any]:
    """Open a file, of this machine or at a URL, decompressed as its suffix says."""
    import fsspec

    suffix, opener = Path(name).suffix.lower(), fsspec.open if "://" in name else open
    with opener(name, "rb") as raw, OPENERS.get(suffix, lambda file, _: nullcontext(file))(raw, "rb") as file:
        yield file


def hash_of(path: Path) -> str:
    """Return the hash of a file's content, 16 hex digits. Raises OSError."""
    stat = path.stat()
    return _hash_of(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@lru_cache(maxsize=4096)
def _hash_of(path: Path, *stamp: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically. Raises TitansError that names the file."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically. Raises TitansError that names the file."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically: to a temporary name, then renamed. Raises TitansError that names the file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise write_error(path, error) from error


@contextmanager
def ignore_disk_full() -> Iterator[None]:
    """Log a StorageError as a warning: the record is dropped, the run continues."""
    try:
        yield
    except StorageError as error:
        log.warning("%s", error)


def write_error(path: Path, error: OSError) -> TitansError:
    """Return the error to raise for a failed write: UsageError, NotWritable, StorageError if transient."""
    # some libraries replace the system's message by their own
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ENAMETOOLONG):
        return UsageError(f"{path.parent} cannot be written ({reason}); give another name or --root")
    kind = StorageError if is_transient(error) else NotWritable
    fix = "free space there" if kind is StorageError else "change its permissions"
    return kind(f"{path}: cannot be written: {reason}; {fix}, or give another --root")


def is_locked(path: Path) -> bool:
    """Return True if a living process holds the lock; creates no file."""
    if not path.exists():
        return False
    with suppress(OSError), file_lock(path) as got:
        return not got
    return False


@contextmanager
def file_lock(path: Path, timeout: float = 0.0) -> Iterator[bool]:
    """Try for up to ``timeout`` seconds, -1 for ever, to take a file lock; yields whether it was taken.

    Raises UsageError: no folder can have its name. StorageError, NotWritable: it cannot be written.
    """
    from filelock import FileLock, Timeout  # takes 50 ms to import

    lock = FileLock(path, timeout=timeout)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        yield False
        return
    except OSError as error:
        raise write_error(path, error) from error
    try:
        yield True
    finally:
        lock.release()
