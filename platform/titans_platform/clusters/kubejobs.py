"""Jobs as RayJobs: KubeRay makes a cluster for each, runs the command in it and removes it again."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from titans_platform.clusters import manifests
from titans_platform.clusters.jobs import Job, JobInfo, Jobs, shell_code
from titans_platform.clusters.manifests import LABEL, KubeRaySpec
from titans_platform.clusters.steps import Run, Step
from titans_platform.clusters.tokens import clean_environment
from titans_platform.errors import ClusterError

_STATES = {"SUCCEEDED": "succeeded", "FAILED": "failed", "STOPPED": "stopped", "RUNNING": "running"}
_SELECTOR = ",".join(f"{key}={value}" for key, value in LABEL.items())


@dataclass(frozen=True)
class KubeJobs(Jobs):
    """The RayJobs of a namespace that titans made."""

    cluster: str
    spec: KubeRaySpec
    kubectl: Callable[..., tuple[str, ...]]

    def submit_steps(self, job: Job, job_id: str) -> list[Step]:
        """Apply its manifests."""
        objects = manifests.ray_job(object_name(job_id), self.spec, job)
        return [Run(self.kubectl("apply", "-f", "-"), stdin=manifests.as_yaml(objects))]

    def submit(self, job: Job) -> str:
        """Submit; the RayJob's name."""
        job_id = object_name(job.new_id())
        for step in self.submit_steps(job, job_id):
            step.do()
        return job_id

    def wait(self, job_id: str, write: Callable[[str], None]) -> int:
        """Stream the submitter's log, then read how the job ended."""
        while (info := self._info(job_id)).state == "pending":
            time.sleep(2)
        self._stream(job_id, write)
        while not (info := self._info(job_id)).ended:
            time.sleep(2)
        return shell_code(info.code, info.state)

    def _stream(self, job_id: str, write: Callable[[str], None]) -> None:
        argv = self.kubectl("logs", "--follow", f"job/{job_id}")
        with subprocess.Popen(
            argv, env=clean_environment(), stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    write(line)
            finally:
                process.terminate()

    def logs(self, job_id: str) -> str:
        """The submitter's log so far."""
        self._info(job_id)
        return Run(self.kubectl("logs", f"job/{job_id}")).output()

    def log_steps(self, job_id: str) -> list[Step]:
        """As kubectl gives it."""
        return [Run(self.kubectl("logs", "--follow", f"job/{job_id}"))]

    def stop(self, job_id: str) -> None:
        """Delete the RayJob, and its cluster with it."""
        self._info(job_id)
        for step in self.stop_steps(job_id):
            step.do()

    def stop_steps(self, job_id: str) -> list[Step]:
        """Delete the RayJob and its files."""
        gone = ("--ignore-not-found",)
        return [
            Run(self.kubectl("delete", "rayjob", job_id, *gone)),
            Run(self.kubectl("delete", "configmap", job_id, *gone)),
        ]

    def list(self) -> list[JobInfo]:
        """RayJobs with our label."""
        found = Run(self.kubectl("get", "rayjobs", "--selector", _SELECTOR, "-o", "json")).output()
        return [_job_info(item) for item in json.loads(found)["items"]]

    def _info(self, job_id: str) -> JobInfo:
        try:
            return _job_info(json.loads(Run(self.kubectl("get", "rayjob", job_id, "-o", "json")).output()))
        except ClusterError as error:
            raise ClusterError(f"cluster {self.cluster}: job {shlex.quote(job_id)}: {error}") from None


def object_name(job_id: str) -> str:
    """A job's id as Kubernetes takes it."""
    return re.sub(r"[^-a-z0-9]", "-", job_id.lower())[-47:].strip("-")


def _job_info(item: dict[str, Any]) -> JobInfo:
    status = item.get("status") or {}
    state = _STATES.get(status.get("jobStatus") or "", "pending")
    if status.get("jobDeploymentStatus") == "Failed":
        state = "failed"
    code = re.search(r"exit code (\d+)", status.get("message") or "")
    started = status.get("startTime")
    return JobInfo(
        id=item["metadata"]["name"],
        name=item["metadata"]["name"].rpartition("-")[0],
        state=state,
        started=datetime.fromisoformat(started).timestamp() if started else None,
        code=int(code[1]) if code else None,
    )
