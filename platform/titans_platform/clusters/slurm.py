"""Kind `slurm`: each job is a batch job that starts Ray on its nodes, runs the study, and stops Ray.

`titans` runs on a login node; the storage is a folder that login and compute nodes share. A job has a folder
of its own there, with its code, files, script, token, log and exit code.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from titans_core.config import PositiveInt
from titans_platform.clusters import packaging
from titans_platform.clusters.base import Cluster, Count, Job, JobInfo, Jobs, Log
from titans_platform.clusters.steps import Note, Run, Step, Write, new_token, perform, token_variables
from titans_platform.errors import Interrupted, UsageError
from titans_platform.text import render

JOB = Path(__file__).parent / "templates" / "job.sbatch"
_QUEUE = Run(("squeue", "--me", "--noheader", "--format=%i %T"))
_WAITS = ("PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED")


class Slurm(Cluster):
    """Batch jobs."""

    sees_paths: ClassVar[bool] = True
    nodes: PositiveInt = 1
    cpus_per_node: PositiveInt
    gpus_per_node: Count = 0
    time: Annotated[str, Field(pattern=r"^(\d+-)?\d+(:\d+){0,2}$")] = "24:00:00"
    """Time limit of a job; a study that hits it resumes when it is submitted again."""
    partition: str | None = None
    account: str | None = None
    exclusive: bool = True
    """Whole nodes. Ray's symmetric-run stops every Ray of the user on its nodes when the job ends."""
    options: tuple[str, ...] = ()
    """Additional sbatch options, e.g. --constraint=h100."""
    setup: tuple[str, ...] = ()
    """Shell lines before Ray starts: modules, `source .venv/bin/activate`."""

    @model_validator(mode="after")
    def _shared(self) -> Slurm:
        if not self.storage:
            raise ValueError("storage: missing; give a folder that login and compute nodes share")
        if self.pip:
            raise ValueError("pip: install the requirements once, and activate them in `setup`")
        if bad := [line for line in self.options if not line.startswith("-") or "\n" in line]:
            raise ValueError(f"options: {bad[0]!r} is not an sbatch option")
        return self

    @property
    def one_machine(self) -> bool:
        return self.nodes == 1

    def up_steps(self) -> list[Step]:
        note = Note("nothing to start: each submit is a batch job with its own Ray")
        return [Run(("sbatch", "--version")), note]

    def down_steps(self) -> list[Step]:
        """Cancel the queued and running jobs that were submitted from here."""
        jobs = self.jobs()
        steps = [step for job in jobs.list() if not job.ended for step in jobs.stop_steps(job.id)]
        return steps or [Note("nothing to cancel: no job that was submitted here is queued or running")]

    def down(self) -> None:
        perform(self.down_steps())

    def where(self) -> str:
        return f"Slurm, {self.nodes} nodes of partition {self.partition or '(default)'} for each job"

    def jobs(self) -> Jobs:
        assert self.storage is not None
        return SlurmJobs(self.name, self, Path(self.storage) / "slurm" / self.name)


@dataclass(frozen=True)
class SlurmJobs(Jobs):
    """The batch jobs under ``folder``."""

    spec: Slurm
    folder: Path

    def submit_steps(self, job: Job, job_id: str) -> list[Step]:
        """Return the steps: unpack the code, write the files, a token and the script, call sbatch."""
        at = self.folder / job_id
        configured = self.spec.token
        if configured and configured.env:
            raise UsageError(f"{self.cluster}.yaml.token.env: nodes read the token as a file; give `file`")
        token, ended = configured.path if configured else at / "token", shlex.quote(str(at / "exit"))
        code, wheel = at / "code", f"<{packaging.DISTRIBUTION} wheel>"
        variables = {"RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT": "300", "PYTHONPATH": f"{code}:{at / 'files'}"}
        exports = {**job.env, **token_variables(token), **variables}
        command = f"(echo $BASHPID > {shlex.quote(str(at / 'pid'))}; exec {shlex.join(job.command)})"
        script = render(JOB, spec=self.spec, at=at, exports=exports)
        unpack = f"python -m zipfile --extract {wheel} {shlex.quote(str(code))}"
        return [
            Step(unpack, partial(packaging.put_code, code)),
            *(Write(at / "files" / name, content) for name, content in job.files.items()),
            *([] if configured else [new_token(token)]),
            # srun mixes the command's exit code with the other nodes'
            Write(at / "run.sh", f"{command}\ncode=$?\necho $code > {ended}\nexit $code\n"),
            # it names the token's file, on the shared storage, not the token
            Write(at / "job.sbatch", script),
            Run(("sbatch", "--parsable", str(at / "job.sbatch")), into=at / "slurm_id"),
        ]

    def read(self, job_id: str, log: Log) -> None:
        if (path := self.folder / job_id / "log.txt").exists():
            log.add(path.read_text(encoding="utf-8", errors="replace"))

    def stop_steps(self, job_id: str) -> list[Step]:
        """Return the steps: cancel a queued job; a running one gets SIGTERM and ends at its checkpoints."""
        number = _number(self.folder / job_id)
        if not number:
            return [Note(f"Slurm never accepted {job_id}")]
        running = any(job.id == job_id and job.state == "running" for job in self.list())
        return [Run(("scancel", *(("--batch", "--signal=TERM") if running else ()), number))]

    def list(self) -> list[JobInfo]:
        ids = sorted(self.folder.glob("*/slurm_id"), key=lambda path: path.stat().st_mtime)
        folders = [path.parent for path in ids]
        lines = _QUEUE.output().splitlines() if folders else []
        queue = dict(line.split(maxsplit=1) for line in lines if len(line.split()) > 1)
        return [_job_info(path, queue.get(_number(path))) for path in folders]


def _job_info(folder: Path, queued: str | None) -> JobInfo:
    """Describe a job from its folder and its state in the queue, None if it has left the queue."""
    ended = _read(folder / "exit")
    code = int(ended) if ended.isdigit() else None
    if queued:
        state = "pending" if queued in _WAITS else "running"
    elif code is not None:
        state = "failed" if code else "succeeded"
        if code == Interrupted.exit_code:
            state = "stopped"
    else:
        # cancelled, out of time, or a node that died
        state = "stopped" if (folder / "log.txt").exists() else "failed"
    submitted = (folder / "slurm_id").stat().st_mtime
    return JobInfo(folder.name, folder.name.rpartition("-")[0], state, submitted, code)


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def _number(folder: Path) -> str:
    """Slurm's job id; sbatch prints it as `number;cluster` where there are several clusters."""
    return _read(folder / "slurm_id").split(";")[0]
