"""A way to a dashboard that is not open to the world: a command that forwards a local port, while needed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence

from titans_platform.clusters.tokens import clean_environment
from titans_platform.errors import ClusterError


@contextlib.contextmanager
def tunnel(argv: Sequence[str], port: int, timeout: float = 60.0) -> Iterator[str]:
    """Run ``argv``, which forwards ``port``, until the block ends; the local address. Raises ClusterError."""
    with tempfile.TemporaryFile("w+") as said:
        try:
            process = subprocess.Popen(
                argv,
                env=clean_environment(),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                # Ctrl-C is ours: it must not cut the log we are about to leave
                start_new_session=True,
            )
        except FileNotFoundError:
            raise ClusterError(
                f"{argv[0]}: not installed here; the dashboard is reached through it"
            ) from None
        try:
            _until_open(process, port, timeout, said)
            yield f"http://127.0.0.1:{port}"
        finally:
            _end(process)


def _until_open(process: subprocess.Popen[bytes], port: int, timeout: float, said: object) -> None:
    deadline = time.monotonic() + timeout
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            said.seek(0)  # pyright: ignore[reportAttributeAccessIssue]
            lines = said.read().strip().splitlines() or ["no answer"]  # pyright: ignore[reportAttributeAccessIssue]
            raise ClusterError(f"{' '.join(map(str, process.args[:2]))}: {lines[-1]}")  # pyright: ignore
        time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
