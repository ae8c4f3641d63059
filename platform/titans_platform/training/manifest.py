"""A checkpoint's manifest: the run's progress and a hash of every file, to detect corruption."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from titans_platform.files import is_transient, retry_transient
from titans_platform.training.loop import Progress

SCHEMA = 2
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``, except for the hash of the manifest itself."""

    schema: int
    progress: Progress
    files: dict[str, str]
    """BLAKE2b hash of every other file in the folder, by name."""


def write_manifest(folder: Path, progress: Progress) -> None:
    """Hash every file of ``folder`` and write its manifest."""
    files = {path.name: _hash(path) for path in sorted(folder.iterdir())}
    content = asdict(Manifest(SCHEMA, progress, files))
    (folder / MANIFEST).write_text(json.dumps(content | {"hash": _hash_of(content)}))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of ``folder``. Raises OSError, or ValueError with a one-line reason."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
    except ValueError:
        raise ValueError(f"{MANIFEST} is not valid JSON") from None
    if not isinstance(content, dict):
        raise ValueError(f"{MANIFEST} does not hold a JSON object")
    if (schema := content.get("schema")) != SCHEMA:
        raise ValueError(f"written in format {schema!r}; this version reads format {SCHEMA}")
    if content.pop("hash", None) != _hash_of(content):
        raise ValueError(f"{MANIFEST} does not have the hash it was written with")
    try:
        return TypeAdapter(Manifest).validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{MANIFEST}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def find_corruption(folder: Path) -> str | None:
    """What is wrong with the checkpoint in ``folder``; None if every file has the hash it was written with.

    Transient storage errors are retried. Raises StorageError.
    """

    def find() -> str | None:
        try:
            for name, expected in read_manifest(folder).files.items():
                if _hash(folder / name) != expected:
                    return f"{name} does not have the hash it was written with"
        except FileNotFoundError as error:
            return f"{Path(error.filename).name} is missing"
        except (OSError, ValueError) as error:
            if is_transient(error):
                raise
            return str(error)
        return None

    return retry_transient(find)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, _blake).hexdigest()


def _hash_of(content: dict[str, object]) -> str:
    return _blake(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _blake(data: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=16)
