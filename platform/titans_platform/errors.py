"""Failures a person can mend: each is one line that names what is wrong and the fix."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class TitansError(Exception):
    """Something went wrong that a person should read without a traceback. Exit code 1."""

    exit_code = 1


class UsageError(TitansError):
    """Bad input: a config, a path, a shard, a checkpoint, a store. Exit code 2."""

    exit_code = 2


class ClusterError(TitansError):
    """A cluster that cannot be reached, or refuses the token. Exit code 3."""

    exit_code = 3


class IncompleteError(TitansError):
    """A study that ended with cells missing. Exit code 4."""

    exit_code = 4


@contextmanager
def within(field: str) -> Iterator[None]:
    """Put where we are in the config before what a UsageError says."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{field}.{error}") from None


def nearest(word: str, valid: Iterable[str], otherwise: str = "") -> str:
    """The end of an error: `did you mean x?`, or ``otherwise``, or the valid words, where none is near."""
    valid = list(valid)
    close = difflib.get_close_matches(word, valid, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else otherwise or f"valid: {', '.join(valid) or 'none'}"


def import_object(path: str, field: str) -> Any:
    """What an import path ``package.module:name`` names. Raises UsageError that begins with ``field``."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, ValueError) as error:
        raise UsageError(f"{field}: {path} cannot be imported: {error}") from None
    except AttributeError:
        raise UsageError(f"{field}: module {module} has no {name!r}") from None
