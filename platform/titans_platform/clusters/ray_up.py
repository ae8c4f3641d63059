"""Kind `ray-up`: machines that Ray's own cluster launcher gets (AWS, GCP, ...) or reaches by ssh.

What is under `ray:` is the launcher's YAML as Ray documents it. Added to it are the name, the token
(copied to the nodes as a file) and start commands with the lock on; the whole is checked by Ray's schema.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, JsonValue

from titans_platform.clusters.base import Cluster
from titans_platform.clusters.jobs import Jobs
from titans_platform.clusters.rayjobs import RayJobs
from titans_platform.clusters.schema import ClusterSpec, Token
from titans_platform.clusters.steps import NewToken, Note, Run, Step, Write
from titans_platform.errors import ClusterError, UsageError

REMOTE_TOKEN = "~/.ray/auth_token"
LOCK = "export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0"


class RayUpSpec(ClusterSpec):
    """The launcher's own YAML, and the dashboard's port."""

    kind: Literal["ray-up"]
    ray: dict[str, JsonValue]
    """Ray's cluster YAML: provider, auth, available_node_types, docker, setup_commands, ..."""
    port: int = Field(default=8265, ge=1024, le=65535)
    """The dashboard's port on the head, forwarded to the same one here by ssh."""


class RayUp(Cluster[RayUpSpec]):
    """A cluster of Ray's launcher."""

    kind = "ray-up"
    Spec = RayUpSpec

    @property
    def file(self) -> Path:
        """The YAML that Ray gets; kept until `down`, which needs it."""
        return self.state.folder / "cluster.yaml"

    @property
    def token(self) -> Token:
        """The file's own, or one that `up` makes."""
        return self.spec.token or Token(file=str(self.state.token))

    def config(self) -> dict[str, Any]:
        """The launcher's YAML, complete. Raises UsageError for what Ray would refuse."""
        if self.token.env:
            raise UsageError(f"{self.name}.yaml.token.env: nodes get the token as a file; give `file`")
        config = copy.deepcopy(dict(self.spec.ray))
        for key in ("cluster_name", "head_start_ray_commands", "worker_start_ray_commands"):
            if key in config:
                raise UsageError(f"{self.name}.yaml.ray.{key}: is set by titans; leave it out")
        mounts = config.get("file_mounts") or {}
        config |= {
            "cluster_name": self.name,
            "file_mounts": {**mounts, REMOTE_TOKEN: str(self.token.path)},  # pyright: ignore[reportGeneralTypeIssues]
            "head_start_ray_commands": ["ray stop", f"{LOCK}; {self._head()}"],
            "worker_start_ray_commands": ["ray stop", f"{LOCK}; ray start --address=$RAY_HEAD_IP:6379"],
        }
        _check(config, f"{self.name}.yaml.ray")
        return config

    def _head(self) -> str:
        # the dashboard is reached by ssh alone
        return (
            "ulimit -n 65536; ray start --head --port=6379 --autoscaling-config=~/ray_bootstrap_config.yaml "
            f"--dashboard-host=127.0.0.1 --dashboard-port={self.spec.port}"
        )

    def grows_to(self) -> list[dict[str, float]] | None:
        """Every type of worker at its most; Ray gets machines as cells wait for them."""
        ray: Any = self.spec.ray
        types = {
            name: kind
            for name, kind in (ray.get("available_node_types") or {}).items()
            if name != ray.get("head_node_type")
        }
        most = {name: kind.get("max_workers", ray.get("max_workers", 0)) for name, kind in types.items()}
        return [dict(types[name]["resources"]) for name in types for _ in range(most[name])] or None

    def up_steps(self) -> list[Step]:
        """Write the YAML, make a token, `ray up`."""
        text = yaml.safe_dump(self.config(), sort_keys=False, width=1000)
        token = [NewToken(self.state.token)] if self.spec.token is None else []
        return [*token, Write(self.file, text), self._ray("up", "--yes")]

    def up(self) -> str:
        """Remember before machines are paid for that there is something to take down."""
        if self.state.read() is not None:
            raise ClusterError(f"cluster {self.name}: is up already; titans cluster down {self.name} ends it")
        *prepare, start = self.up_steps()
        for step in prepare:
            step.do()
        self.state.write({"kind": "ray-up"})
        start.do()
        return self.where()

    def down_steps(self) -> list[Step]:
        """`ray down` with the YAML of `up`."""
        return [self._ray("down", "--yes")]

    def _ray(self, command: str, *options: str) -> Run:
        # long, and asks questions by what it prints: shown as it comes
        argv = (sys.executable, "-m", "ray.scripts.scripts", command, *options, str(self.file))
        return Run(argv, {"RAY_AUTH_MODE": "token"}, quiet=False)

    def where(self) -> str:
        """The provider."""
        provider: Any = self.spec.ray.get("provider")
        return f"{provider.get('type')} machines of Ray's launcher, cluster {self.name}"

    def _forward(self) -> tuple[str, ...]:
        forward = ("exec", str(self.file), "--port-forward", str(self.spec.port), "sleep infinity")
        return (sys.executable, "-m", "ray.scripts.scripts", *forward)

    def open_jobs(self) -> Iterator[Jobs]:
        """The head's job API, through ssh."""
        from titans_platform.clusters.tunnel import tunnel

        self.require_up()
        with tunnel(self._forward(), self.spec.port, timeout=120) as address:
            jobs = RayJobs(self.name, address, self.token)
            jobs.check()
            yield jobs

    def describe_jobs(self) -> tuple[list[Step], Jobs]:
        """The same, not yet reached."""
        address = f"http://127.0.0.1:{self.spec.port}"
        return [Note(f"while it lasts: {' '.join(self._forward())}")], RayJobs(self.name, address, self.token)


def _check(config: dict[str, Any], where: str) -> None:
    """As it is and with Ray's defaults filled in, against Ray's schema. Raises UsageError."""
    import jsonschema
    import ray.autoscaler
    from ray.autoscaler._private.util import prepare_config, validate_config

    logging.getLogger("ray.autoscaler").setLevel(logging.ERROR)
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    try:
        # before the defaults, which take for granted what it asks for
        jsonschema.validate(config, schema)
        validate_config(prepare_config(copy.deepcopy(config)))
    except jsonschema.ValidationError as error:
        place = ".".join([where, *map(str, error.absolute_path)])
        raise UsageError(f"{place}: {error.message[:200]}") from None
    except Exception as error:
        raise UsageError(f"{where}: Ray refuses it: {' '.join(str(error).split())[:200]}") from None
