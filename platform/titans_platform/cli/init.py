"""`titans init`: a starter run file that explains every field, generated from the config models."""

from __future__ import annotations

import os
import re
import shlex
import textwrap
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import yaml
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from titans_platform.cli import file_type
from titans_platform.errors import UsageError
from titans_platform.text import render

if TYPE_CHECKING:
    from titans_platform.config import RunConfig

STARTER = Path(__file__).with_name("init.yaml")
WIDTH = 100
SMALL = 2**20
"""Bytes of text that are read whole."""


@click.command()
@click.argument("path", default="run.yaml", type=file_type)
@click.option("--data", metavar="FILE", help="Text: file, folder, glob or URL  [default: the shipped corpus]")
@click.option("--preset", default="laptop", help="Size of the model.")
@click.option("--force", is_flag=True, help="Overwrite PATH if it exists.")
def init(path: Path, data: str | None, preset: str, force: bool) -> None:
    """Write a run file, ready to train, that lists every field with its default and meaning.

    \b
    Example:
      titans init run.yaml --data book.txt
      titans train run.yaml
    """
    if path.exists() and not force:
        raise UsageError(f"{path} exists already; --force overwrites it")
    text = run_file(data, preset)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
    click.echo(f"{path}: train it with `titans train {shlex.quote(str(path))}`")


def run_file(data: str | None, preset: str) -> str:
    """Return the YAML text of a run on the text at ``data``. Raises UsageError: no such text or preset."""
    from titans_core.presets import SIZES
    from titans_platform.config import RunConfig
    from titans_platform.loading import complete, parse_yaml, validate

    path = data if not data or "://" in data else os.path.abspath(os.path.expanduser(data))
    length = 4 * SIZES[preset].window if preset in SIZES else 128
    settings = parse_yaml(render(STARTER, path=path, preset=preset, length=length), STARTER.name)
    config = validate(RunConfig, complete(settings, fit=False))
    if data:
        _check_text(config)
    return "\n".join([
        "# Config of a `titans train` run. Commented lines show the defaults: uncomment a line to change it.",
        "# Tasks and their options: docs/config.md.",
        *_section(config, settings), "",
    ])  # fmt: skip


def _check_text(config: RunConfig) -> None:
    """Read the text as training does: a small one whole, of a large one the beginning. Raises UsageError."""
    from titans_platform.data import prepare
    from titans_platform.data.sources import FilesSource

    with TemporaryDirectory(prefix="titans-init-") as folder:
        try:
            source = FilesSource(config.data.sources[0], "data.sources.0", Path(folder))
            if sum(file.bytes for file in source.files()) > SMALL:
                next(source.documents(), None)
            else:
                prepared = prepare(config.data, Path(folder))
                prepared.train_stream(config)
                prepared.validation(1)
        except UsageError as error:
            raise UsageError(re.sub(r"^(data\.sources\.0(\.path)?: )?", "--data: ", str(error))) from None


def _section(config: BaseModel, settings: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Yield the fields of a model as YAML: the ones in ``settings`` set, the others as comments."""
    for key in (key for key in settings if key not in type(config).model_fields):
        yield f"{indent}{key}: {_yaml(settings[key])}"
    for field in fields_of(type(config)):
        value = getattr(config, field.name)
        if field.description:
            yield from ("", *_comment(field.description, f"{indent}# ", WIDTH - len(indent)))
        if field.model and field.many and field.name in settings:
            yield f"{indent}{field.name}:"
            for key in (entries := settings[field.name]):
                named = isinstance(entries, Mapping)
                yield f"{indent}  {key}: {_yaml(entries[key])}" if named else f"{indent}  - {_yaml(key)}"
            yield f"{indent}    # an entry may also have:"
            for option in (option for option in fields_of(field.model) if option.default is not None):
                yield f"{indent}    #   {option.name}: {option.default}"
                yield from _comment(option.description, f"{indent}    #       ", WIDTH - 14)
        elif field.model and not field.many:
            yield f"{indent}{field.name}:"
            yield from _section(value, settings.get(field.name, {}), indent + "  ")
        else:
            mark = "" if field.name in settings else "# "
            fitted = "preset" in settings and field.name == "mlp_expansion" and mark
            value = settings.get(field.name, value)
            shown = "fitted to the variant by the preset" if fitted else _yaml(value)
            yield f"{indent}{mark}{field.name}: {shown}"


def _comment(description: str, start: str, width: int) -> Iterator[str]:
    return (start + line for line in textwrap.wrap(description.replace("`", ""), width))


class ConfigField(NamedTuple):
    """One field of a config model."""

    name: str
    default: str | None
    """As YAML; None if the field is required."""
    description: str
    model: type[BaseModel] | None
    """The nested model of a section, or of a list of sections."""
    many: bool


def fields_of(model: type[BaseModel]) -> list[ConfigField]:
    """Return the fields of a model, in order."""
    fields = []
    for name, info in model.model_fields.items():
        nested, many = _model_in(info.annotation)
        default = None if info.is_required() else _yaml(info.get_default(call_default_factory=True))
        description = info.description or ""
        if nested and not description:
            description = (nested.__doc__ or "").partition("\n\n")[0]
        # docstrings quote code as reStructuredText does
        description = " ".join(description.split()).replace("``", "`")
        fields.append(ConfigField(name, default, description, nested, many))
    return fields


def _model_in(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    model = next(filter(None, (_model_in(inner)[0] for inner in typing.get_args(annotation))), None)
    return model, model is not None


def _yaml(value: Any) -> str:
    text = yaml.safe_dump(to_jsonable_python(value), default_flow_style=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...").strip()
