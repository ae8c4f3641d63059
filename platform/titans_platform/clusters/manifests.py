"""Kubernetes manifests: as YAML, and checked against the schemas a server would use (`--schema FILE`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from titans_platform.errors import UsageError


class _Dumper(yaml.SafeDumper):
    """YAML without anchors, which people and `kubectl diff` read badly."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def as_yaml(objects: Sequence[dict[str, Any]]) -> str:
    """The manifests as one YAML stream."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False)


def check_manifests(objects: Sequence[dict[str, Any]], files: Sequence[Path]) -> list[str]:
    """Check each object against the schema of its kind; a line for each. Raises UsageError for a mistake.

    Unknown fields are mistakes too: the server drops them silently.
    """
    import jsonschema

    schemas = {key: schema for file in files for key, schema in _schemas(file).items()}
    lines = []
    for item in objects:
        schema = schemas.get((item["apiVersion"], item["kind"]))
        where = f"{item['kind']} {item['metadata']['name']}"
        if schema is None:
            lines.append(f"{where}: no schema given")
            continue
        errors = sorted(jsonschema.Draft202012Validator(schema).iter_errors(item), key=lambda e: e.json_path)
        if errors:
            raise UsageError(f"{where}: {errors[0].json_path}: {errors[0].message[:200]}")
        lines.append(f"{where}: valid")
    return lines


def _schemas(file: Path) -> dict[tuple[str, str], Any]:
    """The schemas of a CustomResourceDefinition, by apiVersion and kind."""
    try:
        found = yaml.load(file.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        spec = found["spec"]
        return {
            (f"{spec['group']}/{version['name']}", spec["names"]["kind"]): _strict(
                version["schema"]["openAPIV3Schema"]
            )
            for version in spec["versions"]
        }
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--schema {file}: cannot be read: {' '.join(str(error).split())[:120]}") from None
    except (KeyError, TypeError):
        raise UsageError(f"--schema {file}: is no CustomResourceDefinition") from None


def _strict(schema: dict[str, Any], top: bool = True) -> dict[str, Any]:
    """The schema with unknown fields refused wherever it names the known ones."""
    closed = dict(schema)
    properties = schema.get("properties")
    if isinstance(properties, dict):
        # metadata is Kubernetes' own, and a CRD does not describe it
        open_ones = ("metadata", "status") if top else ()
        closed["properties"] = {
            name: part if name in open_ones else _strict(part, top=False) for name, part in properties.items()
        }
        if not (top or schema.get("x-kubernetes-preserve-unknown-fields")):
            closed.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            closed[key] = _strict(schema[key], top=False)
    return closed
