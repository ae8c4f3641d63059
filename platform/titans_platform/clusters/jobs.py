"""Jobs: a `titans` command that runs on a cluster, and how it is followed from here."""

from __future__ import annotations

import json
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Self

from titans_platform.clusters.steps import Step, perform
from titans_platform.errors import ClusterError

DETACHED = 130
"""A shell's exit code after Ctrl-C; the job keeps running."""
_OPENS = re.compile(r"^[{\[]\n", re.MULTILINE)


@dataclass(frozen=True)
class Job:
    """One `titans` command with everything it needs."""

    name: str
    arguments: tuple[str, ...]
    """The arguments after `titans`."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files for the job's working directory, by relative path."""
    env: Mapping[str, str] = field(default_factory=dict)
    pip: bool = False
    """Install the locked requirements on the nodes first."""

    @property
    def command(self) -> tuple[str, ...]:
        """The whole command line. A job's `python` is the one on the node's PATH."""
        return ("python", "-m", "titans_platform", *self.arguments)


@dataclass(frozen=True)
class JobInfo:
    """A job as `titans cluster status` lists it."""

    id: str
    name: str
    state: str
    """pending, running, succeeded, failed or stopped."""
    started: float | None = None
    """Seconds since the epoch."""
    code: int | None = None
    """The driver's exit code, negative where a signal ended it."""

    @property
    def ended(self) -> bool:
        """Whether it is over."""
        return self.state in ("succeeded", "failed", "stopped")

    @property
    def shell_code(self) -> int:
        """The exit code as a shell reports it: 128 plus the signal's number where a signal ended it."""
        if self.state == "succeeded":
            return 0
        if self.code is None:
            return DETACHED if self.state == "stopped" else 1
        return 128 - self.code if self.code < 0 else self.code


class ReaderGone(BrokenPipeError):
    """The reader of our output closed the pipe; the connection to the cluster may be intact."""


class Log:
    """Writes a job's log once: every read starts at its beginning and skips what was written before."""

    def __init__(self, write: Callable[[str], None]):
        self._write = write
        self._skip = self.written = 0

    def restart(self) -> None:
        """Start a new read from the beginning."""
        self._skip = self.written

    def add(self, text: str) -> None:
        """Add the next chunk of this read."""
        fresh, self._skip = text[self._skip :], max(0, self._skip - len(text))
        try:
            self._write(fresh)
        except BrokenPipeError as error:
            raise ReaderGone(*error.args) from None
        self.written += len(fresh)


@dataclass(frozen=True)
class Jobs(ABC):
    """The jobs of one cluster. Creating one contacts nothing, so that --dry-run can show its steps.

    Methods that contact the cluster raise ClusterError.
    """

    cluster: str
    poll: ClassVar[float] = 2.0
    """Seconds between polls of a job's state."""

    @abstractmethod
    def submit_steps(self, job: Job, job_id: str) -> list[Step]:
        """The steps that submit a job."""

    @abstractmethod
    def list(self) -> list[JobInfo]:
        """Every job the cluster knows, the newest last."""

    @abstractmethod
    def read(self, job_id: str, log: Log, follow: bool) -> None:
        """Add the log from its start; with ``follow`` it may block while the log grows."""

    @abstractmethod
    def stop_steps(self, job_id: str) -> list[Step]:
        """The steps that stop a job."""

    @abstractmethod
    def log_steps(self, job_id: str) -> list[Step]:
        """The steps that read the log."""

    @abstractmethod
    def status_steps(self) -> list[Step]:
        """The steps that query nodes and jobs."""

    def access_steps(self) -> list[Step]:
        """The steps required before any of those above, such as forwarding a port."""
        return []

    @contextmanager
    def connected(self) -> Iterator[Self]:
        """The jobs, connected for the duration of the block."""
        yield self

    def about(self) -> dict[str, Any]:
        """Status of the cluster: its jobs, and for some kinds its nodes."""
        return {"jobs": [asdict(job) for job in self.list()]}

    def info(self, job_id: str) -> JobInfo:
        """One job. Raises ClusterError that lists the known jobs if it is not one of them."""
        known = {job.id: job for job in self.list()}
        if job_id not in known:
            names = ", ".join(list(known)[-5:]) or "none"
            raise ClusterError(f"cluster {self.cluster}: no job {job_id!r}; its jobs: {names}")
        return known[job_id]

    def new_id(self, job: Job) -> str:
        """A new id that begins with the job's name."""
        return f"{job.name}-{secrets.token_hex(3)}"

    def submit(self, job: Job) -> str:
        """Submit a job; its id."""
        job_id = self.new_id(job)
        perform(self.submit_steps(job, job_id))
        return job_id

    def stop(self, job_id: str) -> None:
        """Stop a job; submitting the same command again resumes it."""
        self.info(job_id)
        perform(self.stop_steps(job_id))

    def follow(self, job_id: str, log: Log) -> int:
        """Write the log to ``log`` until the job ends; returns its exit code."""
        while True:
            info = self.info(job_id)
            if info.state != "pending":
                log.restart()
                self.read(job_id, log, follow=True)
            if info.ended:
                return info.shell_code
            time.sleep(self.poll)


class Answer:
    """Separates a command's JSON answer from the rest of its log, in which Ray joins stdout and stderr.

    `--json` prints one object or list, last, whose first line is a bracket alone.
    """

    def __init__(self, rest: Callable[[str], None]):
        self._rest = rest
        self._held = ""

    def write(self, text: str) -> None:
        """Add a chunk of the log; all before the last line that may open an answer goes to the rest."""
        self._held += text
        whole = self._held.rfind("\n") + 1
        opened = [match.start() for match in _OPENS.finditer(self._held, 0, whole)]
        count = opened[-1] if opened else whole
        self._rest(self._held[:count])
        self._held = self._held[count:]

    def text(self) -> str:
        """The answer, empty where the command printed none; all other lines go to the rest."""
        try:
            _, end = json.JSONDecoder().raw_decode(self._held)
        except ValueError:
            end = 0
        answer = self._held[:end] + "\n" if end else ""
        self._rest(self._held[end:].removeprefix("\n" if end else ""))
        return answer
