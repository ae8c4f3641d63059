"""A cache of remote shards on a local disk, shared by the workers of a node."""

from __future__ import annotations

import getpass
import hashlib
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from titans_platform.data.shards import REPAIR, ShardInfo
from titans_platform.errors import UsageError
from titans_platform.files import write_error

CACHE = "TITANS_CACHE"
"""Environment variable with the cache's folder; it should be on a disk of the node."""


class ShardCache:
    """An LRU cache of files by the hash of their content, ``gigabytes`` at most.

    A file is written under a temporary name, verified and renamed; one process downloads it while the others
    wait. A file that is evicted while it is mapped stays readable.
    """

    def __init__(self, gigabytes: float, folder: Path | None = None):
        given = os.environ.get(CACHE)
        default = Path(tempfile.gettempdir()) / f"titans-cache-{getpass.getuser()}"
        self.folder = folder or (Path(given) if given else default)
        self.bytes = int(gigabytes * 1e9)

    def fetch(self, info: ShardInfo, chunks: Callable[[], Iterator[bytes]], name: str) -> Path:
        """The cached file, written from ``chunks`` on a miss. Raises UsageError if its hash is not the
        manifest's.
        """
        path = self.folder / f"{info.sha256}.arrow"
        if not _touch(path):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with FileLock(self.folder / f"{info.sha256}.lock"):
                if not _touch(path):
                    self._evict(path, info.bytes)
                    self._write(path, info, chunks, name)
                    # other processes have written meanwhile
                    self._evict(path)
        return path

    def _write(self, path: Path, info: ShardInfo, chunks: Callable[[], Iterator[bytes]], name: str) -> None:
        partial, found = path.with_suffix(".partial"), hashlib.sha256()
        try:
            with partial.open("wb") as file:
                for chunk in chunks():
                    found.update(chunk)
                    file.write(chunk)
            if found.hexdigest() != info.sha256:
                raise UsageError(f"{name}: corrupted shard, its hash is not the manifest's; {REPAIR}")
            os.replace(partial, path)
        except FileNotFoundError:
            raise UsageError(f"{name}: missing shard; {REPAIR}") from None
        except OSError as error:
            raise write_error(partial, error) from error
        finally:
            partial.unlink(missing_ok=True)

    def _evict(self, wanted: Path, needed: int = 0) -> None:
        with FileLock(self.folder / "evict.lock"):
            files = [(path, path.stat()) for path in self.folder.glob("*.arrow")]
            held = sum(stat.st_size for _, stat in files)
            for path, stat in sorted(files, key=lambda file: file[1].st_mtime_ns):
                if held + needed <= self.bytes:
                    return
                if path != wanted:
                    path.unlink(missing_ok=True)
                    held -= stat.st_size


def _touch(path: Path) -> bool:
    """Mark a file as just used. Returns whether it exists."""
    with suppress(FileNotFoundError):
        os.utime(path)
        return True
    return False


class Prefetcher:
    """Downloads requested files in order, in a background thread that ends with an empty queue."""

    def __init__(self, fetch: Callable[[ShardInfo], object]):
        self._fetch, self._queue = fetch, deque[ShardInfo]()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._process = os.getpid()

    def request(self, infos: Sequence[ShardInfo]) -> None:
        """Replace the queue by these files."""
        if self._process != os.getpid():
            # a forked process inherits the lock, perhaps held, but not the thread
            self._lock, self._thread, self._process = threading.Lock(), None, os.getpid()
        with self._lock:
            self._queue = deque(infos)
            if self._thread is None and infos:
                self._thread = threading.Thread(target=self._run, name="shard-prefetch")
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue or not threading.main_thread().is_alive():
                    self._thread = None
                    return
                info = self._queue.popleft()
            # raised again where the shard is read
            with suppress(Exception):
                self._fetch(info)
