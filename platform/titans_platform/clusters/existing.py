"""Kind `existing`: a Ray cluster somebody else brought up, by the address of its dashboard and its token."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import model_validator

from titans_platform.clusters.base import Cluster
from titans_platform.clusters.rayjobs import RayJobs
from titans_platform.clusters.steps import Note, Step


class Existing(Cluster):
    """A cluster that runs already; nothing is started or ended."""

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
        return [Note("nothing to end: `up` started nothing")]

    def where(self) -> str:
        return self.address

    def jobs(self) -> RayJobs:
        return RayJobs(self.name, self.address.rstrip("/"), self.token_used)
