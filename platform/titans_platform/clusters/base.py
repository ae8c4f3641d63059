"""The base class of clusters: fields, the steps that bring one up and down, and its jobs."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self
from urllib.parse import urlsplit

from pydantic import Field, PrivateAttr, model_validator

from titans_core.config import Frozen
from titans_platform.clusters.jobs import Jobs
from titans_platform.clusters.steps import Step, Token, perform
from titans_platform.errors import ClusterError
from titans_platform.files import read_json, write_json

Count = Annotated[int, Field(ge=0)]


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
    """Where to read the token. None: where the kind stores it, else Ray's own ~/.ray/auth_token."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of every process of a job. No secrets: the dashboard shows them."""
    pip: bool = False
    """Install the locked requirements on the nodes first; not needed where the image has them."""

    sees_paths: ClassVar[bool] = False
    """Whether its nodes see this machine's folders under the same paths."""
    started_here: ClassVar[bool] = False
    """Whether its jobs can be reached only from the machine that ran `up`."""
    own_token: ClassVar[bool] = False
    """Whether it has a token of its own, stored here in a file that only this user can read."""
    _name: str = PrivateAttr("")

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.storage and "://" in self.storage:
            raise ValueError(
                "storage: cells are files in a folder; mount the bucket on every node, give its path"
            )
        if self.storage and not os.path.isabs(self.storage):
            raise ValueError("storage: should be an absolute path: nodes have no common working directory")
        if self.mlflow:
            _check_mlflow(self.mlflow)
        if "RAY_AUTH_TOKEN" in self.env:
            raise ValueError("env: the token does not belong in a file that is shared; see `token`")
        return self

    @property
    def name(self) -> str:
        """The stem of its file."""
        return self._name

    @property
    def state_folder(self) -> Path:
        """Where `up` records what it started: outside the project, under XDG_STATE_HOME."""
        base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        return Path(base).expanduser() / "titans" / "clusters" / self.name

    def recorded(self) -> dict[str, Any] | None:
        """What `up` recorded, so that `down` stops that and nothing else; None if nothing is up."""
        return read_json(self.state_folder / "state.json")

    def record(self, value: dict[str, Any]) -> None:
        """Record what `up` started, in a folder that only its owner can read."""
        self.state_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(self.state_folder / "state.json", value)

    def record_step(self) -> Step:
        """Record that there is something to take down, before the step that costs money or time."""
        line = f"# record in {self.state_folder / 'state.json'} that it is up"
        return Step(line, partial(self.record, {"name": self.name}))

    @property
    def token_used(self) -> Token:
        """Where to read its token: as the file says, else the kind's own or Ray's."""
        own = str(self.state_folder / "token")
        return self.token or Token(file=own if self.own_token else "~/.ray/auth_token")

    @property
    def one_machine(self) -> bool:
        """Whether all its workers are on one machine, so that an SQLite file can take their metrics."""
        return False

    @property
    def is_up(self) -> bool:
        """Whether jobs can be submitted, without contacting the cluster."""
        return self.recorded() is not None

    def grows_to(self) -> list[dict[str, float]] | None:
        """CPUs and GPUs of each node at full autoscaling; None if it does not autoscale."""
        return None

    @abstractmethod
    def up_steps(self) -> list[Step]:
        """What `up` does."""

    @abstractmethod
    def down_steps(self) -> list[Step]:
        """What `down` does: it stops what `up` started, and nothing else."""

    @abstractmethod
    def where(self) -> str:
        """One line on where it is."""

    @abstractmethod
    def jobs(self) -> Jobs:
        """Its jobs, not contacted yet."""

    def up(self) -> str:
        """Bring it up; where it is."""
        if self.recorded() is not None:
            raise ClusterError(
                f"cluster {self.name}: is up already; titans cluster down {self.name} stops it"
            )
        perform(self.up_steps())
        return self.where()

    def down(self) -> None:
        """Take it down."""
        self.require_up()
        perform(self.down_steps())
        shutil.rmtree(self.state_folder, ignore_errors=True)

    def require_up(self) -> dict[str, Any]:
        """What `up` recorded. Raises ClusterError if it was not called on this machine by this user."""
        found = self.recorded()
        if found is None:
            raise ClusterError(
                f"cluster {self.name}: not up; run `titans cluster up {self.name}` on this machine first"
            )
        return found

    @contextmanager
    def connected(self) -> Iterator[Jobs]:
        """Its jobs, connected for the duration of the block."""
        if self.started_here:
            self.require_up()
        with self.jobs().connected() as jobs:
            yield jobs

    def status(self) -> dict[str, Any]:
        """Its `state`, and what is known of its `nodes` and `jobs`."""
        with self.connected() as jobs:
            return {"state": "up", "where": self.where(), **jobs.about()}


def _check_mlflow(uri: str) -> None:
    parts = urlsplit(uri)
    if parts.scheme == "sqlite":
        raise ValueError(
            "mlflow: an SQLite file serves only one machine; give the address of an `mlflow server`"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("mlflow: should be the http:// or https:// address of an MLflow server")
    if parts.password:
        raise ValueError("mlflow: holds a password; set MLFLOW_TRACKING_PASSWORD on the nodes instead")
