"""What brings a cluster up or down, as values: --dry-run shows the very steps that `up` performs."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from titans_platform.clusters.access import clean_environment, write_token
from titans_platform.errors import ClusterError


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


def _line(argv: Sequence[str], env: Mapping[str, str]) -> str:
    given = [
        f'{key}="{value}"' if "$" in value else f"{key}={shlex.quote(value)}" for key, value in env.items()
    ]
    return " ".join([*given, shlex.join(argv)])


@dataclass(frozen=True)
class Note(Step):
    """A remark where there is nothing to do."""

    text: str

    def shown(self) -> str:
        return f"# {self.text}"

    def do(self) -> None:
        pass


@dataclass(frozen=True)
class Call(Step):
    """Call a function; shown as the lines of shell that do the same, or as a remark."""

    line: str
    function: Callable[[], object]

    def shown(self) -> str:
        return self.line

    def do(self) -> None:
        self.function()


def new_token(path: Path) -> Step:
    """Write a random token that only its owner can read."""
    line = f"(umask 077; python -c 'import secrets; print(secrets.token_hex(32))' > {shlex.quote(str(path))})"
    return Call(line, partial(write_token, path))


def private_folder(path: Path) -> Step:
    """Make a folder that must not exist yet and that only its owner can enter."""
    return Call(f"mkdir -m 700 {shlex.quote(str(path))}", partial(path.mkdir, mode=0o700))


def remove(*folders: str) -> Step:
    """Remove folders; one that is gone is no error."""
    return Call(
        f"rm -r {shlex.join(folders)}", lambda: [shutil.rmtree(f, ignore_errors=True) for f in folders]
    )


def wait_until(what: str, met: Callable[[], bool], hint: str, timeout: float = 90.0) -> Step:
    """Wait for something to become true, for ``timeout`` seconds."""

    def wait() -> None:
        deadline = time.monotonic() + timeout
        while not met():
            if time.monotonic() > deadline:
                raise ClusterError(f"{what}: not within {timeout:.0f} s; {hint}")
            time.sleep(0.3)

    return Call(f"# wait until {what}", wait)


@dataclass(frozen=True)
class Write(Step):
    """Write a file, and the folder it is in."""

    path: Path
    content: str | bytes

    def shown(self) -> str:
        if isinstance(self.content, bytes):
            return f"# {len(self.content)} bytes to {self.path}"
        return f"cat > {shlex.quote(str(self.path))} <<'END'\n{self.content.rstrip()}\nEND"

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
        line = _line(self.argv, self.env)
        if self.into:
            line += f" > {shlex.quote(str(self.into))}"
        return f"{line} <<'END'\n{self.stdin.rstrip()}\nEND" if self.stdin else line

    def do(self) -> None:
        printed = self.output()
        if self.into:
            self.into.write_text(printed)

    def output(self) -> str:
        """Run it and return what it printed. Raises ClusterError."""
        try:
            done = subprocess.run(
                self.argv,
                env=clean_environment(self.env),
                input=self.stdin or None,
                stdout=subprocess.PIPE if self.quiet else None,
                stderr=subprocess.PIPE if self.quiet else None,
                text=True,
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


@dataclass(frozen=True)
class Start(Step):
    """Start a process that stays, in a session of its own, so that Ctrl-C here does not reach it."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: Path
    started: Callable[[int], None]
    """Called with the process id at once: only what is recorded can be ended."""

    def shown(self) -> str:
        return f"{_line(self.argv, self.env)} > {shlex.quote(str(self.log))} 2>&1 &"

    def do(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                self.argv,
                env=clean_environment(self.env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started(process.pid)
