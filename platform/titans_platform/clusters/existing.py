"""Kind `existing`: a Ray cluster somebody else brought up, by the address of its dashboard and its token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal
from urllib.parse import urlsplit

from pydantic import model_validator

from titans_platform.clusters.base import Cluster
from titans_platform.clusters.jobs import Jobs
from titans_platform.clusters.rayjobs import RayJobs
from titans_platform.clusters.schema import ClusterSpec
from titans_platform.clusters.steps import Note, Step


class ExistingSpec(ClusterSpec):
    """Where it is."""

    kind: Literal["existing"]
    address: str
    """http:// or https:// address of the dashboard, where the job API is: usually port 8265."""

    @model_validator(mode="after")
    def _http(self) -> ExistingSpec:
        parts = urlsplit(self.address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("address: should be like http://head:8265, the address of Ray's dashboard")
        if parts.username or parts.password:
            raise ValueError("address: holds a name or password; the token goes through `token`")
        return self


class Existing(Cluster[ExistingSpec]):
    """A cluster that is there."""

    kind = "existing"
    Spec = ExistingSpec

    def up_steps(self) -> list[Step]:
        """None but a look."""
        return [Note(f"nothing to start; looks whether {self.spec.address} takes the token in {self.token}")]

    def down_steps(self) -> list[Step]:
        """None: it is not ours to end."""
        return [Note("nothing to end: `up` started nothing")]

    def up(self) -> str:
        """Look whether it takes the token."""
        self._jobs().check()
        return self.where()

    def where(self) -> str:
        """Its address."""
        return self.spec.address

    def open_jobs(self) -> Iterator[Jobs]:
        """Its job API."""
        jobs = self._jobs()
        jobs.check()
        yield jobs

    def describe_jobs(self) -> tuple[list[Step], Jobs]:
        """Nothing leads there."""
        return [], self._jobs()

    def _jobs(self) -> RayJobs:
        return RayJobs(self.name, self.spec.address.rstrip("/"), self.token)
