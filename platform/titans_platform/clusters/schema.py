"""What every cluster file can say. Each kind adds its own fields, in its own file."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from titans_core.config import Frozen

NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
"""What a cluster may be called: also the name of a Kubernetes object and of a folder."""

Cpus = Annotated[int, Field(ge=0)]


class Token(Frozen):
    """Where the token is read, when it is needed: a file, or a variable of the environment. Never a value."""

    file: str | None = None
    env: str | None = None

    @model_validator(mode="after")
    def _one(self) -> Token:
        if (self.file is None) == (self.env is None):
            raise ValueError("file: give either `file` or `env`")
        return self

    def __str__(self) -> str:
        return f"file {self.path}" if self.file else f"variable {self.env}"

    @property
    def path(self) -> Path:
        """The file, `~` written out."""
        return Path(self.file or "").expanduser()


class ClusterSpec(Frozen):
    """The fields that every kind has."""

    description: str = ""
    storage: str | None = None
    """Folder of data, runs and studies as the nodes see it, the same on each: an absolute path."""
    mlflow: str | None = None
    """Address of an MLflow server that every node reaches. None: the SQLite file under the storage."""
    token: Token | None = None
    """Where the token is. None: where the kind keeps it, else Ray's own ~/.ray/auth_token."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables that every process of a job gets. No secrets: they can be read in the dashboard."""
    pip: bool = False
    """Install the locked requirements on the nodes first; not needed where the image has them."""

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


def _check_mlflow(uri: str) -> None:
    parts = urlsplit(uri)
    if parts.scheme == "sqlite":
        raise ValueError("mlflow: an SQLite file takes one machine; give the address of an `mlflow server`")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("mlflow: should be the http:// or https:// address of an MLflow server")
    if parts.password:
        raise ValueError("mlflow: holds a password; set MLFLOW_TRACKING_PASSWORD on the nodes instead")
