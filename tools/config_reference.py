"""The reference of a run file's fields: `python -m tools.config_reference > docs/config.md`."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

from jinja2 import Environment
from pydantic import BaseModel

import titans_platform.objectives  # noqa: F401 - objectives register tasks of their own
from titans_platform.cli.init import fields_of
from titans_platform.config import RunConfig, TaskConfig
from titans_platform.tasks import TASKS

TEMPLATE = Path(__file__).with_suffix(".md")


def reference_page() -> str:
    """Render the Markdown page of every field of a run file, and every task with its options."""

    def about(kind: type) -> str:
        return cleandoc(kind.__doc__ or "").partition("\n\n")[0].replace("``", "`")

    sections, tasks = list(_sections(RunConfig, "")), sorted(TASKS.items())
    values = {"about": about, "fields_of": fields_of, "task": TaskConfig}
    template = Environment(trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE.read_text("utf-8"))
    return template.render(sections=sections, tasks=tasks, **values)


def _sections(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield every model below ``model``, with its dotted path; tasks are listed separately."""
    yield path, model
    for field in fields_of(model):
        if field.model and field.model is not TaskConfig:
            below = f"{path}.{field.name}".lstrip(".") + (".0" if field.many else "")
            yield from _sections(field.model, below)


if __name__ == "__main__":
    print(reference_page(), end="")
