"""Kubernetes manifests for KubeRay 1.7, as values. No token is ever in one: pods get it from a Secret."""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, JsonValue, model_validator

from titans_core.config import Frozen, PositiveInt
from titans_platform.clusters.jobs import Job
from titans_platform.clusters.schema import ClusterSpec, Cpus
from titans_platform.errors import UsageError

Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?([KMGTPE]i?|m)?$")]
Label = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]

API = "ray.io/v1"
LABEL = {"app.kubernetes.io/managed-by": "titans"}
FILES = "/etc/titans"
"""Where a RayJob's files are mounted in the head."""
_CONFIG_MAP_BYTES = 900_000


class Head(Frozen):
    """The pod that schedules, and runs the driver of a study."""

    cpus: PositiveInt = 4
    memory: Quantity = "16Gi"
    node_selector: dict[str, str] = Field(default_factory=dict)


class Pool(Frozen):
    """Workers that are alike: one pod each, with or without GPUs."""

    name: Label
    replicas: Cpus
    max_replicas: Cpus | None = None
    """More than `replicas`: Ray asks for pods as cells wait for them, and gives them back."""
    cpus: PositiveInt
    memory: Quantity
    gpus: Cpus = 0
    gpu_resource: str = "nvidia.com/gpu"
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the machines, e.g. cloud.google.com/gke-accelerator: nvidia-h100-80gb."""
    tolerations: tuple[dict[str, JsonValue], ...] = ()

    @model_validator(mode="after")
    def _ordered(self) -> Pool:
        if self.max_replicas is not None and self.max_replicas < max(1, self.replicas):
            raise ValueError(f"max_replicas: should be at least 1 and replicas ({self.replicas})")
        if self.max_replicas is None and self.replicas == 0:
            raise ValueError("replicas: 0 without max_replicas is a pool that never has a pod")
        return self

    @property
    def most(self) -> int:
        """Pods it may grow to."""
        return self.max_replicas or self.replicas


class Claim(Frozen):
    """The volume behind `storage`, mounted on every pod: one that is there, or one that `up` makes."""

    claim: Label
    size: Quantity | None = None
    """Make a ReadWriteMany claim of this size. None: a claim of this name is there."""
    storage_class: str | None = None


class KubeRaySpec(ClusterSpec):
    """A cluster that KubeRay keeps, or one for each job."""

    kind: Literal["kuberay"]
    lifetime: Literal["cluster", "job"] = "cluster"
    """cluster: a RayCluster from `up` to `down`. job: a RayJob for each `submit`, gone after it."""
    image: str
    """The image of clusters/Dockerfile in your registry."""
    namespace: Label = "default"
    context: str | None = None
    """kubectl's context; its current one by default."""
    ray_version: str = "2.60.0"
    head: Head = Head()
    pools: Annotated[tuple[Pool, ...], Field(min_length=1)]
    volume: Claim
    storage: str | None = "/mnt/titans"
    service_account: str | None = None
    secret: Label | None = None
    """A Secret with the key auth_token. None: KubeRay makes one with a random token."""
    ttl_seconds: Cpus = 600
    """job: how long pods of a finished job are kept to look at."""
    deadline_seconds: PositiveInt | None = None
    """job: end a job that takes longer."""

    @model_validator(mode="after")
    def _names(self) -> KubeRaySpec:
        names = [pool.name for pool in self.pools]
        if len(set(names)) < len(names):
            raise ValueError("pools: each needs its own name")
        if not self.storage:
            raise ValueError("storage: missing; give the path the claim is mounted at")
        if self.pip and self.lifetime == "job":
            raise ValueError("pip: a RayJob runs what the image holds; build it with clusters/Dockerfile")
        return self


def claim(name: str, spec: KubeRaySpec) -> list[dict[str, Any]]:
    """The PersistentVolumeClaim, where the file says to make it."""
    if spec.volume.size is None:
        return []
    wanted: dict[str, Any] = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": spec.volume.size}},
    }
    if spec.volume.storage_class:
        wanted["storageClassName"] = spec.volume.storage_class
    return [_object("v1", "PersistentVolumeClaim", spec.volume.claim, spec, wanted)]


def ray_cluster(name: str, spec: KubeRaySpec) -> dict[str, Any]:
    """The RayCluster of ``up``."""
    return _object(API, "RayCluster", name, spec, cluster_body(spec))


def ray_job(job_id: str, spec: KubeRaySpec, job: Job) -> list[dict[str, Any]]:
    """A ConfigMap of the job's files and the RayJob that makes a cluster, runs the command, removes both."""
    body: dict[str, Any] = {
        # the driver's own files lie here; workers need none of them
        "entrypoint": f"cd {FILES} && {shlex.join(job.command)}",
        "runtimeEnvYAML": yaml.safe_dump({"env_vars": dict(job.env)}, sort_keys=False),
        "submissionMode": "K8sJobMode",
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": spec.ttl_seconds,
        # a study goes on where it was: once more is safe, after a lost head
        "backoffLimit": 1,
        "rayClusterSpec": cluster_body(spec, job_id if job.files else None, job.files),
    }
    if spec.deadline_seconds:
        body["activeDeadlineSeconds"] = spec.deadline_seconds
    files = [_config_map(job_id, spec, job.files)] if job.files else []
    return [*files, _object(API, "RayJob", job_id, spec, body)]


def cluster_body(
    spec: KubeRaySpec, config_map: str | None = None, files: Mapping[str, bytes] | None = None
) -> dict[str, Any]:
    """The spec of a RayCluster; ``config_map`` is mounted in the head."""
    auth: dict[str, Any] = {"mode": "token", **({"secretName": spec.secret} if spec.secret else {})}
    head = _pod(spec, "ray-head", _resources(spec.head.cpus, spec.head.memory), spec.head.node_selector)
    head["containers"][0]["ports"] = [
        {"name": "gcs", "containerPort": 6379},
        {"name": "dashboard", "containerPort": 8265},
    ]
    if config_map:
        _mount_files(head, config_map, files or {})
    grows = any(pool.most > pool.replicas for pool in spec.pools)
    return {
        "rayVersion": spec.ray_version,
        "authOptions": auth,
        **({"enableInTreeAutoscaling": True} if grows else {}),
        "headGroupSpec": {
            # cells run on the pools; the head has the driver and Ray's own processes
            "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
            "template": {"metadata": {"labels": LABEL}, "spec": head},
        },
        "workerGroupSpecs": [_group(spec, pool) for pool in spec.pools],
    }


def _group(spec: KubeRaySpec, pool: Pool) -> dict[str, Any]:
    resources = _resources(pool.cpus, pool.memory, {pool.gpu_resource: pool.gpus} if pool.gpus else {})
    pod = _pod(spec, "ray-worker", resources, pool.node_selector)
    if pool.tolerations:
        pod["tolerations"] = [dict(one) for one in pool.tolerations]
    return {
        "groupName": pool.name,
        "replicas": pool.replicas,
        "minReplicas": pool.replicas,
        "maxReplicas": pool.most,
        "rayStartParams": {},
        "template": {"metadata": {"labels": LABEL}, "spec": pod},
    }


def _pod(
    spec: KubeRaySpec, name: str, resources: dict[str, Any], node_selector: Mapping[str, str]
) -> dict[str, Any]:
    container = {
        "name": name,
        "image": spec.image,
        "resources": resources,
        "env": [{"name": "RAY_USAGE_STATS_ENABLED", "value": "0"}],
        "volumeMounts": [{"name": "storage", "mountPath": spec.storage}],
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    volume = {"name": "storage", "persistentVolumeClaim": {"claimName": spec.volume.claim}}
    return {
        **({"serviceAccountName": spec.service_account} if spec.service_account else {}),
        # the user of clusters/Dockerfile, and its group on the volume
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000},
        **({"nodeSelector": dict(node_selector)} if node_selector else {}),
        "containers": [container],
        "volumes": [volume],
    }


def _resources(cpus: int, memory: str, gpus: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Request and limit alike: a pod that is squeezed loses cells."""
    amounts = {"cpu": str(cpus), "memory": memory, **{key: str(n) for key, n in (gpus or {}).items()}}
    return {"requests": amounts, "limits": dict(amounts)}


def _mount_files(pod: dict[str, Any], config_map: str, files: Mapping[str, bytes]) -> None:
    items = [{"key": _key(path), "path": path} for path in sorted(files)]
    pod["volumes"].append({"name": "files", "configMap": {"name": config_map, "items": items}})
    pod["containers"][0]["volumeMounts"].append({"name": "files", "mountPath": FILES, "readOnly": True})


def _config_map(name: str, spec: KubeRaySpec, files: Mapping[str, bytes]) -> dict[str, Any]:
    if sum(map(len, files.values())) > _CONFIG_MAP_BYTES:
        raise UsageError(
            f"lifetime: job: {', '.join(files)} are more than a ConfigMap holds; put the tokenizer into "
            f"{spec.storage} and give its absolute path"
        )
    binary = {_key(path): base64.b64encode(content).decode() for path, content in sorted(files.items())}
    return {**_object("v1", "ConfigMap", name, spec), "binaryData": binary}


def _key(path: str) -> str:
    return re.sub(r"[^-._a-zA-Z0-9]", "_", path)


def _object(
    api: str, kind: str, name: str, spec: KubeRaySpec, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    metadata = {"name": name, "namespace": spec.namespace, "labels": LABEL}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **({"spec": body} if body else {})}


class _Dumper(yaml.SafeDumper):
    """YAML without anchors, which people and `kubectl diff` read badly."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def as_yaml(objects: list[dict[str, Any]]) -> str:
    """The manifests as one YAML stream."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False)
