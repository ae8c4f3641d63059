"""From a YAML file and `a.b=c` overrides to a validated config; every mistake is one line with its fix."""

from __future__ import annotations

import copy
import difflib
import json
import math
import os
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from titans_core.config import ModelConfig
from titans_platform.config import VOCABULARIES, RunConfig
from titans_platform.errors import UsageError, nearest, one_line, within
from titans_platform.provenance import shipped

Model = TypeVar("Model", bound=BaseModel)


# libyaml is ten times as fast; some builds of PyYAML lack it
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):
    """Safe YAML in which `4e-4` is a number, a number as a key is text, a key written twice an error."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def _mapping_of_names(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.value in seen:
            problem = f"key {key_node.value!r} is written twice"
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        seen.add(key_node.value)
        if key_node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
            key_node.tag = "tag:yaml.org,2002:str"
    # after the check: what `<<` merges in may be overridden
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping_of_names)


def load_config(path: Path | str, overrides: Iterable[str] = ()) -> RunConfig:
    """Load the run's config at ``path`` with ``overrides`` (``a.b=c``) applied. Raises UsageError."""
    if not (mapping := read_yaml(Path(path))):
        raise UsageError(f"{path}: is empty; `titans init {path} --force` writes a run file")
    return config_from(mapping, overrides)


def config_from(mapping: dict[str, Any], overrides: Iterable[str] = ()) -> RunConfig:
    """Validate the config of a mapping, with ``overrides`` applied. Raises UsageError."""
    for override in overrides:
        apply_override(mapping, override)
    return validate(RunConfig, complete(mapping))


def complete(mapping: Mapping[str, Any], fit: bool = True) -> dict[str, Any]:
    """Fill in the derived fields of a RunConfig's mapping.

    A section that is present but empty, as YAML's `memory:` alone, is one at its defaults. ``model.preset``
    is replaced by its fields; fields given with it override them. ``model.vocab_size`` defaults to a built-in
    tokenizer's. With ``fit`` false the preset is not fitted to the variant, which needs torch. Raises
    UsageError.
    """
    mapping = _without_empty(RunConfig, mapping)
    model, data = (mapping.get(part, {}) for part in ("model", "data"))
    if not isinstance(model, Mapping):
        return dict(mapping)  # rejected by `validate`, which rejects `data` after the preset
    model = dict(model)
    tokenizer = data.get("tokenizer", "byte") if isinstance(data, Mapping) else "byte"
    if (ids := VOCABULARIES.get(str(tokenizer))) is not None:
        model.setdefault("vocab_size", ids)
    if "preset" in model:
        model = _write_out_preset(str(model.pop("preset")), model, fit)
    return {**mapping, "model": model}


def _without_empty(model: type[BaseModel], mapping: Mapping[str, Any]) -> dict[str, Any]:
    kept = {}
    for key, value in mapping.items():
        section = _model_at(model, [key])
        if value is not None or not section:
            kept[key] = _without_empty(section, value) if section and isinstance(value, Mapping) else value
    return kept


def _write_out_preset(name: str, model: dict[str, Any], fit: bool) -> dict[str, Any]:
    from titans_core.presets import SIZES, preset, size_config

    if name not in SIZES:
        raise UsageError(f"model.preset: no preset {name!r}; {nearest(name, SIZES)}")
    # a size has the same parameter count for all variants, so its widths depend on the variant
    chosen = {key: model[key] for key in ("variant", "vocab_size", "options") if key in model}
    validate(ModelConfig, chosen, "model")
    with within("model", ValueError):
        config = preset(name, **chosen) if fit else size_config(name, chosen.get("vocab_size"))
    return overlay(config.model_dump(mode="json"), model)


NAMED = {"axes", "columns", "points", "rows", "scales", "space"}
"""Fields that map names to values: a dot in such a name does not separate fields."""


def overlay(below: Mapping[str, Any], above: Mapping[str, Any], dotted: bool = True) -> dict[str, Any]:
    """``above`` merged into ``below``: mappings recursively, other values replaced.

    With ``dotted`` a key may be a path, such as ``optim.lr``; the keys of a field in NAMED are names.
    """
    merged = copy.deepcopy(dict(below))
    for path, value in above.items():
        key, _, rest = path.partition(".") if dotted else (path, "", "")
        value = {rest: value} if rest else value
        under = merged.get(key)
        if isinstance(value, Mapping):
            split = bool(rest) or key not in NAMED
            merged[key] = overlay(under if isinstance(under, Mapping) else {}, value, split)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the mapping of a YAML file; an empty file is an empty mapping. Raises UsageError."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file{_near_file(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {one_line(error)}") from None
    if (value := parse_yaml(text, str(path))) is None:
        return {}
    if not isinstance(value, dict):
        raise UsageError(f"{path}: should hold a mapping of keys to values, found a {type(value).__name__}")
    return value


def known_files(folder: str, pattern: str = "*.yaml") -> dict[str, Path]:
    """Return the YAML files that can be given by name: of ``folder`` here, then the shipped ones."""
    files: dict[str, Path] = {}
    for place in (Path.cwd(), shipped()):
        for path in sorted((place / folder).glob(pattern)):
            files.setdefault(path.stem if pattern == "*.yaml" else path.parent.name, path)
    return files


def file_at(name: str, kind: str) -> Path | None:
    """Return the YAML file at the path ``name``; None if it is a plain name. Raises UsageError: no file."""
    if not name.endswith((".yaml", ".yml")) and os.sep not in name:
        return None
    if not Path(name).is_file():
        raise UsageError(f"{kind}: no file {name}")
    return Path(name)


def parse_yaml(text: str, where: str) -> Any:
    """Parse a YAML text; ``where`` names it in the error. Raises UsageError."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        # libyaml puts what is missing at the end on the line after it
        mark, lines = error.problem_mark, max(1, len(text.splitlines()))
        line = f" line {min(mark.line + 1, lines)}" if mark else ""
        raise UsageError(f"{where}:{line} not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{where}: not valid YAML: {one_line(error)}") from None


def apply_override(mapping: dict[str, Any], override: str) -> None:
    """Set one ``a.b=c`` in place: the value is YAML, an integer key is a list index."""
    dotted, equals, text = override.partition("=")
    keys = (dotted := dotted.strip()).split(".")
    if not equals or not all(keys):
        raise UsageError(f"--set {override}: should be key=value, for example model.memory.depth=2")
    value = parse_yaml(text, f"--set {dotted}")
    if value is None and (section := _model_at(RunConfig, keys)):
        fields = ", ".join(f"{dotted}.{name}" for name in list(section.model_fields)[:3])
        raise UsageError(f"--set {dotted}: is a section, which cannot be null; set its fields: {fields}, ...")
    holder: Any = mapping
    for depth, key in enumerate(keys):
        at = ".".join(keys[:depth])
        place = _key_in(holder, key, at, dotted)
        if depth == len(keys) - 1:
            holder[place] = value
        elif isinstance(holder, dict) and holder.get(key) is None:
            if key.isdigit() and key not in holder:
                raise UsageError(f"--set {dotted}: the config file has no list at {at}; add it there first")
            holder[key] = {}
        holder = holder[place]


def _key_in(holder: Any, key: str, at: str, dotted: str) -> str | int:
    """Return the key or the index that ``key`` means in ``holder``, the mapping or list at ``at``."""
    if isinstance(holder, dict):
        return key
    if not isinstance(holder, list):
        raise UsageError(f"--set {dotted}: {at} is a value, not a section")
    if not key.isdigit() or int(key) >= len(holder):
        cause = f"{at} is a list of length {len(holder)}"
        raise UsageError(f"--set {dotted}: {cause}; give an index from 0, not {key!r}")
    return int(key)


def validate(model: type[Model], mapping: Mapping[str, Any], where: str = "") -> Model:
    """Validate ``mapping`` as a ``model``; ``where`` precedes field names. Raises UsageError of one line.

    The mapping goes through JSON, where pydantic's strict mode takes lists for tuples and still refuses
    a string for a number.
    """
    try:
        return model.model_validate_json(json.dumps(mapping, default=str))
    except ValidationError as error:
        first, *others = _without_consequences(error.errors(include_url=False))
        more = f" (and {len(others)} more)" if others else ""
        raise UsageError(_explain(model, first, where) + more) from None


def _without_consequences(errors: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the errors that do not follow from another.

    A required key may be missing since it is misspelt, and a list whose only element is wrong is reported as
    too short.
    """
    errors = [dict(error) for error in errors]
    if any(error["type"] == "extra_forbidden" for error in errors):
        errors = [error for error in errors if error["type"] != "missing"]
    first = errors[0]["loc"]
    return errors[:1] + [error for error in errors[1:] if error["loc"] != first[: len(error["loc"])]]


def _explain(model: type[BaseModel], error: dict[str, Any], where: str) -> str:
    loc, value = error["loc"], error["input"]
    field = ".".join(map(str, ([where] if where else []) + list(loc)))
    if isinstance(value, float) and not math.isfinite(value):
        return f"{field}: .nan and .inf are not allowed; give a finite number"
    if error["type"] == "extra_forbidden":
        known = list(getattr(_model_at(model, loc[:-1]), "model_fields", []))
        return f"{field}: unknown key; {nearest(str(loc[-1]), known)}"
    if error["type"] == "missing":
        return f"{field}: missing; the config must set it"
    if error["type"] == "value_error":
        message = str(error["ctx"]["error"])
        # a model's validator begins its message with the field, a field's validator does not
        joint = "." if _model_at(model, loc) else ": "
        return f"{field}{joint}{message}" if field else message
    message = re.sub("^(Input|Tuple) should", "should", error["msg"]).partition(" after validation")[0]
    return f"{field or 'config'}: {message}, got {json.dumps(value, default=str)[:60]}"


def _model_at(annotation: Any, loc: Sequence[int | str]) -> type[BaseModel] | None:
    """Return the model at ``loc`` below an annotation; None if there is no model."""
    annotation = _plain(annotation)
    model = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
    if not loc:
        return model
    if model is not None:
        field = model.model_fields.get(str(loc[0]))
        below = field.annotation if field else None
    else:
        below = next((a for a in reversed(typing.get_args(annotation)) if a is not Ellipsis), None)
    return _model_at(below, loc[1:])


def _plain(annotation: Any) -> Any:
    """Strip Annotated and `| None` from an annotation."""
    if typing.get_origin(annotation) in (typing.Annotated, typing.Union, types.UnionType):
        return _plain(next(a for a in typing.get_args(annotation) if a is not type(None)))
    return annotation


def _near_file(path: Path) -> str:
    folder = path.parent
    # by stems: every .json is near to every other
    names = {p.stem: p.name for p in folder.glob("*")}
    close = difflib.get_close_matches(path.stem, names, n=1)
    return f"; did you mean {folder / names[close[0]]}?" if close else ""
