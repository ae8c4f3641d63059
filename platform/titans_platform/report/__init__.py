"""Tables, figures and pages of results, which are read and never computed here."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titans_platform.text import NONE, commit, count, number

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, **values: Any) -> str:
    """Render a template of ``templates/`` with these values, which are escaped in HTML only."""
    return _templates().get_template(template).render(**values)


@cache
def _templates() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, select_autoescape

    loader = FileSystemLoader(Path(__file__).parent / "templates")
    escaped = select_autoescape(["html"])
    environment = Environment(loader=loader, autoescape=escaped, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(number=number, count=count, commit=commit)
    environment.globals.update(none_sign=NONE)
    return environment
