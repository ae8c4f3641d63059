"""What brings a cluster up or down, as values: --dry-run shows the very steps that `up` performs.

A token is read when it is needed and handed on as the path of a file. It is never an argument, which is in
the process list, nor part of a manifest, which `kubectl get` shows to everybody.
"""

from __future__ import annotations

import os
import secrets
import shlex
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

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

    def read(self, cluster: str) -> str:
        """The token's value. Raises ClusterError, which names ``cluster``, where there is none."""
        try:
            value = os.environ.get(self.env, "") if self.env else self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            value = ""
        value = value.strip()
        if not value:
            fix = f"set {self.env}" if self.env else f"put the cluster's token into {self.path}"
            raise ClusterError(f"cluster {cluster}: no token in {self}; {fix}")
        if not value.isascii() or any(c.isspace() for c in value):
            raise ClusterError(f"cluster {cluster}: {self} holds no token: it has blanks or is not ASCII")
        return value


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
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


class Step(ABC):
    """One thing that is done, or shown instead."""

    @abstractmethod
    def shown(self) -> str:
        """The step as lines of a shell script."""

    @abstractmethod
    def do(self) -> None:
        """Do it. Raises ClusterError."""


def perform(steps: Sequence[Step]) -> None:
    """Do the steps in their order. Raises ClusterError."""
    for step in steps:
        step.do()


@dataclass(frozen=True)
class Call(Step):
    """Call a function; shown as the lines of shell that do the same, or as a remark."""

    line: str
    function: Callable[[], object]

    def shown(self) -> str:
        return self.line

    def do(self) -> None:
        self.function()


class Note(Call):
    """A remark where there is nothing to do."""

    def __init__(self, text: str):
        super().__init__(f"# {text}", lambda: None)


def new_token(path: Path) -> Step:
    """Write a random token that only its owner can read."""
    line = f"(umask 077; python -c 'import secrets; print(secrets.token_hex(32))' > {shlex.quote(str(path))})"
    return Call(line, partial(write_token, path))


@dataclass(frozen=True)
class Write(Step):
    """Write a file, and the folder it is in."""

    path: Path
    content: str | bytes

    def shown(self) -> str:
        if isinstance(self.content, bytes):
            return f"# {len(self.content)} bytes to {self.path}"
        return f"cat > {shlex.quote(str(self.path))} {_here_document(self.content)}"

    def do(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = self.content
        self.path.write_bytes(content if isinstance(content, bytes) else content.encode())


@dataclass(frozen=True)
class Run(Step):
    """Run a command to its end; what it prints is shown to the user only if it fails."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: str = ""
    quiet: bool = True
    into: Path | None = None
    """A file that gets what the command prints."""

    def shown(self) -> str:
        into = f" > {shlex.quote(str(self.into))}" if self.into else ""
        return command_line(self.argv, self.env) + into + (self.stdin and f" {_here_document(self.stdin)}")

    def do(self) -> None:
        printed = self.output()
        if self.into:
            self.into.write_text(printed)

    def output(self) -> str:
        """Run it and return what it printed. Raises ClusterError."""
        pipe = subprocess.PIPE if self.quiet else None
        env = clean_environment(self.env)
        try:
            done = subprocess.run(
                self.argv, env=env, input=self.stdin or None, stdout=pipe, stderr=pipe, text=True
            )
        except FileNotFoundError:
            raise ClusterError(
                f"{self.argv[0]}: not installed here; install it, or use another machine"
            ) from None
        if done.returncode:
            printed = (done.stderr or done.stdout or "").strip().splitlines()
            why = printed[-1] if printed else f"exit code {done.returncode}"
            raise ClusterError(f"{shlex.join(self.argv[:3])}: {why}")
        return done.stdout or ""


def command_line(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """A command with its variables as a line of shell."""
    given = [
        f'{key}="{value}"' if "$" in value else f"{key}={shlex.quote(value)}" for key, value in env.items()
    ]
    return " ".join([*given, shlex.join(argv)])


def _here_document(text: str) -> str:
    return f"<<'END'\n{text.rstrip()}\nEND"
