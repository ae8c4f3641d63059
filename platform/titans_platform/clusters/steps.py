"""The steps that bring a cluster up or down, as values: --dry-run prints the steps that `up` performs.

A token is passed as the path of a file, never as an argument, which the process list shows, nor in a
manifest, which `kubectl get` shows.
"""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import model_validator

from titans_core.config import Frozen
from titans_platform.errors import ClusterError

LOOPBACK = "127.0.0.1"
# they would point a subprocess to another cluster, token or copy of the code
_UNSET = ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "PYTHONPATH")


class Token(Frozen):
    """Source of a token: a file or an environment variable. Never the token itself."""

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

    def read(self, cluster: str) -> str:
        """Read the token's value. Raises ClusterError, which names ``cluster``, if there is none."""
        try:
            value = os.environ.get(self.env, "") if self.env else self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            value = ""
        if not (value := value.strip()):
            fix = f"set {self.env}" if self.env else f"put the cluster's token into {self.path}"
            raise ClusterError(f"cluster {cluster}: no token in {self}; {fix}")
        if not value.isascii() or any(c.isspace() for c in value):
            raise ClusterError(f"cluster {cluster}: {self} is not a token: it has whitespace or is not ASCII")
        return value


def write_token(path: Path, value: str | None = None) -> None:
    """Write a token, a new random one by default, where only its owner can read it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(value or secrets.token_hex(32))


def token_variables(path: Path | str) -> dict[str, str]:
    """Return the variables that make Ray require a token and read it from a file."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}


def clean_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return our environment without the variables in _UNSET, with ``more``, in which `$PATH` is expanded."""
    inherited = {key: value for key, value in os.environ.items() if key not in _UNSET}
    return inherited | {key: os.path.expandvars(value) for key, value in (more or {}).items()}


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface on which nothing listens now, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def detached(argv: Sequence[str], env: Mapping[str, str] | None = None, **to: Any) -> subprocess.Popen[str]:
    """Start a process in its own session, so that Ctrl-C, which only detaches us, does not reach it."""
    env = clean_environment(env)
    return subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, text=True, start_new_session=True, **to)


def wait_for_port(process: subprocess.Popen[Any], host: str, port: int, timeout: float = 120.0) -> bool:
    """Wait until ``process`` accepts connections; False if it exits first, or after ``timeout`` s."""
    deadline = time.monotonic() + timeout
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((host, port), timeout=1):
            # a port that opens after the process has ended is somebody else's
            return process.poll() is None
        time.sleep(0.2)
    return False


def terminate_group(process: subprocess.Popen[Any]) -> None:
    """Terminate the process group that ``process`` leads; kill it after 10 s."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(OSError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(timeout=10)


@dataclass
class Step:
    """One action that can be run, or printed instead."""

    shown: str
    """The equivalent lines of a shell script, or a comment."""
    do: Callable[[], object]
    """Runs it. Raises ClusterError."""


def perform(steps: Sequence[Step]) -> None:
    """Run the steps in order. Raises ClusterError."""
    for step in steps:
        step.do()


class Note(Step):
    """A comment, with no action."""

    def __init__(self, text: str):
        super().__init__(f"# {text}", lambda: None)


class Write(Step):
    """Write a file, and the folder it is in."""

    def __init__(self, path: Path, content: str | bytes):
        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())

        if isinstance(content, bytes):
            super().__init__(f"# {len(content)} bytes to {path}", write)
        else:
            super().__init__(f"cat > {shlex.quote(str(path))}{_here_document(content)}", write)


class Run(Step):
    """Run a command to its end.

    Its output goes to the file ``into``, and to the terminal only if it fails.
    """

    def __init__(self, argv: Sequence[str], stdin: str = "", into: Path | None = None):
        to = f" > {shlex.quote(str(into))}" if into else ""
        self.output = partial(_output, argv, stdin)
        line = shlex.join(argv) + to + _here_document(stdin)
        super().__init__(line, lambda: into.write_text(self.output()) if into else self.output())


def _output(argv: Sequence[str], stdin: str) -> str:
    """Run a command and return its stdout. Raises ClusterError."""
    options: dict[str, Any] = {"env": clean_environment(), "input": stdin or None}
    try:
        completed = subprocess.run(argv, capture_output=True, text=True, **options)
    except FileNotFoundError:
        raise ClusterError(f"{argv[0]}: not installed here; install it, or use another machine") from None
    if completed.returncode:
        printed = (completed.stderr or completed.stdout).strip().splitlines()
        cause = printed[-1] if printed else f"exit code {completed.returncode}"
        raise ClusterError(f"{shlex.join(argv[:3])}: {cause}")
    return completed.stdout


def new_token(path: Path) -> Step:
    """Write a random token that only its owner can read."""
    line = f"(umask 077; python -c 'import secrets; print(secrets.token_hex(32))' > {shlex.quote(str(path))})"
    return Step(line, partial(write_token, path))


def command_text(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """Return a command with its environment variables as a line of shell."""
    quoted = {key: f'"{value}"' if "$" in value else shlex.quote(value) for key, value in env.items()}
    return " ".join([*(f"{key}={value}" for key, value in quoted.items()), shlex.join(argv)])


def _here_document(text: str) -> str:
    return f" <<'END'\n{text.rstrip()}\nEND" if text else ""
