"""Kind `kuberay`: Ray on Kubernetes, kept by the KubeRay operator (1.7), through kubectl.

No token is ever in a manifest: pods get it from a Secret.
"""

from __future__ import annotations

import base64
import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import Field, JsonValue, model_validator

from titans_core.config import Frozen, PositiveInt
from titans_platform.clusters import steps
from titans_platform.clusters.base import Cluster, Count
from titans_platform.clusters.jobs import Job, JobInfo, Jobs, Log
from titans_platform.clusters.rayjobs import RayJobs
from titans_platform.clusters.steps import Note, Run, Step
from titans_platform.errors import ClusterError, UsageError, one_line

Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?([KMGTPE]i?|m)?$")]
Label = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
_CONFIG_MAP_BYTES = 900_000
LABEL = {"app.kubernetes.io/managed-by": "titans"}
FILES = "/etc/titans"
"""Where a RayJob's files are mounted in the head."""
_STATES = {"SUCCEEDED": "succeeded", "FAILED": "failed", "STOPPED": "stopped", "RUNNING": "running"}


class Head(Frozen):
    """The pod that schedules, and runs the driver of a study."""

    cpus: PositiveInt = 4
    memory: Quantity = "16Gi"
    node_selector: dict[str, str] = Field(default_factory=dict)


class Pool(Frozen):
    """Workers that are alike: one pod each, with or without GPUs."""

    name: Label
    replicas: Count
    max_replicas: Count | None = None
    """More than `replicas`: Ray requests pods as cells wait for them, and gives them back."""
    cpus: PositiveInt
    memory: Quantity
    gpus: Count = 0
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
    """The volume behind `storage`, mounted on every pod: one that exists, or one that `up` makes."""

    claim: Label
    size: Quantity | None = None
    """Make a ReadWriteMany claim of this size. None: a claim of this name exists."""
    storage_class: str | None = None


class KubeRay(Cluster):
    """A RayCluster from `up` to `down`, or a RayJob for each `submit`."""

    own_token: ClassVar[bool] = True
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
    ttl_seconds: Count = 600
    """job: how long pods of a finished job are kept to look at."""
    deadline_seconds: PositiveInt | None = None
    """job: end a job that takes longer."""

    @model_validator(mode="after")
    def _names(self) -> KubeRay:
        if len({pool.name for pool in self.pools}) < len(self.pools):
            raise ValueError("pools: each needs its own name")
        if not self.storage:
            raise ValueError("storage: missing; give the path the claim is mounted at")
        if self.pip and self.lifetime == "job":
            raise ValueError("pip: a RayJob runs what the image holds; build it with clusters/Dockerfile")
        return self

    def kubectl(self, *arguments: str) -> tuple[str, ...]:
        """A command of kubectl in this context and namespace."""
        context = ("--context", self.context) if self.context else ()
        return ("kubectl", *context, "--namespace", self.namespace, *arguments)

    def apply(self, objects: Sequence[dict[str, Any]]) -> Step:
        return Run(self.kubectl("apply", "-f", "-"), stdin=as_yaml(objects))

    def grows_to(self) -> list[dict[str, float]] | None:
        """Every pool at its largest; a job's own cluster does not exist yet when the job is planned."""
        if all(pool.most == pool.replicas for pool in self.pools):
            return None
        return [{"CPU": p.cpus, "GPU": p.gpus} for p in self.pools for _ in range(p.most)]

    def up_steps(self) -> list[Step]:
        """Apply the claim and the RayCluster, wait for its pods."""
        apply = [self.apply(self._kept())] if self._kept() else []
        if self.lifetime == "job":
            return [*apply, Note("no cluster to keep: each submit makes its own"), self.record_step()]
        ready = ("wait", "--for=condition=RayClusterProvisioned", f"raycluster/{self.name}", "--timeout=15m")
        return [*apply, self.record_step(), Run(self.kubectl(*ready))]

    def _kept(self) -> list[dict[str, Any]]:
        """The claim, where the file says to make it, and the RayCluster, which lives from `up` to `down`."""
        kept, volume = [], self.volume
        if volume.size:
            size = {"requests": {"storage": volume.size}}
            body = _given(
                accessModes=["ReadWriteMany"], resources=size, storageClassName=volume.storage_class
            )
            kept.append(_object(self, "v1", "PersistentVolumeClaim", volume.claim, body))
        if self.lifetime == "cluster":
            kept.append(_object(self, "ray.io/v1", "RayCluster", self.name, _cluster_body(self)))
        return kept

    def manifests(self) -> list[dict[str, Any]]:
        """The Kubernetes objects that `up` and `submit` apply, with a sample job in place of a real one."""
        return self._kept() + (ray_job("sample", self, _SAMPLE) if self.lifetime == "job" else [])

    def down_steps(self) -> list[Step]:
        """Delete the RayCluster. The claim stays: it holds the results."""
        kept = Note(f"the claim {self.volume.claim} stays, with all results; kubectl delete pvc removes it")
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
            try:
                value = base64.b64decode(get.output()).decode().strip()
            except ValueError:
                value = ""
            if not value:
                raise ClusterError(f"cluster {self.name}: its Secret holds no auth_token")
            steps.write_token(path, value)

        return Step(f"(umask 077; {get.shown} | base64 --decode > {shlex.quote(str(path))})", fetch)


_SAMPLE = Job("sample", ("sweep", "run", "ablation"), {"sweeps/ablation.yaml": b"name: ablation\n"})


@dataclass(frozen=True)
class KubeJobs(Jobs):
    """The RayJobs of a namespace that titans made; KubeRay makes and removes the cluster of each."""

    spec: KubeRay

    def new_id(self, job: Job) -> str:
        return object_name(super().new_id(job))

    def submit_steps(self, job: Job, job_id: str) -> list[Step]:
        return [self.spec.apply(ray_job(job_id, self.spec, job))]

    def read(self, job_id: str, log: Log, follow: bool) -> None:
        """What the pod prints that submits the entrypoint and follows it."""
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
        """Delete the RayJob, with which its cluster goes, and its files."""
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
    """A job's id as Kubernetes takes it."""
    return re.sub(r"[^-a-z0-9]", "-", job_id.lower())[-47:].strip("-")


def _job_info(item: dict[str, Any]) -> JobInfo:
    name, status = item["metadata"]["name"], item.get("status") or {}
    failed = status.get("jobDeploymentStatus") == "Failed"
    state = "failed" if failed else _STATES.get(status.get("jobStatus") or "", "pending")
    code = re.search(r"exit code (\d+)", status.get("message") or "")
    began = datetime.fromisoformat(status["startTime"]).timestamp() if status.get("startTime") else None
    return JobInfo(name, name.rpartition("-")[0], state, began, int(code[1]) if code else None)


def ray_job(job_id: str, spec: KubeRay, job: Job) -> list[dict[str, Any]]:
    """A ConfigMap of the job's files and the RayJob that makes a cluster, runs the command, removes both."""
    if sum(map(len, job.files.values())) > _CONFIG_MAP_BYTES:
        raise UsageError(
            f"lifetime: job: {', '.join(job.files)} are more than a ConfigMap holds; put the tokenizer into "
            f"{spec.storage} and give its absolute path"
        )
    binary = {_key(path): base64.b64encode(content).decode() for path, content in sorted(job.files.items())}
    files = [_object(spec, "v1", "ConfigMap", job_id, binary, "binaryData")] * bool(binary)
    body = {
        # the driver's own files are there; workers need none of them
        "entrypoint": f"cd {FILES} && {shlex.join(job.command)}",
        # JSON is YAML
        "runtimeEnvYAML": json.dumps({"env_vars": dict(job.env)}),
        "submissionMode": "K8sJobMode",
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": spec.ttl_seconds,
        # a study goes on where it was, so one retry is safe after a lost head
        "backoffLimit": 1,
        "rayClusterSpec": _cluster_body(spec, job_id, sorted(job.files)),
        **_given(activeDeadlineSeconds=spec.deadline_seconds),
    }
    return [*files, _object(spec, "ray.io/v1", "RayJob", job_id, body)]


def _cluster_body(spec: KubeRay, config_map: str = "", files: Sequence[str] = ()) -> dict[str, Any]:
    """The spec of a RayCluster; ``files`` are mounted in the head from ``config_map``."""
    head = _pod(spec, "ray-head", spec.head)
    (container,) = head["spec"]["containers"]
    ports = {"gcs": 6379, "dashboard": 8265}
    container["ports"] = [{"name": name, "containerPort": port} for name, port in ports.items()]
    if files:
        items = [{"key": _key(path), "path": path} for path in files]
        head["spec"]["volumes"].append({"name": "files", "configMap": {"name": config_map, "items": items}})
        container["volumeMounts"].append({"name": "files", "mountPath": FILES, "readOnly": True})
    # cells run on the pools; the head has the driver and Ray's own processes
    start = {"num-cpus": "0", "dashboard-host": "0.0.0.0"}
    return _given(
        rayVersion=spec.ray_version,
        authOptions=_given(mode="token", secretName=spec.secret),
        enableInTreeAutoscaling=spec.grows_to() is not None,
        headGroupSpec={"rayStartParams": start, "template": head},
        workerGroupSpecs=[_group(spec, pool) for pool in spec.pools],
    )


def _group(spec: KubeRay, pool: Pool) -> dict[str, Any]:
    gpus = {pool.gpu_resource: str(pool.gpus)} if pool.gpus else {}
    pods = {"replicas": pool.replicas, "minReplicas": pool.replicas, "maxReplicas": pool.most}
    template = _pod(spec, "ray-worker", pool, gpus, tolerations=list(pool.tolerations))
    return {"groupName": pool.name, **pods, "rayStartParams": {}, "template": template}


def _pod(
    spec: KubeRay, name: str, machine: Head | Pool, gpus: Mapping[str, str] | None = None, **more: Any
) -> dict[str, Any]:
    """The template of a pod; ``more`` goes into its spec."""
    # the same request and limit: a pod above its request may be evicted, and its cells with it
    amounts = {"cpu": str(machine.cpus), "memory": machine.memory, **(gpus or {})}
    container = {
        "name": name,
        "image": spec.image,
        "resources": {"requests": amounts, "limits": amounts},
        "env": [{"name": "RAY_USAGE_STATS_ENABLED", "value": "0"}],
        "volumeMounts": [{"name": "storage", "mountPath": spec.storage}],
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    pod = _given(
        serviceAccountName=spec.service_account,
        # the user of clusters/Dockerfile, and its group on the volume
        securityContext={"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000},
        nodeSelector=machine.node_selector,
        containers=[container],
        volumes=[{"name": "storage", "persistentVolumeClaim": {"claimName": spec.volume.claim}}],
        **more,
    )
    return {"metadata": {"labels": LABEL}, "spec": pod}


def _given(**fields: Any) -> dict[str, Any]:
    """The fields that have a value."""
    return {key: value for key, value in fields.items() if value}


def _key(path: str) -> str:
    return re.sub(r"[^-._a-zA-Z0-9]", "_", path)


def _object(where: KubeRay, api: str, kind: str, name: str, body: Any, key: str = "spec") -> dict[str, Any]:
    metadata = {"name": name, "namespace": where.namespace, "labels": LABEL}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, key: body}


def as_yaml(objects: Sequence[dict[str, Any]]) -> str:
    """The manifests as one YAML stream."""
    # through JSON no part is shared: it would be an anchor, which people and `kubectl diff` read badly
    return yaml.safe_dump_all(json.loads(json.dumps(objects)), sort_keys=False)


def check_manifests(objects: Sequence[dict[str, Any]], files: Sequence[Path]) -> list[str]:
    """Check each object against the schema of its kind, as a server would; a line for each.

    Raises UsageError for a mistake. Unknown fields are mistakes too: the server drops them silently.
    """
    schemas = {key: schema for file in files for key, schema in _schemas(file)}
    lines = []
    for item in objects:
        schema = schemas.get((item["apiVersion"], item["kind"]))
        where = f"{item['kind']} {item['metadata']['name']}"
        if schema and (mistake := _mistake(item, schema)):
            raise UsageError(f"{where}: {mistake}")
        lines.append(f"{where}: valid" if schema else f"{where}: no schema given")
    return lines


def _schemas(file: Path) -> Iterator[tuple[tuple[str, str], Any]]:
    """The schemas of a CustomResourceDefinition, by apiVersion and kind."""
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        spec = yaml.load(file.read_text(encoding="utf-8"), loader)["spec"]
        for version in spec["versions"]:
            api = f"{spec['group']}/{version['name']}"
            yield (api, spec["names"]["kind"]), version["schema"]["openAPIV3Schema"]
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--schema {file}: cannot be read: {one_line(error, 120)}") from None
    except (KeyError, TypeError):
        raise UsageError(f"--schema {file}: is no CustomResourceDefinition") from None


def _mistake(item: dict[str, Any], schema: Any) -> str | None:
    """The first mistake in a manifest, unknown fields refused wherever the schema names the known ones."""
    from jsonschema import Draft202012Validator, validators

    rules = Draft202012Validator.VALIDATORS

    def properties(validator: Any, known: Any, found: Any, schema: Any) -> Iterator[Any]:
        yield from rules["properties"](validator, known, found, schema)
        # the outermost fields and metadata are Kubernetes' own; what has no type only adds conditions
        typed = schema.get("type") == "object" and found is not item and found is not item["metadata"]
        if typed and not {"additionalProperties", "x-kubernetes-preserve-unknown-fields"} & schema.keys():
            yield from rules["additionalProperties"](validator, False, found, schema)

    strict = validators.extend(Draft202012Validator, {"properties": properties})
    errors = sorted(strict(schema).iter_errors(item), key=lambda error: error.json_path)
    return f"{errors[0].json_path}: {errors[0].message[:200]}" if errors else None
