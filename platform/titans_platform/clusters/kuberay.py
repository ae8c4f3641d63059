"""Kind `kuberay`: Ray on Kubernetes, kept by the KubeRay operator (1.7), through kubectl."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import Any

from titans_platform.clusters import manifests
from titans_platform.clusters.base import Cluster
from titans_platform.clusters.jobs import Job, Jobs
from titans_platform.clusters.kubejobs import KubeJobs
from titans_platform.clusters.manifests import KubeRaySpec
from titans_platform.clusters.nodes import free_ports
from titans_platform.clusters.rayjobs import RayJobs
from titans_platform.clusters.schema import Token
from titans_platform.clusters.steps import Note, Run, Step
from titans_platform.clusters.tokens import read_token, write_token
from titans_platform.errors import ClusterError

DASHBOARD = 8265


class KubeRay(Cluster[KubeRaySpec]):
    """A RayCluster from `up` to `down`, or a RayJob for each `submit`."""

    kind = "kuberay"
    Spec = KubeRaySpec

    @property
    def for_each_job(self) -> bool:
        """Whether clusters are made for jobs."""
        return self.spec.lifetime == "job"

    def grows_to(self) -> list[dict[str, float]] | None:
        """Every pool at its largest; a job's own cluster is not there yet when it is planned."""
        pools = self.spec.pools
        if not any(pool.most > pool.replicas for pool in pools):
            return None
        return [{"CPU": pool.cpus, "GPU": pool.gpus} for pool in pools for _ in range(pool.most)]

    def kubectl(self, *arguments: str) -> tuple[str, ...]:
        """The start of every command."""
        context = ("--context", self.spec.context) if self.spec.context else ()
        return ("kubectl", *context, "--namespace", self.spec.namespace, *arguments)

    def up_steps(self) -> list[Step]:
        """Apply the claim and the RayCluster, wait for its pods."""
        apply = Run(self.kubectl("apply", "-f", "-"), stdin=manifests.as_yaml(self._kept()))
        if self.for_each_job:
            note = Note("no cluster to keep: each submit makes its own (lifetime: job)")
            return [apply, note] if self._kept() else [note]
        ready = ("wait", "--for=condition=RayClusterProvisioned", f"raycluster/{self.name}", "--timeout=15m")
        return [apply, Run(self.kubectl(*ready))]

    def _kept(self) -> list[dict[str, Any]]:
        """What lives from `up` to `down`, and the claim, which outlives both."""
        cluster = [] if self.for_each_job else [manifests.ray_cluster(self.name, self.spec)]
        return [*manifests.claim(self.name, self.spec), *cluster]

    def manifests(self) -> list[dict[str, Any]]:
        """What is applied, a sample job among it."""
        if not self.for_each_job:
            return self._kept()
        return [*self._kept(), *manifests.ray_job("sample", self.spec, _SAMPLE)]

    def up(self) -> str:
        """Apply, and remember before waiting that there is something to take down."""
        if self.state.read() is not None:
            raise ClusterError(f"cluster {self.name}: is up already; titans cluster down {self.name} ends it")
        first, *rest = self.up_steps()
        first.do()
        self.state.write({"kind": "kuberay", "namespace": self.spec.namespace})
        for step in rest:
            step.do()
        return self.where()

    def down_steps(self) -> list[Step]:
        """Delete the RayCluster. The claim stays: it holds the results."""
        kept = f"the claim {self.spec.volume.claim} stays, with all results; kubectl delete pvc removes it"
        if self.for_each_job:
            return [Note(kept)]
        return [
            Run(self.kubectl("delete", "raycluster", self.name, "--ignore-not-found", "--wait")),
            Note(kept),
        ]

    def where(self) -> str:
        """Its namespace and name."""
        what = "RayJobs" if self.for_each_job else f"RayCluster {self.name}"
        return f"{what} in namespace {self.spec.namespace}"

    def open_jobs(self) -> Iterator[Jobs]:
        """KubeRay's jobs, or Ray's through a forwarded port."""
        if self.for_each_job:
            yield KubeJobs(self.name, self.spec, self.kubectl)
            return
        from titans_platform.clusters.tunnel import tunnel

        (port,) = free_ports(1)
        with tunnel(self._forward(port), port) as address:
            jobs = RayJobs(self.name, address, self._fetched_token())
            jobs.check()
            yield jobs

    def describe_jobs(self) -> tuple[list[Step], Jobs]:
        """The same, not yet reached."""
        if self.for_each_job:
            return [], KubeJobs(self.name, self.spec, self.kubectl)
        (port,) = free_ports(1)
        way = [Note(f"while it lasts: {' '.join(self._forward(port))}")]
        if self.spec.token is None:
            way.append(Note(f"the token: {' '.join(self._secret())}"))
        return [*way], RayJobs(self.name, f"http://127.0.0.1:{port}", self.token)

    def _forward(self, port: int) -> tuple[str, ...]:
        return self.kubectl("port-forward", f"service/{self.name}-head-svc", f"{port}:{DASHBOARD}")

    def _secret(self) -> tuple[str, ...]:
        return self.kubectl(
            "get", "secret", self.spec.secret or self.name, "-o", "jsonpath={.data.auth_token}"
        )

    @property
    def token(self) -> Token:
        """The file's own, or a copy of the Secret that only this user can read."""
        return self.spec.token or Token(file=str(self.state.token))

    def _fetched_token(self) -> Token:
        if self.spec.token is None:
            coded = Run(self._secret()).output()
            try:
                write_token(self.state.token, base64.b64decode(coded).decode().strip())
            except (binascii.Error, UnicodeDecodeError):
                raise ClusterError(f"cluster {self.name}: its Secret holds no auth_token") from None
            read_token(self.token, self.name)
        return self.token


_SAMPLE = Job("sample", ("sweep", "run", "ablation"), {"sweeps/ablation.yaml": b"name: ablation\n"})
