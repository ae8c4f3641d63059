"""Kind `local`: this machine. A study starts and stops its own Ray here; no cluster file is needed."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

from titans_platform.clusters.base import Cluster, Job, JobInfo, Jobs, Log
from titans_platform.clusters.steps import Note, Step
from titans_platform.errors import UsageError
from titans_platform.runs.spec import this_machine


class Local(Cluster):
    """This machine."""

    sees_paths: ClassVar[bool] = True

    @property
    def one_machine(self) -> bool:
        return True

    @property
    def is_up(self) -> bool:
        return True

    def up_steps(self) -> list[Step]:
        return [Note("nothing to start: a study starts and stops its own Ray on this machine")]

    def down_steps(self) -> list[Step]:
        return [Note("nothing to stop: a study stops its own Ray")]

    def down(self) -> None:
        """Nothing to stop."""

    def where(self) -> str:
        return "this machine"

    def jobs(self) -> Jobs:
        return LocalJobs(self.name)


@dataclass(frozen=True)
class LocalJobs(Jobs):
    """Runs commands in this shell, one after the other, without a job list."""

    codes: dict[str, int] = field(default_factory=dict)

    def submit_steps(self, job: Job, job_id: str) -> list[Step]:
        # the command inherits stdout and stderr
        argv = [sys.executable, "-m", "titans_platform", *job.arguments]

        def run() -> None:
            self.codes[job_id] = subprocess.run(argv).returncode

        return [Step(shlex.join(["titans", *job.arguments]), run)]

    def follow(self, job_id: str, log: Log) -> int:
        return self.codes[job_id] if job_id in self.codes else self.info(job_id)

    def list(self) -> list[JobInfo]:
        return []

    def info(self, job_id: str) -> NoReturn:
        raise UsageError(
            f"cluster {self.cluster}: has no job list: a command runs in the shell that started it; "
            "Ctrl-C stops it, titans sweep status shows its progress"
        )

    def read(self, job_id: str, log: Log, follow: bool) -> None:
        self.info(job_id)

    def stop_steps(self, job_id: str) -> list[Step]:
        self.info(job_id)

    log_steps = stop_steps

    def status_steps(self) -> list[Step]:
        return [Note("counts this machine's CPUs")]

    def about(self) -> dict[str, Any]:
        node = {"id": "this", "ip": "127.0.0.1", "head": True, "alive": True, "cpus": this_machine().cpus}
        return {"nodes": [node], "jobs": []}
