"""The token: read when it is needed, handed on as the path of a file, never shown.

An argument is in the process list and a manifest in everybody's `kubectl get`; a variable that names a
file is in neither.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from titans_platform.clusters.schema import Token
from titans_platform.errors import ClusterError

# what would lead a subprocess to another cluster, another token or another copy of the code
_FOREIGN = ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "PYTHONPATH")


def read_token(token: Token, cluster: str) -> str:
    """The token's value. Raises ClusterError where there is none."""
    if token.env:
        value = os.environ.get(token.env, "").strip()
        fix = f"set {token.env}"
    else:
        value, fix = _read_file(token.path), f"put the cluster's token into {token.path}"
    if not value:
        raise ClusterError(f"cluster {cluster}: no token in {token}; {fix}")
    if not value.isascii() or any(c.isspace() for c in value):
        raise ClusterError(
            f"cluster {cluster}: what is in {token} is no token: it has blanks or is not ASCII"
        )
    return value


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def write_token(path: Path, value: str | None = None) -> None:
    """Write a token, a new random one by default, where only its owner can read it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(value or secrets.token_hex(32))


def with_token(path: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a Ray subprocess needs in its environment: the lock, and where its key lies."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path), **(more or {})}


def clean_environment() -> dict[str, str]:
    """Our environment without what would mislead a subprocess."""
    return {key: value for key, value in os.environ.items() if key not in _FOREIGN}
