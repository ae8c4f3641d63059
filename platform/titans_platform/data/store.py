"""Stores of prepared sources: a folder, or a bucket that pyarrow.fs reads (`data.store`).

A store holds a folder for each prepared source, `index/`, which maps a DataConfig to its folders, and
`tokenizers/`. Shards in a bucket are prefetched to a cache on a local disk,
which the workers of a node share.
"""

from __future__ import annotations

import hashlib
import io
import mmap
import os
import random
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from filelock import FileLock

from titans_platform.data.shards import MANIFEST, REPAIR, ShardInfo, find_damage
from titans_platform.errors import TitansError, UsageError, one_line
from titans_platform.files import write_bytes, write_error

MAX_ATTEMPTS = 6
FIRST_BACKOFF = 0.25
"""Seconds before the first retry; doubled after each."""
CHUNK = 8 * 2**20
"""Bytes of one request: the unit of a retry, and what a download holds in memory."""
T = TypeVar("T")


class LocalShards:
    """The files of one prepared source, in a folder of this machine."""

    def __init__(self, path: Path):
        self.path = path

    def open(self, info: ShardInfo) -> mmap.mmap:
        """Memory-map a file. Raises OSError."""
        return mapped(self.path / info.file)

    def prefetch(self, infos: Sequence[ShardInfo]) -> None:
        """No-op: the operating system reads ahead."""

    def find_corruption(self, infos: Sequence[ShardInfo], verify: bool) -> dict[str, str]:
        """Return a message for each file, by name, that differs from the manifest.

        Sizes are always compared, hashes of files whose mtime differs; with ``verify`` the hashes of all.
        """
        problems = {info.file: find_damage(self.path / info.file, info, verify) for info in infos}
        return {name: problem for name, problem in problems.items() if problem}

    def __str__(self) -> str:
        return str(self.path)


class Store:
    """Prepared sources and what belongs to them, by name: a folder, by default `data/` under the root."""

    def __init__(self, staging: Path):
        self.staging = staging
        """The local folder in which sources are made."""

    def read(self, name: str) -> bytes:
        """Read a small file. Raises FileNotFoundError, TitansError."""
        with suppress(NotADirectoryError):
            return (self.staging / name).read_bytes()
        raise FileNotFoundError(self / name)

    def write(self, name: str, content: bytes) -> None:
        """Write a small file atomically. Raises TitansError, UsageError."""
        write_bytes(self.staging / name, content)

    def shards(self, name: str, cache_gb: float) -> LocalShards | RemoteShards:
        """Return the files of the source ``name``."""
        return LocalShards(self.staging / name)

    def publish(self, folder: Path) -> None:
        """Publish a folder that is complete in ``staging``: here it is already in place."""

    def remove(self, name: str, file: bool = False) -> None:
        """Remove a folder, or a ``file``, if it exists."""
        if file:
            (self.staging / name).unlink(missing_ok=True)
        else:
            shutil.rmtree(self.staging / name, ignore_errors=True)

    def __str__(self) -> str:
        return str(self.staging)

    def __truediv__(self, name: str) -> str:
        """Return a file's name for messages."""
        return f"{self}/{name}"


class Bucket(Store):
    """An object store. Failed requests are retried; sources are prepared under ``staging``."""

    def __init__(self, uri: str, staging: Path):
        super().__init__(staging)
        # credentials and endpoints may follow the question mark
        self.uri, self.shown = uri, uri.partition("?")[0].rstrip("/")

    @cached_property
    def _files(self) -> tuple[Any, str]:
        """The file system, and the path in it. Raises UsageError."""
        from pyarrow import fs

        try:
            return fs.FileSystem.from_uri(self.uri)
        except Exception as error:  # ArrowInvalid, OSError, and what the plugin lacks
            raise UsageError(f"data.store: {self.shown} cannot be opened: {one_line(error, 160)}") from error

    def __getstate__(self) -> dict[str, Any]:
        # connections cannot be pickled
        return {key: value for key, value in vars(self).items() if key != "_files"}

    def read(self, name: str) -> bytes:
        return b"".join(self.chunks(name))

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the content of a file, CHUNK bytes per request; failed requests are retried."""

        files, base = self._files
        file = self._retried(name, lambda: files.open_input_file(f"{base}/{name}"))
        size = self._retried(name, file.size)

        def chunk(at: int) -> bytes:
            wanted = min(CHUNK, size - at)
            if len(content := file.read_at(wanted, at)) < wanted:
                raise OSError(f"{len(content)} of {wanted} bytes received")
            return content

        yield from (self._retried(name, partial(chunk, at)) for at in range(0, size, CHUNK))

    def write(self, name: str, content: bytes) -> None:
        self._upload(lambda: io.BytesIO(content), name)

    def _upload(self, opened: Callable[[], BinaryIO], name: str) -> None:
        def put() -> None:
            files, base = self._files
            with opened() as file, files.open_output_stream(f"{base}/{name}") as out:
                shutil.copyfileobj(file, out, CHUNK)

        self._retried(name, put)

    def sizes(self, name: str) -> dict[str, int]:
        """Size in bytes of every file of a source, from one listing."""
        from pyarrow import fs

        files, base = self._files
        wanted = fs.FileSelector(f"{base}/{name}", allow_not_found=True, recursive=True)
        infos = self._retried(name, lambda: files.get_file_info(wanted))
        return {info.path.removeprefix(f"{base}/{name}/"): info.size for info in infos if info.is_file}

    def shards(self, name: str, cache_gb: float) -> RemoteShards:
        return RemoteShards(self, name, ShardCache(cache_gb))

    def publish(self, folder: Path) -> None:
        """Upload the folder, the manifest last, and remove the local copy."""
        names = [path.relative_to(self.staging).as_posix() for path in folder.rglob("*") if path.is_file()]
        for name in sorted(names, key=lambda name: name.endswith(MANIFEST)):
            self._upload(lambda name=name: (self.staging / name).open("rb"), name)
        shutil.rmtree(folder)

    def remove(self, name: str, file: bool = False) -> None:
        files, base = self._files
        delete = files.delete_file if file else files.delete_dir
        with suppress(FileNotFoundError):
            self._retried(name, lambda: delete(f"{base}/{name}"))

    def __str__(self) -> str:
        return self.shown

    def _retried(self, name: str, call: Callable[[], T]) -> T:
        """Call with retries and exponential backoff. Raises TitansError that names the file."""
        for attempt in range(MAX_ATTEMPTS):
            try:
                return call()
            except FileNotFoundError:
                raise
            except OSError as error:
                if attempt == MAX_ATTEMPTS - 1:
                    cause = f"after {MAX_ATTEMPTS} attempts: {one_line(error, 160)}"
                    raise TitansError(f"{self / name}: the object store does not respond, {cause}") from error
                time.sleep(FIRST_BACKOFF * 2**attempt * random.uniform(0.8, 1.2))
        raise AssertionError


class RemoteShards:
    """The files of a source in a bucket, downloaded through the node's cache."""

    def __init__(self, bucket: Bucket, name: str, cache: ShardCache):
        self.bucket, self.name, self.cache = bucket, name, cache
        self._prefetcher = Prefetcher(self.local)

    def local(self, info: ShardInfo) -> Path:
        """Return the file in the cache. Raises UsageError, TitansError."""
        name = f"{self.name}/{info.file}"
        return self.cache.fetch(info, lambda: self.bucket.chunks(name), self.bucket / name)

    def open(self, info: ShardInfo) -> mmap.mmap:
        """Memory-map a file, downloading it if necessary. Raises UsageError, TitansError."""
        while True:
            # another process may evict it from the cache at this moment
            with suppress(FileNotFoundError):
                return mapped(self.local(info))

    def prefetch(self, infos: Sequence[ShardInfo]) -> None:
        """Prefetch these files in the background, in this order."""
        self._prefetcher.request(infos)

    def find_corruption(self, infos: Sequence[ShardInfo], verify: bool) -> dict[str, str]:
        """Compare with the manifest as `LocalShards` does, without mtimes; ``verify`` fetches every file."""
        sizes, problems = self.bucket.sizes(self.name), {}
        for info in infos:
            name = self.bucket / f"{self.name}/{info.file}"
            if (size := sizes.get(info.file)) is None:
                problems[info.file] = f"{name}: missing shard"
            elif size != info.bytes:
                problems[info.file] = f"{name}: truncated shard, {size} bytes of {info.bytes}"
            elif verify:
                try:
                    self.local(info)
                except UsageError as error:
                    problems[info.file] = str(error).partition(";")[0]
        return problems

    def __str__(self) -> str:
        return self.bucket / self.name


def open_store(store: str | None, root: Path) -> Store:
    """Open the store that ``data.store`` names; by default `data/` under the root."""
    if store is None:
        return Store(Path(root) / "data")
    scheme, _, path = store.partition("://")
    if path and scheme != "file":
        return Bucket(store, Path(root) / "data")
    return Store(Path(path or store).expanduser())


def mapped(path: Path) -> mmap.mmap:
    """Map a local file into memory, read-only."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


CACHE = "TITANS_CACHE"
"""Environment variable with the cache's folder; it should be on a disk of the node."""


class ShardCache:
    """An LRU cache of files by the hash of their content, ``gigabytes`` at most.

    A file is written under a temporary name, verified and renamed; one process downloads it while the others
    wait. A file that is evicted while it is mapped stays readable.
    """

    def __init__(self, gigabytes: float, folder: Path | None = None):
        default = Path(tempfile.gettempdir()) / f"titans-cache-{os.getuid()}"
        self.folder = folder or Path(os.environ.get(CACHE) or default)
        self.bytes = int(gigabytes * 1e9)

    def fetch(self, info: ShardInfo, chunks: Callable[[], Iterator[bytes]], name: str) -> Path:
        """Return the cached file, written from ``chunks`` on a miss. Raises UsageError: its hash is wrong."""
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
        unfinished, digest = path.with_suffix(".partial"), hashlib.sha256()
        try:
            with unfinished.open("wb") as file:
                for chunk in chunks():
                    digest.update(chunk)
                    file.write(chunk)
            if digest.hexdigest() != info.sha256:
                raise UsageError(f"{name}: corrupted shard, its hash is not the manifest's; {REPAIR}")
            os.replace(unfinished, path)
        except FileNotFoundError:
            raise UsageError(f"{name}: missing shard; {REPAIR}") from None
        except OSError as error:
            raise write_error(unfinished, error) from error
        finally:
            unfinished.unlink(missing_ok=True)

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
        self._lock, self._process = threading.Lock(), os.getpid()

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
