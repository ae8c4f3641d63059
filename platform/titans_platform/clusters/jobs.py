"""Jobs: a `titans` command that runs on a cluster, and how it is followed from here."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from titans_platform.clusters.steps import Step

DETACHED = 130
"""What a shell returns after Ctrl-C; the job itself goes on."""


@dataclass(frozen=True)
class Job:
    """One `titans` command with all it takes along."""

    name: str
    arguments: tuple[str, ...]
    """What would be typed after `titans`."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Put into the job's working directory, under these relative names."""
    env: Mapping[str, str] = field(default_factory=dict)
    pip: bool = False
    """Install the locked requirements on the nodes first."""

    def new_id(self) -> str:
        """A name nobody has, that says what it is."""
        return f"{self.name}-{secrets.token_hex(3)}"

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
    code: int | None = None

    @property
    def ended(self) -> bool:
        """Whether it is over."""
        return self.state in ("succeeded", "failed", "stopped")


class Jobs(ABC):
    """The jobs of one cluster."""

    @abstractmethod
    def submit_steps(self, job: Job, job_id: str) -> list[Step]:
        """What submitting does."""

    @abstractmethod
    def wait(self, job_id: str, write: Callable[[str], None]) -> int:
        """Give ``write`` the log from its beginning and as it grows; the job's exit code."""

    @abstractmethod
    def logs(self, job_id: str) -> str:
        """The log as far as it has come."""

    @abstractmethod
    def stop(self, job_id: str) -> None:
        """End a job; it can be submitted again and goes on where it was."""

    @abstractmethod
    def stop_steps(self, job_id: str) -> list[Step]:
        """What ``stop`` does, to be shown."""

    @abstractmethod
    def log_steps(self, job_id: str) -> list[Step]:
        """What ``logs`` and ``wait`` read, to be shown."""

    @abstractmethod
    def list(self) -> list[JobInfo]:
        """Every job the cluster knows, the newest last."""

    def about(self) -> dict[str, Any]:
        """What is known of the cluster: its jobs, and for some kinds its nodes."""
        return {"jobs": [asdict(job) for job in self.list()]}

    def submit(self, job: Job) -> str:
        """Submit a job; its id."""
        job_id = job.new_id()
        for step in self.submit_steps(job, job_id):
            step.do()
        return job_id


def shell_code(code: int | None, state: str = "failed") -> int:
    """A driver's exit code as a shell has it: 128 and the signal's number where a signal ended it."""
    if state == "succeeded":
        return 0
    if code is None:
        return DETACHED if state == "stopped" else 1
    return 128 - code if code < 0 else code
