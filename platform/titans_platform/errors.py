"""Failures a person can mend: each is one line that names what is wrong and the fix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


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
