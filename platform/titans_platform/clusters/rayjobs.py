"""Jobs through Ray's job API: the project goes as a wheel, the log comes back, the exit code is the job's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shlex
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titans_platform.clusters import package
from titans_platform.clusters.jobs import Job, JobInfo, Jobs, shell_code
from titans_platform.clusters.schema import Token
from titans_platform.clusters.steps import Note, Step
from titans_platform.clusters.tokens import read_token
from titans_platform.errors import ClusterError

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

CONSTRAINTS = "constraints.txt"
_CHATTY = (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
)
_TRIES = 40
"""Times in a row the log may break off, half a second apart, before we give up on it."""


def answers(address: str, token: str | None, timeout: float = 10.0) -> int:
    """The HTTP status of the job API at ``address``, 0 where nothing answers."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"{address}/api/version", headers=headers), timeout=timeout
        ) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError):
        return 0


@dataclass(frozen=True)
class RayJobs(Jobs):
    """The jobs of the Ray cluster whose dashboard is at ``address``."""

    cluster: str
    address: str
    token: Token

    def check(self) -> None:
        """Refuse a cluster that does not answer, does not take the token, or is open to everybody."""
        value = read_token(self.token, self.cluster)
        status = answers(self.address, value)
        if status in (401, 403):
            raise ClusterError(f"cluster {self.cluster}: {self.address} refuses the token in {self.token}")
        if status != 200:
            what = f"answers {status}, not as a Ray dashboard" if status else "no answer"
            raise ClusterError(
                f"cluster {self.cluster}: {self.address}: {what}; see titans cluster status, or up"
            )
        if answers(self.address, None) == 200:
            raise ClusterError(
                f"cluster {self.cluster}: {self.address} takes jobs from anybody, without a token; "
                "start it with RAY_AUTH_MODE=token"
            )

    def submit_steps(self, job: Job, job_id: str) -> list[Step]:
        """One: the job API's POST, with the wheel and the files uploaded before it."""
        return [_Submit(self, job, job_id)]

    def wait(self, job_id: str, write: Callable[[str], None]) -> int:
        """Follow the log until the job is over; a connection that breaks is made again."""
        client, log, tries = self._client(), _Log(write), 0
        while True:
            before = log.written
            try:
                asyncio.run(log.follow(client, job_id))
                info = self._info(client, job_id)
            except (ClusterError, _ReaderGone):
                raise
            except Exception as error:
                tries = tries + 1 if log.written == before else 0
                if tries > _TRIES:
                    raise ClusterError(
                        f"cluster {self.cluster}: the log of {job_id} broke off: {_one_line(error)}; "
                        f"titans cluster logs {self.cluster} {job_id} follows it again"
                    ) from None
                time.sleep(0.5)
                continue
            if info.ended:
                return shell_code(info.code, info.state)
            time.sleep(0.5)

    def logs(self, job_id: str) -> str:
        """The log as far as it has come."""
        client = self._client()
        self._info(client, job_id)
        return client.get_job_logs(job_id)

    def stop(self, job_id: str) -> None:
        """End the job's driver, and with it all it started."""
        client = self._client()
        self._info(client, job_id)
        client.stop_job(job_id)

    def stop_steps(self, job_id: str) -> list[Step]:
        """As Ray's own command line would do it."""
        return [_Stop(self, job_id)]

    def log_steps(self, job_id: str) -> list[Step]:
        """The log's own address."""
        return [Note(f"GET {self.address}/api/jobs/{job_id}/logs/tail with the token in {self.token}")]

    def list(self) -> list[JobInfo]:
        """Jobs that were submitted, the newest last."""
        found = [job for job in self._client().list_jobs() if job.submission_id]
        return sorted((_job_info(job) for job in found), key=lambda job: job.started or 0)

    def about(self) -> dict[str, Any]:
        """Version, nodes and jobs."""
        version = self._get("/api/version")["ray_version"]
        nodes = self._get("/api/v0/nodes")["data"]["result"]["result"]
        found = sorted((_node(node) for node in nodes), key=lambda node: (not node["head"], node["id"]))
        return {"ray_version": version, "nodes": found, **super().about()}

    def _get(self, path: str) -> Any:
        headers = {"Authorization": f"Bearer {read_token(self.token, self.cluster)}"}
        request = urllib.request.Request(self.address + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                return json.load(reply)
        except (OSError, ValueError) as error:
            raise ClusterError(f"cluster {self.cluster}: {self.address}: {_one_line(error)}") from None

    def _client(self) -> JobSubmissionClient:
        from ray.job_submission import JobSubmissionClient

        for name in _CHATTY:
            logging.getLogger(name).setLevel(logging.ERROR)
        headers = {"Authorization": f"Bearer {read_token(self.token, self.cluster)}"}
        try:
            return JobSubmissionClient(self.address, headers=headers)
        except Exception as error:
            raise ClusterError(f"cluster {self.cluster}: {self.address}: {_one_line(error)}") from None

    def _info(self, client: JobSubmissionClient, job_id: str) -> JobInfo:
        try:
            return _job_info(client.get_job_info(job_id))
        except RuntimeError as error:
            if "404" not in str(error):
                raise
            raise ClusterError(
                f"cluster {self.cluster}: no job {job_id}; titans cluster status {self.cluster} lists them"
            ) from None


def _job_info(job: Any) -> JobInfo:
    return JobInfo(
        id=job.submission_id,
        name=(job.metadata or {}).get("name", ""),
        state=job.status.value.lower(),
        started=job.start_time / 1000 if job.start_time else None,
        code=job.driver_exit_code,
    )


def _node(node: Mapping[str, Any]) -> dict[str, Any]:
    total = node["resources_total"] or {}
    return {
        "id": node["node_id"][:8],
        "ip": node["node_ip"],
        "head": node["is_head_node"],
        "alive": node["state"] == "ALIVE",
        "cpus": total.get("CPU", 0),
        "gpus": total.get("GPU", 0),
    }


class _ReaderGone(BrokenPipeError):
    """Whoever read what we print has left: not a matter of the connection to the cluster."""


class _Log:
    """A log that is written on where it broke off; Ray sends it from its beginning each time."""

    def __init__(self, write: Callable[[str], None]):
        self._write = write
        self.written = 0

    async def follow(self, client: JobSubmissionClient, job_id: str) -> None:
        """Write what is new until the log ends."""
        skip = self.written
        stream: Any = client.tail_job_logs(job_id)
        async with contextlib.aclosing(stream) as chunks:
            async for chunk in chunks:
                fresh, skip = chunk[skip:], max(0, skip - len(chunk))
                try:
                    self._write(fresh)
                except BrokenPipeError as error:
                    raise _ReaderGone(*error.args) from None
                self.written += len(fresh)


@dataclass(frozen=True)
class _Submit(Step):
    jobs: RayJobs
    job: Job
    job_id: str

    def shown(self) -> str:
        """The same by Ray's command line; the token comes from where `titans` reads it."""
        runtime_env = self._runtime_env("<job folder>", f"<{package.DISTRIBUTION} wheel>")
        names = ", ".join(sorted(self._files()))
        return (
            f"# job folder: {names}\n"
            f"ray job submit --address {shlex.quote(self.jobs.address)} --submission-id {self.job_id} \\\n"
            f"  --runtime-env-json {shlex.quote(json.dumps(runtime_env))} \\\n"
            f"  -- {shlex.join(self.job.command)}"
        )

    def do(self) -> None:
        """Build the wheel, upload it with the files, submit."""
        client = self.jobs._client()
        with tempfile.TemporaryDirectory() as folder, _laid_out(self._files()) as files:
            wheel = package.project_wheel(Path(folder))
            try:
                client.submit_job(
                    entrypoint=shlex.join(self.job.command),
                    submission_id=self.job_id,
                    runtime_env=self._runtime_env(str(files), str(wheel)),
                    metadata={"name": self.job.name},
                )
            except Exception as error:
                raise ClusterError(
                    f"cluster {self.jobs.cluster}: the job was not taken: {_one_line(error)}"
                ) from None

    def _files(self) -> dict[str, bytes]:
        return {**self.job.files, CONSTRAINTS: package.constraints()}

    def _runtime_env(self, folder: str, wheel: str) -> dict[str, Any]:
        env: dict[str, Any] = {
            "working_dir": folder,
            "py_modules": [wheel],
            "env_vars": dict(self.job.env),
        }
        if self.job.pip:
            locked = "-c ${RAY_RUNTIME_ENV_CREATE_WORKING_DIR}/" + CONSTRAINTS
            env["pip"] = [locked, *package.requirements()]
        return env


@dataclass(frozen=True)
class _Stop(Step):
    jobs: RayJobs
    job_id: str

    def shown(self) -> str:
        """The same by Ray's command line."""
        return f"ray job stop --address {shlex.quote(self.jobs.address)} {shlex.quote(self.job_id)}"

    def do(self) -> None:
        """Stop it."""
        self.jobs.stop(self.job_id)


@contextlib.contextmanager
def _laid_out(files: Mapping[str, bytes]) -> Iterator[Path]:
    """The files in a folder of their own."""
    with tempfile.TemporaryDirectory() as name:
        for relative, content in files.items():
            path = Path(name) / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        yield Path(name)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
