"""Errors that a user can fix: each is one line that names what is wrong and the fix."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

Kind = TypeVar("Kind")


class TitansError(Exception):
    """An error that is shown as one line, without a traceback. Exit code 1."""

    exit_code = 1


class UsageError(TitansError):
    """Bad input: a config, a path, a shard, a checkpoint, a store. Exit code 2."""

    exit_code = 2


class ClusterError(TitansError):
    """A cluster that cannot be reached, or refuses the token. Exit code 3."""

    exit_code = 3


class StorageError(TitansError):
    """Storage that is full, slow or gone, for longer than a run waits for it. Exit code 3."""

    exit_code = 3


class Interrupted(TitansError):
    """The run was asked to end, and has, at a checkpoint. Exit code 130."""

    exit_code = 130


def one_line(error: BaseException, most: int = 300) -> str:
    """What an error of somebody else's code says, as a part of a line of ours of ``most`` characters."""
    return textwrap.shorten(str(error), most, placeholder=" ...") or type(error).__name__


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


def find_named(field: str, name: str, known: Mapping[str, type[Kind]], base: type[Kind]) -> type[Kind]:
    """The class of a name in ``known``, or at an import path ``package.module:Class``.

    Modules of the current directory are found too. Raises UsageError that begins with ``field``.
    """
    # brings torch with it, which --help need not wait for
    from titans_kernels.registry import find_class

    try:
        return find_class(field, name, known, base)
    except ValueError as error:
        raise UsageError(str(error)) from None
