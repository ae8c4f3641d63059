"""Base classes of a kind of cluster: `Cluster`, which goes up and down; `Jobs`, `titans` commands on it."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self
from urllib.parse import urlsplit

from pydantic import Field, PrivateAttr, model_validator

from titans_core.config import Frozen
from titans_platform.clusters.steps import Step, Token, perform
from titans_platform.errors import ClusterError
from titans_platform.files import read_json, write_json

Count = Annotated[int, Field(ge=0)]
DETACHED = 130
"""A shell's exit code after Ctrl-C; the job keeps running."""


class Cluster(Frozen, ABC):
    """A cluster as a file describes it. Nothing is contacted before a method is called.

    Every kind has these fields; it adds its own fields, its steps and its jobs. Methods that contact the
    cluster raise ClusterError.
    """

    kind: str
    description: str = ""
    storage: str | None = None
    """Folder of data, runs and studies as the nodes see it, the same on each: an absolute path."""
    mlflow: str | None = None
    """Address of an MLflow server that every node reaches. None: the SQLite file under the storage."""
    token: Token | None = None
    """Source of the token. None: the kind's own file, else Ray's ~/.ray/auth_token."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of every process of a job. No secrets: the dashboard shows them."""
    pip: bool = False
    """Install the locked requirements on the nodes first; not needed where the image has them."""

    sees_paths: ClassVar[bool] = False
    """True if its nodes see this machine's folders under the same paths."""
    started_here: ClassVar[bool] = False
    """True if its jobs can be reached only from the machine that ran `up`."""
    own_token: ClassVar[bool] = False
    """True if it has a token of its own, stored here in a file that only this user can read."""
    _name: str = PrivateAttr("")

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.storage and "://" in self.storage:
            raise ValueError("storage: cells are files; mount the bucket on every node and give its path")
        if self.storage and not os.path.isabs(self.storage):
            raise ValueError("storage: should be an absolute path: nodes have no common working directory")
        if "RAY_AUTH_TOKEN" in self.env:
            raise ValueError("env: the token does not belong in a file that is shared; see `token`")
        if self.mlflow:
            parts = urlsplit(self.mlflow)
            if parts.scheme == "sqlite":
                raise ValueError("mlflow: SQLite serves one machine; give the address of an `mlflow server`")
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError("mlflow: should be the http:// or https:// address of an MLflow server")
            if parts.password:
                raise ValueError("mlflow: holds a password; set MLFLOW_TRACKING_PASSWORD on the nodes")
        return self

    @property
    def name(self) -> str:
        """The stem of its file."""
        return self._name

    @property
    def state_folder(self) -> Path:
        """Folder for the record of what `up` started: outside the project, under XDG_STATE_HOME."""
        base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        return Path(base).expanduser() / "titans" / "clusters" / self.name

    def recorded(self) -> dict[str, Any] | None:
        """Return the record of `up`, so that `down` stops that and nothing else; None if nothing is up."""
        return read_json(self.state_folder / "state.json")

    def record(self, value: dict[str, Any]) -> None:
        """Record what `up` started, in a folder that only its owner can read."""
        self.state_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(self.state_folder / "state.json", value)

    @property
    def token_used(self) -> Token:
        """The configured token, else the kind's own or Ray's."""
        own = str(self.state_folder / "token")
        return self.token or Token(file=own if self.own_token else "~/.ray/auth_token")

    @property
    def one_machine(self) -> bool:
        """True if all its workers are on one machine, so that an SQLite file can take their metrics."""
        return False

    def grows_to(self) -> list[dict[str, float]] | None:
        """CPUs and GPUs of each node at full autoscaling; None if it does not autoscale."""
        return None

    @abstractmethod
    def up_steps(self) -> list[Step]:
        """Return the steps of `up`."""

    @abstractmethod
    def down_steps(self) -> list[Step]:
        """Return the steps of `down`, which stop what `up` started and nothing else."""

    @abstractmethod
    def where(self) -> str:
        """Describe its location in one line."""

    @abstractmethod
    def jobs(self) -> Jobs:
        """Return its jobs, not contacted yet."""

    def up(self) -> str:
        """Bring it up; where it is."""
        if self.recorded() is not None:
            stop = f"titans cluster down {self.name} stops it"
            raise ClusterError(f"cluster {self.name}: is up already; {stop}")
        perform(self.up_steps())
        return self.where()

    def down(self) -> None:
        """Take it down."""
        self.require_up()
        perform(self.down_steps())
        shutil.rmtree(self.state_folder, ignore_errors=True)

    def require_up(self) -> dict[str, Any]:
        """Return the record of `up`. Raises ClusterError if this user did not call it on this machine."""
        if (record := self.recorded()) is None:
            start = f"run `titans cluster up {self.name}` on this machine first"
            raise ClusterError(f"cluster {self.name}: not up; {start}")
        return record

    def connected(self) -> AbstractContextManager[Jobs]:
        """Return its jobs, connected for the duration of the block."""
        if self.started_here:
            self.require_up()
        return self.jobs().connected()

    def status(self) -> dict[str, Any]:
        """Return its `state`, and what is known of its `nodes` and `jobs`."""
        with self.connected() as jobs:
            return {"state": "up", "where": self.where(), **jobs.describe()}


@dataclass(frozen=True)
class Job:
    """One `titans` command with everything it needs."""

    name: str
    arguments: tuple[str, ...]
    """The arguments after `titans`."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files for the job's working directory, by relative path."""
    env: Mapping[str, str] = field(default_factory=dict)
    pip: bool = False
    """Install the locked requirements on the nodes first."""

    @property
    def command(self) -> tuple[str, ...]:
        """The whole command line. A job's `python` is the one on the node's PATH."""
        return ("python", "-m", "titans_platform", *self.arguments)


@dataclass(frozen=True)
class JobInfo:
    """A job as `titans cluster status` lists it."""

    id: str
    name: str
    state: str
    """pending, running, succeeded, failed or stopped."""
    started: float | None = None
    """Seconds since the epoch."""
    code: int | None = None
    """The driver's exit code, negative where a signal ended it."""

    @property
    def ended(self) -> bool:
        """True if the job is over."""
        return self.state in ("succeeded", "failed", "stopped")

    @property
    def shell_code(self) -> int:
        """The exit code as a shell reports it: 128 plus the signal's number where a signal ended it."""
        if self.state == "succeeded":
            return 0
        if self.code is None:
            return DETACHED if self.state == "stopped" else 1
        return 128 - self.code if self.code < 0 else self.code


class Log:
    """Writes a job's log once: every read starts at its beginning and skips what was written before."""

    def __init__(self, write: Callable[[str], None]):
        self._write = write
        self._skip = self.written = 0

    def restart(self) -> None:
        """Start a new read from the beginning."""
        self._skip = self.written

    def add(self, text: str) -> None:
        """Add the next chunk of this read."""
        fresh, self._skip = text[self._skip :], max(0, self._skip - len(text))
        self._write(fresh)
        self.written += len(fresh)


@dataclass(frozen=True)
class Jobs(ABC):
    """The jobs of one cluster. Creating one contacts nothing, so that --dry-run can show its steps.

    Methods that contact the cluster raise ClusterError.
    """

    cluster: str
    poll: ClassVar[float] = 2.0
    """Seconds between polls of a job's state."""

    @abstractmethod
    def submit_steps(self, job: Job, job_id: str) -> list[Step]:
        """Return the steps that submit a job."""

    @abstractmethod
    def list(self) -> list[JobInfo]:
        """List every job the cluster knows, the newest last."""

    @abstractmethod
    def read(self, job_id: str, log: Log) -> None:
        """Add the log from its start; it may block while the log grows."""

    @abstractmethod
    def stop_steps(self, job_id: str) -> list[Step]:
        """Return the steps that stop a job."""

    def access_steps(self) -> list[Step]:
        """Return the steps required before any of the above, such as forwarding a port."""
        return []

    @contextmanager
    def connected(self) -> Iterator[Self]:
        """Connect for the duration of the block."""
        yield self

    def describe(self) -> dict[str, Any]:
        """Status of the cluster: its jobs, and for some kinds its nodes."""
        return {"jobs": [asdict(job) for job in self.list()]}

    def info(self, job_id: str) -> JobInfo:
        """Return one job. Raises ClusterError that lists the known jobs if it is not one of them."""
        known = {job.id: job for job in self.list()}
        if job_id not in known:
            names = ", ".join(list(known)[-5:]) or "none"
            raise ClusterError(f"cluster {self.cluster}: no job {job_id!r}; its jobs: {names}")
        return known[job_id]

    def new_id(self, job: Job) -> str:
        """Return a new id that begins with the job's name."""
        return f"{job.name}-{secrets.token_hex(3)}"

    def submit(self, job: Job) -> str:
        """Submit a job; its id."""
        job_id = self.new_id(job)
        perform(self.submit_steps(job, job_id))
        return job_id

    def stop(self, job_id: str) -> None:
        """Stop a job; submitting the same command again resumes it."""
        self.info(job_id)
        perform(self.stop_steps(job_id))

    def follow(self, job_id: str, log: Log) -> int:
        """Write the log to ``log`` until the job ends; returns its exit code."""
        while True:
            info = self.info(job_id)
            if info.state != "pending":
                log.restart()
                self.read(job_id, log)
            if info.ended:
                return info.shell_code
            time.sleep(self.poll)
