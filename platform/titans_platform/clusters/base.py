"""What a kind of cluster is: a spec, the steps that bring it up and down, and where its jobs are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, TypeVar

from titans_platform.clusters.jobs import Job, Jobs
from titans_platform.clusters.schema import ClusterSpec, Token
from titans_platform.clusters.state import State
from titans_platform.clusters.steps import Note, Step, perform
from titans_platform.errors import ClusterError

Spec = TypeVar("Spec", bound=ClusterSpec)


class Cluster(ABC, Generic[Spec]):
    """A cluster as a file describes it. Nothing is touched before a method is called."""

    kind: ClassVar[str]
    """What a file says to mean it."""
    Spec: ClassVar[type[ClusterSpec]]
    sees_paths: ClassVar[bool] = False
    """Whether its nodes see this machine's folders under the same paths."""

    def __init__(self, name: str, spec: Spec):
        self.name = name
        self.spec = spec
        self.state = State(name)

    @property
    def token(self) -> Token:
        """Where its token is."""
        return self.spec.token or Token(file="~/.ray/auth_token")

    @property
    def one_machine(self) -> bool:
        """Whether all its workers are on one machine, so that an SQLite file can take their metrics."""
        return False

    def grows_to(self) -> list[dict[str, float]] | None:
        """The CPUs and GPUs of each node it may grow to; None where what is alive is all there is."""
        return None

    @abstractmethod
    def up_steps(self) -> list[Step]:
        """What `up` does."""

    @abstractmethod
    def down_steps(self) -> list[Step]:
        """What `down` does: it ends what `up` started, and nothing else."""

    @abstractmethod
    def open_jobs(self) -> Iterator[Jobs]:
        """Its jobs, for as long as the generator lives. Raises ClusterError where it cannot be reached."""

    @abstractmethod
    def describe_jobs(self) -> tuple[list[Step], Jobs]:
        """The steps that lead to its jobs, and the jobs, without reaching for anything: for --dry-run."""

    def manifests(self) -> list[dict[str, Any]]:
        """The Kubernetes objects `up` and `submit` apply; none elsewhere."""
        return []

    def up(self) -> str:
        """Bring it up; where it is."""
        if self.state.read() is not None:
            raise ClusterError(f"cluster {self.name}: is up already; see titans cluster status {self.name}")
        perform(self.up_steps())
        self.state.write({"kind": self.kind})
        return self.where()

    def down(self) -> None:
        """Take it down."""
        self.require_up()
        perform(self.down_steps())
        self.state.forget()

    def require_up(self) -> dict[str, Any]:
        """What `up` wrote down. Raises ClusterError where it started nothing, here, by this user."""
        found = self.state.read()
        if found is None:
            raise ClusterError(
                f"cluster {self.name}: not up: nothing that `titans cluster up {self.name}` started is here"
            )
        return found

    def where(self) -> str:
        """One line on where it is."""
        return self.kind

    @contextmanager
    def jobs(self) -> Iterator[Jobs]:
        """Its jobs, reached through whatever leads to it for that long."""
        yield from self.open_jobs()

    def status(self) -> dict[str, Any]:
        """How it is: `state`, and what is known of `nodes` and `jobs`. Raises ClusterError."""
        with self.jobs() as jobs:
            return {"state": "up", "where": self.where(), **jobs.about()}

    def submit_steps(self, job: Job) -> list[Step]:
        """What submitting does, to be shown."""
        before, jobs = self.describe_jobs()
        return [*before, *jobs.submit_steps(job, job.new_id())]

    def status_steps(self) -> list[Step]:
        """What ``status`` asks, to be shown."""
        before, _ = self.describe_jobs()
        return [*before, Note("GET /api/version, /api/v0/nodes and /api/jobs/ with the token")]

    def log_steps(self, job_id: str) -> list[Step]:
        """What ``logs`` asks, to be shown."""
        before, jobs = self.describe_jobs()
        return [*before, *jobs.log_steps(job_id)]
