"""Kind `kuberay`: Ray on Kubernetes, managed by the KubeRay operator (1.7), through kubectl.

What is under `ray:` is the spec of a RayCluster as KubeRay documents it. Added to it are its name, namespace
and label, and token authentication: pods get the token from a Secret, so that no manifest contains it.
"""

from __future__ import annotations

import base64
import copy
import json
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import Field, JsonValue, model_validator

from titans_platform.clusters import steps
from titans_platform.clusters.base import Cluster, Job, JobInfo, Jobs, Log
from titans_platform.clusters.rayjobs import RayJobs
from titans_platform.clusters.steps import Note, Run, Step
from titans_platform.errors import ClusterError, UsageError

Label = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
_CONFIG_MAP_BYTES = 900_000
POD_GRACE = 90
"""Seconds that a pod gets to end if the file sets none. A run takes up to `preemption.GRACE` to write a
checkpoint; Kubernetes' own default is 30."""
LABEL = {"app.kubernetes.io/managed-by": "titans"}
FILES = "/etc/titans"
"""Mount path of a RayJob's files in its pods."""
_STATES = {"SUCCEEDED": "succeeded", "FAILED": "failed", "STOPPED": "stopped", "RUNNING": "running"}


class KubeRay(Cluster):
    """A RayCluster from `up` to `down`, or a RayJob for each `submit`."""

    own_token: ClassVar[bool] = True
    lifetime: Literal["cluster", "job"] = "cluster"
    """cluster: a RayCluster from `up` to `down`. job: a RayJob for each `submit`, deleted after it."""
    namespace: Label = "default"
    context: str | None = None
    """kubectl's context; its current one by default."""
    secret: Label | None = None
    """A Secret with the key auth_token. None: KubeRay makes one with a random token."""
    storage: str | None = "/mnt/titans"
    ray: dict[str, JsonValue]
    """A RayCluster's spec: rayVersion, headGroupSpec, workerGroupSpecs, ... Every pod mounts the storage."""
    job: dict[str, JsonValue] = Field(default_factory=dict)
    """lifetime: job. Further fields of a RayJob's spec, e.g. ttlSecondsAfterFinished."""
    manifests: tuple[dict[str, JsonValue], ...] = ()
    """Further objects that `up` applies first and `down` keeps, e.g. a PersistentVolumeClaim."""

    @model_validator(mode="after")
    def _spec(self) -> KubeRay:
        if not self.storage:
            raise ValueError("storage: missing; give the path that every pod mounts")
        if self.pip and self.lifetime == "job":
            raise ValueError("pip: a RayJob runs what the image contains; build it with clusters/Dockerfile")
        if "authOptions" in self.ray:
            raise ValueError("ray.authOptions: is set by titans; leave it out, and give `secret`")
        workers: Any = self.ray.get("workerGroupSpecs") or []
        groups = {f"workerGroupSpecs.{i}": group for i, group in enumerate(workers)}
        for where, group in {"headGroupSpec": self.ray.get("headGroupSpec"), **groups}.items():
            try:
                mounts = [m["mountPath"] for m in _container(group)["volumeMounts"]]
            except (KeyError, IndexError, TypeError) as error:
                raise ValueError(f"ray.{where}: template.spec.containers.0.volumeMounts: missing") from error
            if self.storage not in mounts:
                raise ValueError(f"ray.{where}: does not mount the storage, {self.storage}")
        return self

    def kubectl(self, *arguments: str) -> tuple[str, ...]:
        """A command of kubectl in this context and namespace."""
        context = ("--context", self.context) if self.context else ()
        return ("kubectl", *context, "--namespace", self.namespace, *arguments)

    def apply(self, objects: Sequence[dict[str, Any]]) -> Step:
        # the JSON round trip unshares objects, which YAML would write as anchors and aliases
        manifests = yaml.safe_dump_all(json.loads(json.dumps(objects)), sort_keys=False)
        # strict: a misspelt field is an error, which the server would otherwise drop
        return Run(self.kubectl("apply", "--validate=strict", "-f", "-"), stdin=manifests)

    def grows_to(self) -> list[dict[str, float]] | None:
        """Every group at its largest; a job's own cluster does not exist yet when the job is planned."""
        groups: Any = self.ray.get("workerGroupSpecs") or []
        sizes = [(int(g.get("replicas", 0)), int(g.get("maxReplicas", g.get("replicas", 0)))) for g in groups]
        if all(replicas == most for replicas, most in sizes):
            return None
        grown = zip(groups, sizes, strict=True)
        return [_resources(group) for group, (_, most) in grown for _ in range(most)]

    def up_steps(self) -> list[Step]:
        """Apply the manifests and the RayCluster, wait for its pods."""
        objects = [self.placed(item) for item in self.manifests]
        if self.lifetime == "cluster":
            kind = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": self.name}}
            objects.append(self.placed({**kind, "spec": self.ray_spec()}))
        apply = [self.apply(objects)] if objects else []
        if self.lifetime == "job":
            return [*apply, Note("no cluster to start: each submit creates its own"), self.record_step()]
        ready = ("wait", "--for=condition=RayClusterProvisioned", f"raycluster/{self.name}", "--timeout=15m")
        return [*apply, self.record_step(), Run(self.kubectl(*ready))]

    def ray_spec(self) -> dict[str, Any]:
        """The spec under `ray:` with token authentication and POD_GRACE."""
        secret = {"secretName": self.secret} if self.secret else {}
        ray: dict[str, Any] = copy.deepcopy(dict(self.ray))
        for group in (ray["headGroupSpec"], *ray.get("workerGroupSpecs", ())):
            group["template"]["spec"].setdefault("terminationGracePeriodSeconds", POD_GRACE)
        return {"authOptions": {"mode": "token", **secret}, **ray}

    def placed(self, item: dict[str, Any]) -> dict[str, Any]:
        """A Kubernetes object in this namespace, with our label."""
        given = item.get("metadata") or {}
        labels = {**LABEL, **(given.get("labels") or {})}
        return {**item, "metadata": {**given, "namespace": self.namespace, "labels": labels}}

    def down_steps(self) -> list[Step]:
        """Delete the RayCluster. The storage stays: it holds the results."""
        kept = Note(f"the volume at {self.storage} and `manifests` stay, with all results")
        if self.lifetime == "job":
            return [kept]
        return [Run(self.kubectl("delete", "raycluster", self.name, "--ignore-not-found", "--wait")), kept]

    def where(self) -> str:
        what = "RayJobs" if self.lifetime == "job" else f"RayCluster {self.name}"
        return f"{what} in namespace {self.namespace}"

    def jobs(self) -> Jobs:
        """KubeRay's jobs, or Ray's through a forwarded port."""
        if self.lifetime == "job":
            return KubeJobs(self.name, self)
        (port,) = steps.free_ports(1)
        forward = self.kubectl("port-forward", f"service/{self.name}-head-svc", f"{port}:8265")
        fetch = () if self.token else (self._fetch_token(),)
        return RayJobs(self.name, f"http://{steps.LOOPBACK}:{port}", self.token_used, forward, fetch)

    def _fetch_token(self) -> Step:
        """Copy the token of the cluster's Secret into a file that only this user can read."""
        secret, path = self.secret or self.name, self.token_used.path
        get = Run(self.kubectl("get", "secret", secret, "-o", "jsonpath={.data.auth_token}"))

        def fetch() -> None:
            # Kubernetes checks that the data of a Secret are base64
            if not (value := base64.b64decode(get.output()).decode().strip()):
                raise ClusterError(f"cluster {self.name}: its Secret has no key auth_token")
            steps.write_token(path, value)

        return Step(f"(umask 077; {get.shown} | base64 --decode > {shlex.quote(str(path))})", fetch)


@dataclass(frozen=True)
class KubeJobs(Jobs):
    """The RayJobs of a namespace that titans made; KubeRay creates and deletes the cluster of each."""

    spec: KubeRay

    def new_id(self, job: Job) -> str:
        return object_name(super().new_id(job))

    def submit_steps(self, job: Job, job_id: str) -> list[Step]:
        return [self.spec.apply(ray_job(job_id, self.spec, job))]

    def read(self, job_id: str, log: Log, follow: bool) -> None:
        """Read the log of the pod that submits and follows the entrypoint."""
        argv = self.spec.kubectl("logs", *["--follow"] * follow, f"job/{job_id}")
        with steps.detached(argv, stdout=subprocess.PIPE) as process:
            try:
                for line in process.stdout or ():
                    log.add(line)
            finally:
                process.terminate()

    def log_steps(self, job_id: str) -> list[Step]:
        return [Run(self.spec.kubectl("logs", "--follow", f"job/{job_id}"))]

    def stop_steps(self, job_id: str) -> list[Step]:
        """Delete the RayJob, and with it its cluster, and its files."""
        gone = (job_id, "--ignore-not-found")
        return [Run(self.spec.kubectl("delete", kind, *gone)) for kind in ("rayjob", "configmap")]

    def status_steps(self) -> list[Step]:
        return [self._get()]

    def _get(self) -> Run:
        selector = ",".join(f"{key}={value}" for key, value in LABEL.items())
        return Run(self.spec.kubectl("get", "rayjobs", "--selector", selector, "-o", "json"))

    def list(self) -> list[JobInfo]:
        return [_job_info(item) for item in json.loads(self._get().output())["items"]]


def object_name(job_id: str) -> str:
    """A job's id as a valid Kubernetes name."""
    return re.sub(r"[^-a-z0-9]", "-", job_id.lower())[-47:].strip("-")


def _job_info(item: dict[str, Any]) -> JobInfo:
    name, status = item["metadata"]["name"], item.get("status") or {}
    failed = status.get("jobDeploymentStatus") == "Failed"
    state = "failed" if failed else _STATES.get(status.get("jobStatus") or "", "pending")
    code = re.search(r"exit code (\d+)", status.get("message") or "")
    began = datetime.fromisoformat(status["startTime"]).timestamp() if status.get("startTime") else None
    return JobInfo(name, name.rpartition("-")[0], state, began, int(code[1]) if code else None)


def ray_job(job_id: str, spec: KubeRay, job: Job) -> list[dict[str, Any]]:
    """A ConfigMap of the job's files and the RayJob that creates a cluster, runs the command, deletes both.

    Raises UsageError: the files do not fit into a ConfigMap.
    """
    if sum(map(len, job.files.values())) > _CONFIG_MAP_BYTES:
        fix = f"put the tokenizer into {spec.storage} and give its absolute path"
        raise UsageError(f"lifetime: job: {', '.join(job.files)} do not fit into a ConfigMap; {fix}")
    ray, keys = spec.ray_spec(), {path: re.sub(r"[^-._a-zA-Z0-9]", "_", path) for path in job.files}
    manifests = steps.render(
        "rayjob.yaml",
        name=job_id,
        files={keys[path]: base64.b64encode(content).decode() for path, content in job.files.items()},
        entrypoint=f"cd {FILES} && {shlex.join(job.command)}",
        runtime_env=json.dumps({"env_vars": {**job.env, "PYTHONPATH": FILES}}),
    )
    *config_map, ray_job = yaml.safe_load_all(manifests)
    if keys:
        items = [{"key": key, "path": path} for path, key in keys.items()]
        volume = {"name": "files", "configMap": {"name": job_id, "items": items}}
        mount = {"name": "files", "mountPath": FILES, "readOnly": True}
        for group in (ray["headGroupSpec"], *ray.get("workerGroupSpecs", ())):
            group["template"]["spec"].setdefault("volumes", []).append(volume)
            _container(group).setdefault("volumeMounts", []).append(mount)
    ray_job["spec"] |= {**spec.job, "rayClusterSpec": ray}
    return [spec.placed(item) for item in (*config_map, ray_job)]


def _container(group: dict[str, Any]) -> dict[str, Any]:
    """Ray's container of a group's pods: the first."""
    return group["template"]["spec"]["containers"][0]


def _resources(group: dict[str, Any]) -> dict[str, float]:
    """The CPUs and GPUs of a pod, from its container's limits: `64`, `500m`, `nvidia.com/gpu`."""
    limits = _container(group).get("resources", {}).get("limits", {})
    cpu = str(limits.get("cpu", 1))
    cpus = float(cpu[:-1]) / 1000 if cpu.endswith("m") else float(cpu)
    return {"CPU": cpus, "GPU": sum(float(n) for name, n in limits.items() if name.endswith("/gpu"))}
