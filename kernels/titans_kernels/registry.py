"""Resolves the name of a component to its class: a built-in one, or any class by its import path."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

Kind = TypeVar("Kind")


def lazy_exports(package: str, names: Sequence[str], modules: str) -> Callable[[str], Any]:
    """A package's lazy ``__getattr__`` (PEP 562): imports ``modules`` in order until one defines the name."""

    def __getattr__(name: str) -> Any:
        for module in modules.split() if name in names else ():
            found = importlib.import_module(f"{package}.{module}")
            value = found if name == module else getattr(found, name, None)
            if value is not None:
                setattr(sys.modules[package], name, value)
                return value
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return __getattr__


def find_class(field: str, name: str, known: Mapping[str, type[Kind]], base: type[Kind]) -> type[Kind]:
    """The class registered as ``name``, or imported from a path ``package.module:Class``.

    Args:
        field: the config key, named in errors.
        name: a key of ``known``, or an import path.
        known: the registered classes by name.
        base: required base class.

    Raises:
        ValueError: there is no such subclass of ``base``; a one-line message that starts with ``field``.
    """
    if ":" not in name:
        if name in known:
            return known[name]
        hint = near(name, known) or "or name a class of your own by its import path, my_lab.parts:MyPart"
        raise ValueError(f"{field}: {name!r} is not one of {', '.join(known)}; {hint}")
    found = _imported(field, name)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{field}: {name} is not a subclass of {base.__module__}.{base.__name__}")
    return found


def source_file(path: str) -> Path | None:
    """The source file of an import path ``package.module:Class``; None for any other text."""
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", path):
        return None
    file = getattr(sys.modules.get(_imported("", path).__module__), "__file__", None)
    return Path(file) if file else None


def _imported(field: str, path: str) -> Any:
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{field}: {path}: {module_name!r} cannot be imported: {reason}") from error
    if not hasattr(module, name):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise ValueError(
            f"{field}: {path}: {module_name} has no {name!r}; {near(name, classes)}".rstrip("; ")
        )
    return getattr(module, name)


def near(word: str, known: Mapping[str, object] | list[str]) -> str:
    """`did you mean X?`, or an empty string if no known name is close."""
    close = difflib.get_close_matches(word, list(known), n=3, cutoff=0.5)
    # among equally close names prefer an anagram: mca is mac, not mal
    close.sort(key=lambda name: sorted(name) != sorted(word))
    return f"did you mean {close[0]}?" if close else ""
