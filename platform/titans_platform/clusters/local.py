"""Kind `local`: no cluster file is needed; the Ray that a study starts here and ends with itself."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from titans_platform.clusters.base import Cluster
from titans_platform.clusters.jobs import Job, JobInfo, Jobs
from titans_platform.clusters.schema import ClusterSpec
from titans_platform.clusters.steps import Note, Step
from titans_platform.errors import UsageError

KEEPS_NONE = "runs in the shell that started it and keeps no jobs; Ctrl-C ends one, sweep status shows it"


class LocalSpec(ClusterSpec):
    """This machine has no fields of its own."""

    kind: Literal["local"]


class Local(Cluster[LocalSpec]):
    """This machine."""

    kind = "local"
    Spec = LocalSpec
    sees_paths = True

    @property
    def one_machine(self) -> bool:
        """It is one."""
        return True

    def up_steps(self) -> list[Step]:
        """None: a study starts its own Ray."""
        return [Note("nothing to start: a study starts its own Ray on this machine and ends it")]

    def down_steps(self) -> list[Step]:
        """None."""
        return [Note("nothing to end: a study ends its own Ray")]

    def status_steps(self) -> list[Step]:
        """None: the operating system is asked."""
        return [Note("counts this machine's CPUs")]

    def up(self) -> str:
        """It always is."""
        return "this machine; nothing to start"

    def down(self) -> None:
        """It never is."""

    def status(self) -> dict[str, Any]:
        """What the machine has; a study looks again when it starts."""
        from titans_platform.runs.resources import this_machine

        found = this_machine()
        node = {"id": "this", "ip": "127.0.0.1", "head": True, "alive": True, "cpus": found.cpus}
        return {"state": "up", "where": "this machine", "nodes": [node], "jobs": []}

    def open_jobs(self) -> Iterator[Jobs]:
        """Commands run here, one after the other."""
        yield _Here(self.name)

    def describe_jobs(self) -> tuple[list[Step], Jobs]:
        """The same."""
        return [], _Here(self.name)


@dataclass(frozen=True)
class _Here(Jobs):
    """Runs the command in a process of this shell."""

    cluster: str
    codes: dict[str, int] = field(default_factory=dict)

    def submit_steps(self, job: Job, job_id: str) -> list[Step]:
        return [_Command(self, job, job_id)]

    def wait(self, job_id: str, write: Callable[[str], None]) -> int:
        return self.codes[job_id]

    def logs(self, job_id: str) -> str:
        raise UsageError(f"cluster {self.cluster}: {KEEPS_NONE}")

    def stop(self, job_id: str) -> None:
        raise UsageError(f"cluster {self.cluster}: {KEEPS_NONE}")

    def stop_steps(self, job_id: str) -> list[Step]:
        raise UsageError(f"cluster {self.cluster}: {KEEPS_NONE}")

    def log_steps(self, job_id: str) -> list[Step]:
        raise UsageError(f"cluster {self.cluster}: {KEEPS_NONE}")

    def list(self) -> list[JobInfo]:
        return []


@dataclass(frozen=True)
class _Command(Step):
    jobs: _Here
    job: Job
    job_id: str

    def shown(self) -> str:
        """The command itself."""
        return shlex.join(["titans", *self.job.arguments])

    def do(self) -> None:
        """Run it, with what it prints going where ours goes."""
        argv = [sys.executable, "-m", "titans_platform", *self.job.arguments]
        self.jobs.codes[self.job_id] = subprocess.run(argv).returncode
