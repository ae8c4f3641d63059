"""The way to a cluster: its token, and a tunnel where its dashboard is not open to the network.

A token is read when it is needed and handed on as the path of a file. It is never an argument, which is in
the process list, nor part of a manifest, which `kubectl get` shows to everybody.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from pydantic import model_validator

from titans_core.config import Frozen
from titans_platform.errors import ClusterError

LOOPBACK = "127.0.0.1"
# what would lead a subprocess to another cluster, another token or another copy of the code
_FOREIGN = ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "PYTHONPATH")


class Token(Frozen):
    """Where the token is read: a file, or a variable of the environment. Never the token itself."""

    file: str | None = None
    env: str | None = None

    @model_validator(mode="after")
    def _one(self) -> Token:
        if (self.file is None) == (self.env is None):
            raise ValueError("file: give either `file` or `env`")
        return self

    def __str__(self) -> str:
        return f"file {self.path}" if self.file else f"variable {self.env}"

    @property
    def path(self) -> Path:
        """The file, with `~` expanded."""
        return Path(self.file or "").expanduser()


def read_token(token: Token, cluster: str) -> str:
    """The token's value. Raises ClusterError where there is none."""
    if token.env:
        value = os.environ.get(token.env, "").strip()
        fix = f"set {token.env}"
    else:
        value, fix = _read_file(token.path), f"put the cluster's token into {token.path}"
    if not value:
        raise ClusterError(f"cluster {cluster}: no token in {token}; {fix}")
    if not value.isascii() or any(c.isspace() for c in value):
        raise ClusterError(f"cluster {cluster}: {token} holds no token: it has blanks or is not ASCII")
    return value


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def write_token(path: Path, value: str | None = None) -> None:
    """Write a token, a new random one by default, where only its owner can read it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(value or secrets.token_hex(32))


def token_variables(path: Path | str) -> dict[str, str]:
    """The variables with which Ray requires a token, and reads its own from a file."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}


def clean_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our environment without what would mislead a subprocess; in ``more``, `$PATH` is expanded."""
    ours = {key: value for key, value in os.environ.items() if key not in _FOREIGN}
    return ours | {key: os.path.expandvars(value) for key, value in (more or {}).items()}


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface on which nothing listens now, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def tunnel(argv: Sequence[str], port: int, timeout: float = 120.0) -> Iterator[None]:
    """Run ``argv``, which forwards local ``port``, until the block ends. Raises ClusterError."""
    with tempfile.TemporaryFile("w+") as output:
        try:
            process = subprocess.Popen(
                argv,
                env=clean_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Ctrl-C detaches from a job's log; the tunnel is closed after that, not by it
                start_new_session=True,
            )
        except FileNotFoundError:
            raise ClusterError(
                f"{argv[0]}: not installed here; the dashboard is reached through it"
            ) from None
        try:
            if not _opens(process, port, timeout):
                raise ClusterError(f"{' '.join(argv[:2])}: {_last_line(output)}")
            yield
        finally:
            _end(process)


def _opens(process: subprocess.Popen[bytes], port: int, timeout: float) -> bool:
    """Whether the port takes connections before the process ends or the time is up."""
    deadline = time.monotonic() + timeout
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=1):
            return True
        time.sleep(0.2)
    return False


def _last_line(output: IO[str]) -> str:
    output.seek(0)
    return (output.read().strip().splitlines() or ["no answer"])[-1]


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
