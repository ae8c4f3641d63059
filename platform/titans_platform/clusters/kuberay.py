"""Kind `kuberay`: Ray on Kubernetes, managed by the KubeRay operator (1.7), through kubectl.

What is under `ray:` is the spec of a RayCluster as KubeRay documents it. Added to it are its name, namespace
and label, and token authentication: pods get the token from a Secret, so that no manifest contains it.
"""

from __future__ import annotations

import base64
import copy
import json
import shlex
from functools import partial
from typing import Annotated, Any, ClassVar

import yaml
from pydantic import Field, JsonValue, model_validator

from titans_platform.clusters import steps
from titans_platform.clusters.base import Cluster
from titans_platform.clusters.rayjobs import RayJobs
from titans_platform.clusters.steps import Note, Run, Step
from titans_platform.errors import ClusterError

Label = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
POD_GRACE = 90
"""Seconds that a pod gets to end if the file sets none. A run takes up to `preemption.GRACE` to write a
checkpoint; Kubernetes' own default is 30."""
LABEL = {"app.kubernetes.io/managed-by": "titans"}


class KubeRay(Cluster):
    """A RayCluster from `up` to `down`."""

    own_token: ClassVar[bool] = True
    namespace: Label = "default"
    context: str | None = None
    """kubectl's context; its current one by default."""
    secret: Label | None = None
    """A Secret with the key auth_token. None: KubeRay makes one with a random token."""
    storage: str | None = "/mnt/titans"
    ray: dict[str, JsonValue]
    """A RayCluster's spec: rayVersion, headGroupSpec, workerGroupSpecs, ... Every pod mounts the storage."""
    manifests: tuple[dict[str, JsonValue], ...] = ()
    """Further objects that `up` applies first and `down` keeps, e.g. a PersistentVolumeClaim."""

    @model_validator(mode="after")
    def _spec(self) -> KubeRay:
        if not self.storage:
            raise ValueError("storage: missing; give the path that every pod mounts")
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
        """Return a kubectl command in this context and namespace."""
        context = ("--context", self.context) if self.context else ()
        return ("kubectl", *context, "--namespace", self.namespace, *arguments)

    def grows_to(self) -> list[dict[str, float]] | None:
        """Return the nodes with every group at its largest; None if the cluster does not grow."""
        groups: Any = self.ray.get("workerGroupSpecs") or []
        sizes = [(int(g.get("replicas", 0)), int(g.get("maxReplicas", g.get("replicas", 0)))) for g in groups]
        if all(replicas == most for replicas, most in sizes):
            return None
        grown = zip(groups, sizes, strict=True)
        return [_resources(group) for group, (_, most) in grown for _ in range(most)]

    def up_steps(self) -> list[Step]:
        """Apply the manifests and the RayCluster, wait for its pods."""
        auth = {"mode": "token"} | ({"secretName": self.secret} if self.secret else {})
        kind = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": self.name}}
        ray: dict[str, Any] = copy.deepcopy(dict(self.ray))
        for group in (ray["headGroupSpec"], *ray.get("workerGroupSpecs", ())):
            group["template"]["spec"].setdefault("terminationGracePeriodSeconds", POD_GRACE)
        cluster = {**kind, "spec": {"authOptions": auth, **ray}}
        # the JSON round trip unshares objects, which YAML would write as anchors and aliases
        objects = json.loads(json.dumps([self.placed(item) for item in (*self.manifests, cluster)]))
        # strict: a misspelt field is an error, which the server would otherwise drop
        apply = Run(
            self.kubectl("apply", "--validate=strict", "-f", "-"),
            stdin=yaml.safe_dump_all(objects, sort_keys=False),
        )
        ready = ("wait", "--for=condition=RayClusterProvisioned", f"raycluster/{self.name}", "--timeout=15m")
        # before the step that costs money or time
        line = f"# record in {self.state_folder / 'state.json'} that it is up"
        return [apply, Step(line, partial(self.record, {"name": self.name})), Run(self.kubectl(*ready))]

    def placed(self, item: dict[str, Any]) -> dict[str, Any]:
        """Return a Kubernetes object in this namespace, with our label."""
        metadata = item.get("metadata") or {}
        labels = {**LABEL, **(metadata.get("labels") or {})}
        return {**item, "metadata": {**metadata, "namespace": self.namespace, "labels": labels}}

    def down_steps(self) -> list[Step]:
        """Delete the RayCluster. The storage stays: it holds the results."""
        kept = Note(f"the volume at {self.storage} and `manifests` stay, with all results")
        return [Run(self.kubectl("delete", "raycluster", self.name, "--ignore-not-found", "--wait")), kept]

    def where(self) -> str:
        return f"RayCluster {self.name} in namespace {self.namespace}"

    def jobs(self) -> RayJobs:
        """Ray's jobs through a forwarded port."""
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


def _container(group: dict[str, Any]) -> dict[str, Any]:
    """Ray's container of a group's pods: the first."""
    return group["template"]["spec"]["containers"][0]


def _resources(group: dict[str, Any]) -> dict[str, float]:
    """Return the CPUs and GPUs of a pod, from its container's limits: `64`, `500m`, `nvidia.com/gpu`."""
    limits = _container(group).get("resources", {}).get("limits", {})
    cpu = str(limits.get("cpu", 1))
    cpus = float(cpu[:-1]) / 1000 if cpu.endswith("m") else float(cpu)
    return {"CPU": cpus, "GPU": sum(float(n) for name, n in limits.items() if name.endswith("/gpu"))}
