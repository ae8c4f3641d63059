"""What is done to bring a cluster up or down, as values: --dry-run shows the very steps `up` performs."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from titans_platform.clusters.tokens import clean_environment, write_token
from titans_platform.errors import ClusterError


class Step(ABC):
    """One thing that is done, and can be shown instead."""

    @abstractmethod
    def shown(self) -> str:
        """The step as lines of a shell script."""

    @abstractmethod
    def do(self) -> None:
        """Do it. Raises ClusterError."""


def _line(argv: Sequence[str], env: Mapping[str, str]) -> str:
    given = [
        f'{key}="{value}"' if "$" in value else f"{key}={shlex.quote(value)}" for key, value in env.items()
    ]
    return " ".join([*given, shlex.join(argv)])


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """A clean environment and ``env``, where `$PATH` stands for the one that is there."""
    return clean_environment() | {key: os.path.expandvars(value) for key, value in env.items()}


@dataclass(frozen=True)
class Write(Step):
    """Write a file."""

    path: Path
    text: str

    def shown(self) -> str:
        """A here-document."""
        return f"cat > {shlex.quote(str(self.path))} <<'END'\n{self.text.rstrip()}\nEND"

    def do(self) -> None:
        """Write it, and its folder."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(self.text, encoding="utf-8")


@dataclass(frozen=True)
class NewToken(Step):
    """Make a token; shown without its value, which there is none of before."""

    path: Path

    def shown(self) -> str:
        """The equivalent in a shell."""
        path = shlex.quote(str(self.path))
        return f"(umask 077; python -c 'import secrets; print(secrets.token_hex(32))' > {path})"

    def do(self) -> None:
        """Write a random one."""
        write_token(self.path)


@dataclass(frozen=True)
class Run(Step):
    """Run a command to its end; what it prints is shown to the user only if it fails."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: str = ""
    quiet: bool = True

    def shown(self) -> str:
        """The command, what it reads as a here-document."""
        line = _line(self.argv, self.env)
        return f"{line} <<'END'\n{self.stdin.rstrip()}\nEND" if self.stdin else line

    def do(self) -> None:
        """Run it."""
        self.output()

    def output(self) -> str:
        """Run it; what it printed."""
        try:
            done = subprocess.run(
                self.argv,
                env=_environment(self.env),
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
            said = (done.stderr or done.stdout or "").strip().splitlines()
            why = said[-1] if said else f"exit code {done.returncode}"
            raise ClusterError(f"{shlex.join(self.argv[:3])}: {why}")
        return done.stdout or ""


@dataclass(frozen=True)
class Start(Step):
    """Start a process that stays, in a session of its own, so that Ctrl-C here does not reach it."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: Path
    started: Callable[[int], None]
    """Told the process id at once: what is not written down cannot be ended."""

    def shown(self) -> str:
        """The command, put into the background."""
        return f"{_line(self.argv, self.env)} > {shlex.quote(str(self.log))} 2>&1 &"

    def do(self) -> None:
        """Start it."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                self.argv,
                env=_environment(self.env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started(process.pid)


@dataclass(frozen=True)
class Until(Step):
    """Wait for something to become true."""

    what: str
    met: Callable[[], bool]
    timeout: float = 90.0
    otherwise: str = ""

    def shown(self) -> str:
        """A comment: the waiting is ours."""
        return f"# wait until {self.what}"

    def do(self) -> None:
        """Wait; ClusterError when the time is up."""
        deadline = time.monotonic() + self.timeout
        while not self.met():
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"waited {self.timeout:.0f} s until {self.what}, in vain; {self.otherwise}"
                )
            time.sleep(0.3)


@dataclass(frozen=True)
class Remove(Step):
    """Remove folders."""

    paths: tuple[str, ...]

    def shown(self) -> str:
        """`rm`."""
        return f"rm -r {shlex.join(self.paths)}"

    def do(self) -> None:
        """Remove them; one that is gone is no mistake."""
        for path in self.paths:
            shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class Note(Step):
    """A word where there is nothing to do."""

    text: str

    def shown(self) -> str:
        """A comment."""
        return f"# {self.text}"

    def do(self) -> None:
        """Nothing."""


def perform(steps: Sequence[Step]) -> None:
    """Do the steps in their order. Raises ClusterError."""
    for step in steps:
        step.do()
