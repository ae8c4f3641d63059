"""The reference of a run file's fields: `python -m tools.config_reference > docs/config.md`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import cleandoc
from pathlib import Path
from typing import Any

from jinja2 import Environment
from pydantic import BaseModel

import titans_platform.objectives  # noqa: F401 - objectives register tasks of their own
from titans_platform.cli.init import fields_of
from titans_platform.config import RunConfig, TaskConfig
from titans_platform.tasks import TASKS

TEMPLATE = Path(__file__).with_suffix(".md")
SIGNS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
WORDS = {"string": "text", "boolean": "true, false"}


def reference_page() -> str:
    """Render the Markdown page of every field of a run file, and every task with its options."""

    def about(kind: type) -> str:
        return cleandoc(kind.__doc__ or "").partition("\n\n")[0].replace("``", "`")

    sections, tasks = list(_sections(RunConfig, "")), sorted(TASKS.items())
    values = {"about": about, "fields_of": fields_of, "values_of": values_of, "task": TaskConfig}
    template = Environment(trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE.read_text("utf-8"))
    return template.render(sections=sections, tasks=tasks, **values)


def values_of(model: type[BaseModel]) -> dict[str, str]:
    """Describe the allowed values of each field of a model."""
    return {name: _values(schema) for name, schema in model.model_json_schema()["properties"].items()}


def _values(schema: Mapping[str, Any]) -> str:
    """Describe the values that a JSON schema allows: `integer >= 1`."""
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(map(_values, schema["anyOf"]))
    if "$ref" in schema:
        return "any value" if schema["$ref"].endswith("/JsonValue") else "a section"
    kind: str = schema.get("type", "any value")
    if kind == "array":
        return f"list of {_values(schema['items'])}"
    if kind == "object":
        return f"mapping of names to {_values(schema['additionalProperties'])}"
    bounds = [f"{sign} {schema[key]:,}" for key, sign in SIGNS.items() if key in schema]
    return " ".join([WORDS.get(kind, kind), ", ".join(bounds)]).strip()


def _sections(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield every model below ``model``, with its dotted path; tasks are listed separately."""
    yield path, model
    for field in fields_of(model):
        if field.model and field.model is not TaskConfig:
            below = f"{path}.{field.name}".lstrip(".") + (".0" if field.many else "")
            yield from _sections(field.model, below)


if __name__ == "__main__":
    print(reference_page(), end="")
