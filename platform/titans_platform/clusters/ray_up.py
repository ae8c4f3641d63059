"""Kind `ray-up`: machines that Ray's cluster launcher provisions (AWS, GCP, ...) or reaches by ssh.

What is under `ray:` is the launcher's YAML as Ray documents it. Added to it are the name, the token
(copied to the nodes as a file) and start commands that require it; Ray's schema validates the result.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
from pathlib import Path
from typing import Any, ClassVar

import yaml
from pydantic import Field, JsonValue

from titans_platform.clusters.base import Cluster
from titans_platform.clusters.rayjobs import RayJobs
from titans_platform.clusters.steps import LOOPBACK, Run, Step, Write, new_token
from titans_platform.errors import UsageError, one_line

REMOTE_TOKEN = "~/.ray/auth_token"
LOCK = "export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0"
_RAY = (sys.executable, "-m", "ray.scripts.scripts")


class RayUp(Cluster):
    """A cluster of Ray's launcher."""

    started_here: ClassVar[bool] = True
    own_token: ClassVar[bool] = True
    ray: dict[str, JsonValue]
    """Ray's cluster YAML: provider, auth, available_node_types, docker, setup_commands, ..."""
    port: int = Field(default=8265, ge=1024, le=65535)
    """The dashboard's port on the head, forwarded to the same one here by ssh."""

    @property
    def file(self) -> Path:
        """The YAML that Ray gets; kept until `down`, which needs it."""
        return self.state_folder / "cluster.yaml"

    def config(self) -> dict[str, Any]:
        """The launcher's YAML, complete. Raises UsageError for what Ray would reject."""
        if self.token_used.env:
            raise UsageError(f"{self.name}.yaml.token.env: nodes get the token as a file; give `file`")
        config: dict[str, Any] = copy.deepcopy(dict(self.ray))
        for key in ("cluster_name", "head_start_ray_commands", "worker_start_ray_commands"):
            if key in config:
                raise UsageError(f"{self.name}.yaml.ray.{key}: is set by titans; leave it out")
        # the dashboard is reached by ssh alone
        head = (
            "ulimit -n 65536; ray start --head --port=6379 --autoscaling-config=~/ray_bootstrap_config.yaml "
            f"--dashboard-host={LOOPBACK} --dashboard-port={self.port}"
        )
        config |= {
            "cluster_name": self.name,
            "file_mounts": {**(config.get("file_mounts") or {}), REMOTE_TOKEN: str(self.token_used.path)},
            "head_start_ray_commands": ["ray stop", f"{LOCK}; {head}"],
            "worker_start_ray_commands": ["ray stop", f"{LOCK}; ray start --address=$RAY_HEAD_IP:6379"],
        }
        _check(config, f"{self.name}.yaml.ray")
        return config

    def grows_to(self) -> list[dict[str, float]] | None:
        """Every worker type at max_workers; Ray adds machines while cells are queued."""
        ray: Any = self.ray
        workers = dict(ray.get("available_node_types") or {})
        workers.pop(ray.get("head_node_type"), None)
        return [
            dict(kind["resources"])
            for kind in workers.values()
            for _ in range(kind.get("max_workers", ray.get("max_workers", 0)))
        ] or None

    def up_steps(self) -> list[Step]:
        text = yaml.safe_dump(self.config(), sort_keys=False, width=1000)
        token = [new_token(self.token_used.path)] if self.token is None else []
        return [*token, Write(self.file, text), self.record_step(), self._ray("up", "--yes")]

    def down_steps(self) -> list[Step]:
        return [self._ray("down", "--yes")]

    def _ray(self, command: str, *options: str) -> Run:
        # it takes minutes and may ask for input: stream its output
        argv = (*_RAY, command, *options, str(self.file))
        return Run(argv, {"RAY_AUTH_MODE": "token"}, quiet=False)

    def where(self) -> str:
        provider: Any = self.ray.get("provider")
        return f"{provider.get('type')} machines of Ray's launcher, cluster {self.name}"

    def jobs(self) -> RayJobs:
        port = str(self.port)
        forward = (*_RAY, "exec", str(self.file), "--port-forward", port, "sleep infinity")
        return RayJobs(self.name, f"http://{LOOPBACK}:{port}", self.token_used, forward)


def _check(config: dict[str, Any], where: str) -> None:
    """Validate against Ray's schema, before and after Ray fills in its defaults. Raises UsageError."""
    import jsonschema
    import ray.autoscaler
    from ray.autoscaler._private.util import prepare_config, validate_config

    logging.getLogger("ray.autoscaler").setLevel(logging.ERROR)
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    try:
        # before the defaults are filled in, which needs what the schema requires
        jsonschema.validate(config, schema)
        validate_config(prepare_config(copy.deepcopy(config)))
    except jsonschema.ValidationError as error:
        place = ".".join([where, *map(str, error.absolute_path)])
        raise UsageError(f"{place}: {error.message[:200]}") from None
    except Exception as error:
        raise UsageError(f"{where}: Ray rejects it: {one_line(error, 200)}") from None
