"""`Registry`: the classes behind the names of a config, built-in ones and any class by its import path."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

Kind = TypeVar("Kind")
EXAMPLE = "my_lab.parts:MyPart"


def lazy_exports(package: str, names: Sequence[str], modules: str) -> Callable[[str], Any]:
    """Return a package's lazy ``__getattr__`` (PEP 562): imports ``modules`` until one defines the name."""

    def __getattr__(name: str) -> Any:
        for module in modules.split() if name in names else ():
            imported = importlib.import_module(f"{package}.{module}")
            value = imported if name == module else getattr(imported, name, None)
            if value is not None:
                setattr(sys.modules[package], name, value)
                return value
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return __getattr__


class Registry(MutableMapping[str, type[Kind]]):
    """Classes of one kind by name; a line is a name and an import path ``package.module:Class``.

    A module is imported when its class is first used. A class without a line is found by its import path.
    """

    def __init__(
        self, key: str, base: type[Kind], lines: Mapping[str, str], error: type[Exception] = ValueError
    ):
        """``key`` is the config key that names such a class, ``base`` their base class."""
        self.key, self.base, self.error = key, base, error
        self._lines: dict[str, str | type[Kind]] = dict(lines)

    def find(self, name: str, key: str | None = None) -> type[Kind]:
        """Return the class registered as ``name``, or imported from a path ``package.module:Class``.

        Raises:
            ValueError: (or ``error``) there is no such subclass of ``base``, or it is abstract; a one-line
                message that starts with ``key``.
        """
        key, line = key or self.key, self._lines.get(name, name)
        try:
            if isinstance(line, str) and ":" not in line:
                known = f"one of {', '.join(self)}; or" if self._lines else "an import path;"
                hint = f"{known} name a class of your own by its import path, {EXAMPLE}"
                if close := near(name, self._lines):
                    hint = f"one of {', '.join(self)}; {close}"
                raise ValueError(f"{key}: {name!r} is not {hint}")
            kind = _imported(key, line) if isinstance(line, str) else line
            if not (isinstance(kind, type) and issubclass(kind, self.base)):
                base = f"{self.base.__module__}.{self.base.__name__}"
                raise ValueError(f"{key}: {name} is not a subclass of {base}")
            if missing := sorted(getattr(kind, "__abstractmethods__", ())):
                names, base_name = ", ".join(missing), self.base.__name__.lower()
                raise ValueError(f"{key}: {name} does not define {names}, which a {base_name} must")
        except ValueError as error:
            raise self.error(str(error)) from error.__cause__
        return kind

    def __getitem__(self, name: str) -> type[Kind]:
        if name not in self._lines:
            raise KeyError(name)
        return self.find(name)

    def __setitem__(self, name: str, kind: type[Kind] | str) -> None:
        self._lines[name] = kind

    def __delitem__(self, name: str) -> None:
        del self._lines[name]

    def __contains__(self, name: object) -> bool:
        return name in self._lines

    def __iter__(self) -> Iterator[str]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)


def source_file(path: str) -> Path | None:
    """Return the source file of an import path ``package.module:Class``; None for any other text.

    Parameters in parentheses may follow, as in `find_rule`.
    """
    match = re.fullmatch(r"([A-Za-z_][\w.]*:[A-Za-z_]\w*)(\(.*\))?", path)
    if match is None:
        return None
    file = getattr(sys.modules.get(_imported("", match[1]).__module__), "__file__", None)
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
