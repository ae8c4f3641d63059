"""The HTML pages of this folder, which need nothing beside them."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from titans_platform.report.picture import DARK, LIGHT
from titans_platform.text import commit, count, number


def render(template: str, **values: Any) -> str:
    """A page or a part of one; each knows the palettes and the time beside ``values``."""
    written = time.strftime("%-d %B %Y, %H:%M UTC", time.gmtime())
    return _templates().get_template(template).render(light=LIGHT, dark=DARK, written=written, **values)


@cache
def _templates() -> Environment:
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(number=number, count=count, commit=commit)
    return environment
