"""From a YAML file and `a.b=c` overrides to a validated config; every mistake is one line with its fix."""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from titans_platform.config import RunConfig
from titans_platform.errors import UsageError, nearest

Model = TypeVar("Model", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """Safe YAML in which `4e-4` is a number and a key written twice is an error."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def _mapping_without_repeats(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.value in seen:
            raise yaml.constructor.ConstructorError(
                problem=f"key {key_node.value!r} is written twice", problem_mark=key_node.start_mark
            )
        seen.add(key_node.value)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping_without_repeats)


def load_config(path: Path | str, overrides: Iterable[str] = (), model: type[Model] = RunConfig) -> Model:
    """The config at ``path`` with ``overrides`` (``a.b=c``) applied. Raises UsageError."""
    mapping = read_yaml(Path(path))
    for override in overrides:
        apply_override(mapping, override)
    return validate(model, mapping)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping a YAML file holds; an empty file is an empty mapping. Raises UsageError."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file{_near_file(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {_one_line(error)}") from None
    value = parse_yaml(text, str(path))
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UsageError(f"{path}: should hold a mapping of keys to values, found a {type(value).__name__}")
    return value


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text; ``where`` names it in the error. Raises UsageError."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UsageError(f"{where}:{line} not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{where}: not valid YAML: {_one_line(error)}") from None


def apply_override(mapping: dict[str, Any], override: str) -> None:
    """Set one ``a.b=c`` in place: the value is YAML, a number among the keys is a place in a list."""
    dotted, equals, text = override.partition("=")
    dotted = dotted.strip()
    if not equals or not all(dotted.split(".")):
        raise UsageError(f"--set {override}: should be key=value, for example model.memory.depth=2")
    value = parse_yaml(text, f"--set {dotted}")
    *parents, last = dotted.split(".")
    holder: Any = mapping
    for depth, part in enumerate(parents):
        holder = _descend(holder, part, ".".join(parents[:depth]), dotted)
    if isinstance(holder, list):
        holder[_index(holder, last, ".".join(parents), dotted)] = value
    elif isinstance(holder, dict):
        holder[last] = value
    else:
        raise UsageError(f"--set {dotted}: {'.'.join(parents)} holds a value, not keys")


def _descend(holder: Any, part: str, at: str, dotted: str) -> Any:
    if isinstance(holder, list):
        return holder[_index(holder, part, at, dotted)]
    if not isinstance(holder, dict):
        raise UsageError(f"--set {dotted}: {at} holds a value, not keys")
    if part.isdigit() and part not in holder:
        raise UsageError(f"--set {dotted}: the config file gives no list at {at}; write it there first")
    if holder.get(part) is None:
        holder[part] = {}
    return holder[part]


def _index(items: list[Any], part: str, at: str, dotted: str) -> int:
    if not part.isdigit() or int(part) >= len(items):
        raise UsageError(
            f"--set {dotted}: {at} is a list of {len(items)}; give a place from 0 on, not {part!r}"
        )
    return int(part)


def validate(model: type[Model], mapping: Mapping[str, Any], where: str = "") -> Model:
    """``mapping`` as a ``model``; ``where`` is put before field names. Raises UsageError with one line.

    The mapping goes through JSON, where pydantic's strict mode takes lists for tuples and still refuses
    a string for a number.
    """
    try:
        text = json.dumps(mapping, allow_nan=False, default=str)
    except ValueError:
        raise UsageError(f"{where or 'config'}: .nan and .inf are not values a config can hold") from None
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        # a list whose only element is wrong is also reported as too short
        others = [other for other in others if other["loc"] != first["loc"][: len(other["loc"])]]
        more = f" (and {len(others)} more)" if others else ""
        raise UsageError(_explain(model, dict(first), where) + more) from None


def _explain(model: type[BaseModel], error: dict[str, Any], where: str) -> str:
    loc = error["loc"]
    field = ".".join([where] * bool(where) + [str(part) for part in loc])
    if error["type"] == "extra_forbidden":
        return f"{field}: unknown key; {nearest(str(loc[-1]), _valid_keys(model, loc[:-1]))}"
    if error["type"] == "missing":
        return f"{field}: missing; the config has to give it"
    if error["type"] == "value_error":
        message = str(error["ctx"]["error"])
        return f"{field}.{message}" if field else message
    message = error["msg"].replace("Input should be", "should be")
    return f"{field or 'config'}: {message}, got {json.dumps(error['input'], default=str)[:60]}"


def _valid_keys(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    annotation: Any = model
    for part in loc:
        annotation = _inside(annotation, part)
    annotation = _model_of(annotation)
    return list(annotation.model_fields) if annotation else []


def _inside(annotation: Any, part: int | str) -> Any:
    holder = _model_of(annotation)
    if holder is not None:
        field = holder.model_fields.get(str(part))
        return field.annotation if field else None
    arguments = [a for a in typing.get_args(_plain(annotation)) if a is not Ellipsis]
    return arguments[-1] if arguments else None


def _model_of(annotation: Any) -> type[BaseModel] | None:
    annotation = _plain(annotation)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _plain(annotation: Any) -> Any:
    """The annotation without Annotated and without `| None`."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _plain(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return _plain(next(a for a in typing.get_args(annotation) if a is not type(None)))
    return annotation


def _near_file(path: Path) -> str:
    folder = path.parent
    names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {folder / close[0]}?" if close else ""


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
