"""Shards of a remote store on a disk of the node, shared by its workers."""

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
    """Files by the hash of their content, ``gigabytes`` at most: those not used for longest go first.

    A file is written under another name, its hash compared, and renamed; one process fetches it and the
    others wait. What is mapped stays readable when it is removed.
    """

    def __init__(self, gigabytes: float, folder: Path | None = None):
        given = os.environ.get(CACHE)
        default = Path(tempfile.gettempdir()) / f"titans-cache-{getpass.getuser()}"
        self.folder = folder or (Path(given) if given else default)
        self.bytes = int(gigabytes * 1e9)

    def fetched(self, info: ShardInfo, chunks: Callable[[], Iterator[bytes]], name: str) -> Path:
        """The file, from ``chunks`` unless it is here. Raises UsageError that names the shard: it is not the
        manifest's.
        """
        path = self.folder / f"{info.sha256}.arrow"
        if not _touch(path):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with FileLock(self.folder / f"{info.sha256}.lock"):
                if not _touch(path):
                    self._make_room(path, info.bytes)
                    self._write(path, info, chunks, name)
                    # others have written meanwhile, into the same room
                    self._make_room(path)
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

    def _make_room(self, wanted: Path, needed: int = 0) -> None:
        with FileLock(self.folder / "room.lock"):
            files = [(path, path.stat()) for path in self.folder.glob("*.arrow")]
            held = sum(stat.st_size for _, stat in files)
            for path, stat in sorted(files, key=lambda file: file[1].st_mtime_ns):
                if held + needed <= self.bytes:
                    return
                if path != wanted:
                    path.unlink(missing_ok=True)
                    held -= stat.st_size


def _touch(path: Path) -> bool:
    """Mark a file as used now; whether it is there."""
    with suppress(FileNotFoundError):
        os.utime(path)
        return True
    return False


class Ahead:
    """A thread that fetches the files asked for, in order; it ends when there is nothing left to fetch."""

    def __init__(self, fetch: Callable[[ShardInfo], object]):
        self._fetch, self._wanted = fetch, deque[ShardInfo]()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._process = os.getpid()

    def ask(self, infos: Sequence[ShardInfo]) -> None:
        """Fetch these, and no longer what was asked for before."""
        if self._process != os.getpid():
            # a fork has the lock, perhaps held, and not the thread
            self._lock, self._thread, self._process = threading.Lock(), None, os.getpid()
        with self._lock:
            self._wanted = deque(infos)
            if self._thread is None and infos:
                self._thread = threading.Thread(target=self._run, name="shards")
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._wanted or not threading.main_thread().is_alive():
                    self._thread = None
                    return
                info = self._wanted.popleft()
            # whatever it is, it is raised again where the shard is needed
            with suppress(Exception):
                self._fetch(info)
