"""Jobs through Ray's Jobs API: the project goes as a wheel, the log and the exit code come back.

Ray's client does what needs its protocol: uploading packages and following a log. Plain HTTP does the rest,
since the client cannot tell a wrong token from a dashboard that takes none.
"""

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
from functools import cached_property
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from titans_platform.clusters import packaging
from titans_platform.clusters.access import Token, read_token, tunnel
from titans_platform.clusters.jobs import Job, JobInfo, Jobs, Log, ReaderGone
from titans_platform.clusters.steps import Call, Note, Step, perform
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


def _open(address: str, token: str | None, timeout: float) -> HTTPResponse:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=timeout)


def answers(address: str, token: str | None, timeout: float = 10.0) -> int:
    """The HTTP status of the Jobs API at ``address``, 0 where nothing answers."""
    try:
        with _open(f"{address}/api/version", token, timeout) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError, HTTPException):
        return 0


@dataclass(frozen=True)
class RayJobs(Jobs):
    """The jobs of the Ray cluster whose dashboard is at ``address``."""

    address: str
    token: Token
    forward: tuple[str, ...] = ()
    """A command that forwards ``address`` for as long as it runs; none where it is open to us."""
    before: tuple[Step, ...] = ()
    """What is done before the token is read."""
    poll: ClassVar[float] = 0.5

    def way(self) -> list[Step]:
        forward = [Note(f"for as long as it takes: {shlex.join(self.forward)}")] if self.forward else []
        return [*self.before, *forward]

    @contextlib.contextmanager
    def connected(self) -> Iterator[Self]:
        perform(self.before)
        port = int(self.address.rpartition(":")[2]) if self.forward else 0
        with tunnel(self.forward, port) if self.forward else contextlib.nullcontext():
            self.check()
            yield self

    def check(self) -> None:
        """Raise ClusterError for no answer, a token that is refused, or a cluster open to everybody."""
        status = answers(self.address, self._token())
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
        return [_Submit(self, job, job_id)]

    def list(self) -> list[JobInfo]:
        found = [_job_info(job) for job in self._get("/api/jobs/") if job["submission_id"]]
        return sorted(found, key=lambda job: job.started or 0)

    def read(self, job_id: str, log: Log, follow: bool) -> None:
        take = log.from_start()
        if follow:
            asyncio.run(self._tail(job_id, take))
        else:
            take(self.client.get_job_logs(job_id))

    async def _tail(self, job_id: str, take: Callable[[str], None]) -> None:
        stream: Any = self.client.tail_job_logs(job_id)
        async with contextlib.aclosing(stream) as chunks:
            async for chunk in chunks:
                take(chunk)

    def wait(self, job_id: str, write: Callable[[str], None]) -> int:
        """As for every kind; a connection that breaks is made again."""
        self.info(job_id)
        log, tries = Log(write), 0
        while True:
            before = log.offset
            try:
                return self.follow(job_id, log)
            except ReaderGone:
                raise
            except Exception as error:
                tries = tries + 1 if log.offset == before else 0
                if tries > _TRIES:
                    raise ClusterError(
                        f"cluster {self.cluster}: the log of {job_id} broke off: {_one_line(error)}; "
                        f"titans cluster logs {self.cluster} {job_id} follows it again"
                    ) from None
                time.sleep(self.poll)

    def stop_steps(self, job_id: str) -> list[Step]:
        line = f"ray job stop --address {shlex.quote(self.address)} {shlex.quote(job_id)}"
        return [Call(line, lambda: self.client.stop_job(job_id))]

    def log_steps(self, job_id: str) -> list[Step]:
        return [Note(f"GET {self.address}/api/jobs/{job_id}/logs/tail with the token in {self.token}")]

    def status_steps(self) -> list[Step]:
        return [Note(f"GET {self.address}/api/version, /api/v0/nodes, /api/jobs/ with the token")]

    def about(self) -> dict[str, Any]:
        """Version, nodes and jobs."""
        version = self._get("/api/version")["ray_version"]
        nodes = self._get("/api/v0/nodes")["data"]["result"]["result"]
        found = sorted((_node(node) for node in nodes), key=lambda node: (not node["head"], node["id"]))
        return {"ray_version": version, "nodes": found, **super().about()}

    def _token(self) -> str:
        return read_token(self.token, self.cluster)

    def _get(self, path: str) -> Any:
        try:
            with _open(self.address + path, self._token(), timeout=30) as reply:
                return json.load(reply)
        except (OSError, ValueError, HTTPException) as error:
            raise ClusterError(f"cluster {self.cluster}: {self.address}: {_one_line(error)}") from None

    @cached_property
    def client(self) -> JobSubmissionClient:
        """Ray's own client. Raises ClusterError."""
        from ray.job_submission import JobSubmissionClient

        for name in _CHATTY:
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            return JobSubmissionClient(self.address, headers={"Authorization": f"Bearer {self._token()}"})
        except Exception as error:
            raise ClusterError(f"cluster {self.cluster}: {self.address}: {_one_line(error)}") from None


def _job_info(job: Mapping[str, Any]) -> JobInfo:
    return JobInfo(
        id=job["submission_id"],
        name=(job["metadata"] or {}).get("name", ""),
        state=job["status"].lower(),
        started=job["start_time"] / 1000 if job["start_time"] else None,
        code=job["driver_exit_code"],
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


@dataclass(frozen=True)
class _Submit(Step):
    """Build the wheel, upload it with the job's files, submit."""

    jobs: RayJobs
    job: Job
    job_id: str

    def shown(self) -> str:
        # Ray's command line for it; the token comes from where `titans` reads it
        runtime_env = self._runtime_env("<job folder>", f"<{packaging.DISTRIBUTION} wheel>")
        return (
            f"# job folder: {', '.join(sorted(self._files()))}\n"
            f"ray job submit --address {shlex.quote(self.jobs.address)} --submission-id {self.job_id} \\\n"
            f"  --runtime-env-json {shlex.quote(json.dumps(runtime_env))} \\\n"
            f"  -- {shlex.join(self.job.command)}"
        )

    def do(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            wheel, folder = Path(name, "wheel"), Path(name, "files")
            wheel.mkdir()
            packaging.lay_out(self._files(), folder)
            runtime_env = self._runtime_env(str(folder), str(packaging.project_wheel(wheel)))
            try:
                self.jobs.client.submit_job(
                    entrypoint=shlex.join(self.job.command),
                    submission_id=self.job_id,
                    runtime_env=runtime_env,
                    metadata={"name": self.job.name},
                )
            except Exception as error:
                raise ClusterError(
                    f"cluster {self.jobs.cluster}: the job was not accepted: {_one_line(error)}"
                ) from None

    def _files(self) -> dict[str, bytes]:
        return {**self.job.files, CONSTRAINTS: packaging.constraints()}

    def _runtime_env(self, folder: str, wheel: str) -> dict[str, Any]:
        env: dict[str, Any] = {"working_dir": folder, "py_modules": [wheel], "env_vars": dict(self.job.env)}
        if self.job.pip:
            locked = "-c ${RAY_RUNTIME_ENV_CREATE_WORKING_DIR}/" + CONSTRAINTS
            env["pip"] = [locked, *packaging.requirements()]
        return env


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
