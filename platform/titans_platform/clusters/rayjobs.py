"""Jobs through Ray's Jobs API: upload the project, follow the log, return the exit code.

Kind `existing` is a running Ray cluster, given by the address of its dashboard and its token.

Uploading packages and following a log go through Ray's client. The rest is plain HTTP, since the client
cannot tell a wrong token from a dashboard without authentication.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shlex
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self
from urllib.parse import urlsplit

from pydantic import model_validator

from titans_platform.clusters import packaging
from titans_platform.clusters.base import Cluster, Job, JobInfo, Jobs, Log
from titans_platform.clusters.steps import (
    LOOPBACK,
    Note,
    Step,
    Token,
    Write,
    detached,
    perform,
    terminate_group,
    wait_for_port,
)
from titans_platform.errors import ClusterError, one_line
from titans_platform.provenance import shipped

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient


CONSTRAINTS = "constraints.txt"
"""The locked requirements: every version the project is tested with."""
_NOISY_LOGGERS = (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
)


def _http_status(address: str, token: str | None) -> int:
    """Return the HTTP status of the Jobs API at ``address``, 0 if nothing answers."""
    try:
        with _open(f"{address}/api/version", token, timeout=10) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError, HTTPException):
        return 0


def _open(address: str, token: str | None, timeout: float) -> HTTPResponse:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=timeout)


@dataclass(frozen=True)
class RayJobs(Jobs):
    """The jobs of the Ray cluster whose dashboard is at ``address``."""

    address: str
    token: Token
    forward: tuple[str, ...] = ()
    """A command that forwards ``address`` while it runs; empty if it is reachable directly."""
    before: tuple[Step, ...] = ()
    """Steps to run before the token is read."""
    poll: ClassVar[float] = 0.5

    def access_steps(self) -> list[Step]:
        forward = [Note(f"for as long as it takes: {shlex.join(self.forward)}")] if self.forward else []
        return [*self.before, *forward]

    @contextlib.contextmanager
    def connected(self) -> Iterator[Self]:
        perform(self.before)
        port = int(self.address.rpartition(":")[2]) if self.forward else 0
        with _tunnel(self.forward, port) if self.forward else contextlib.nullcontext():
            self.check()
            yield self

    def check(self) -> None:
        """Raise ClusterError: no answer, a rejected token, or a cluster without authentication."""
        status = _http_status(self.address, self.token.read(self.cluster))
        if status in (401, 403):
            raise self._error(f" rejects the token in {self.token}")
        if status != 200:
            cause = f"HTTP status {status}, not a Ray dashboard" if status else "no answer"
            raise self._error(f": {cause}; see titans cluster status, or up")
        if _http_status(self.address, None) == 200:
            raise self._error(" accepts jobs without a token; restart it with RAY_AUTH_MODE=token")

    def _error(self, cause: str) -> ClusterError:
        return ClusterError(f"cluster {self.cluster}: {self.address}{cause}")

    def submit_steps(self, job: Job, job_id: str) -> list[Step]:
        """Upload the job's folder, its files and the code in it, and submit."""
        # the equivalent command of Ray's CLI
        env = json.dumps(_runtime_env(job, "<job folder>"))
        line = (
            f"# job folder: {', '.join(sorted({*job.files, CONSTRAINTS}))}, this version's packages\n"
            f"ray job submit --address {shlex.quote(self.address)} --submission-id {job_id} \\\n"
            f"  --runtime-env-json {shlex.quote(env)} \\\n"
            f"  -- {shlex.join(job.command)}"
        )
        return [Step(line, partial(self._submit, job, job_id))]

    def _submit(self, job: Job, job_id: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            packaging.put_code(Path(folder))
            for file, content in {**job.files, CONSTRAINTS: (shipped() / CONSTRAINTS).read_bytes()}.items():
                Write(Path(folder, file), content).do()
            try:
                self.client.submit_job(
                    entrypoint=shlex.join(job.command),
                    submission_id=job_id,
                    runtime_env=_runtime_env(job, folder),
                    metadata={"name": job.name},
                )
            except Exception as error:
                cause = f"the job was not accepted: {one_line(error)}"
                raise ClusterError(f"cluster {self.cluster}: {cause}") from None

    def list(self) -> list[JobInfo]:
        jobs = [_job_info(job) for job in self._get("/api/jobs/") if job["submission_id"]]
        return sorted(jobs, key=lambda job: job.started or 0)

    def read(self, job_id: str, log: Log) -> None:
        async def tail() -> None:
            stream: Any = self.client.tail_job_logs(job_id)
            async with contextlib.aclosing(stream) as chunks:
                async for chunk in chunks:
                    log.add(chunk)

        try:
            asyncio.run(tail())
        except BrokenPipeError:
            # the reader of our output is gone, not the cluster
            raise
        except Exception as error:
            fix = f"titans cluster logs {self.cluster} {job_id} resumes it"
            raise self._error(f": reading the log of {job_id} failed: {one_line(error)}; {fix}") from None

    def stop_steps(self, job_id: str) -> list[Step]:
        line = f"ray job stop --address {shlex.quote(self.address)} {shlex.quote(job_id)}"
        return [Step(line, lambda: self.client.stop_job(job_id))]

    def describe(self) -> dict[str, Any]:
        """Version, nodes and jobs."""
        version = self._get("/api/version")["ray_version"]
        nodes = self._get("/api/v0/nodes")["data"]["result"]["result"]
        described = sorted((_node(node) for node in nodes), key=lambda node: (not node["head"], node["id"]))
        return {"ray_version": version, "nodes": described, **super().describe()}

    def _get(self, path: str) -> Any:
        try:
            with _open(self.address + path, self.token.read(self.cluster), timeout=30) as reply:
                return json.load(reply)
        except (OSError, ValueError, HTTPException) as error:
            raise self._error(f": {one_line(error)}") from None

    @cached_property
    def client(self) -> JobSubmissionClient:
        """Ray's own client. Raises ClusterError."""
        from ray.job_submission import JobSubmissionClient

        for name in _NOISY_LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            headers = {"Authorization": f"Bearer {self.token.read(self.cluster)}"}
            return JobSubmissionClient(self.address, headers=headers)
        except Exception as error:
            raise self._error(f": {one_line(error)}") from None


class Existing(Cluster):
    """A cluster that is already running; nothing is started or stopped."""

    address: str
    """http:// or https:// address of the dashboard, where the Jobs API is: usually port 8265."""

    @model_validator(mode="after")
    def _http(self) -> Existing:
        parts = urlsplit(self.address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("address: should be like http://head:8265, the address of Ray's dashboard")
        if parts.username or parts.password:
            raise ValueError("address: holds a name or password; the token goes through `token`")
        return self

    def up_steps(self) -> list[Step]:
        look = f"# nothing to start; checks that {self.address} accepts the token in {self.token_used}"
        return [Step(look, self.jobs().check)]

    def down_steps(self) -> list[Step]:
        return [Note("nothing to stop: `up` started nothing")]

    def down(self) -> None:
        perform(self.down_steps())

    def where(self) -> str:
        return self.address

    def jobs(self) -> RayJobs:
        return RayJobs(self.name, self.address.rstrip("/"), self.token_used)


def _job_info(job: Mapping[str, Any]) -> JobInfo:
    name, started = (job["metadata"] or {}).get("name", ""), job["start_time"]
    seconds = started / 1000 if started else None
    return JobInfo(job["submission_id"], name, job["status"].lower(), seconds, job["driver_exit_code"])


def _node(node: Mapping[str, Any]) -> dict[str, Any]:
    total, alive = node["resources_total"] or {}, node["state"] == "ALIVE"
    sizes = {"cpus": total.get("CPU", 0), "gpus": total.get("GPU", 0)}
    at = {"id": node["node_id"][:8], "ip": node["node_ip"], "head": node["is_head_node"], "alive": alive}
    return at | sizes


def _runtime_env(job: Job, folder: str) -> dict[str, Any]:
    env: dict[str, Any] = {"working_dir": folder, "env_vars": dict(job.env)}
    if job.pip:
        env["pip"] = ["-c ${RAY_RUNTIME_ENV_CREATE_WORKING_DIR}/" + CONSTRAINTS, *packaging.requirements()]
    return env


@contextlib.contextmanager
def _tunnel(argv: Sequence[str], port: int) -> Iterator[None]:
    """Run ``argv``, which forwards local ``port``, until the block ends. Raises ClusterError."""
    with tempfile.TemporaryFile("w+") as output:
        try:
            process = detached(argv, stdout=output, stderr=output)
        except FileNotFoundError:
            raise ClusterError(f"{argv[0]}: not installed here; the dashboard needs it") from None
        try:
            if not wait_for_port(process, LOOPBACK, port):
                output.seek(0)
                lines = output.read().strip().splitlines() or ["no answer"]
                raise ClusterError(f"{' '.join(argv[:2])}: {lines[-1]}")
            yield
        finally:
            terminate_group(process)
