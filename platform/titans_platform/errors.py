"""Errors that a user can fix: each is one line that names what is wrong and the fix."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from titans_kernels.registry import near

TRAIN = (
    "click", "datasets", "filelock", "jinja2", "matplotlib", "mlflow", "optuna", "pandas", "psutil",
    "pyarrow", "ray", "rich", "scipy", "sentencepiece", "tokenizers", "yaml",
)  # fmt: skip
"""Packages of the extra `train`, which the platform needs and the models do not."""


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
    """Storage that is full, slow or gone, for longer than a run retries. Exit code 3."""

    exit_code = 3


class NotWritable(TitansError):
    """Storage that is read-only or needs permission: retrying does not help. Exit code 3."""

    exit_code = 3


class Interrupted(TitansError):
    """The run was interrupted, and has written a checkpoint. Exit code 130."""

    exit_code = 130


def missing_extra(error: Exception) -> str | None:
    """Return the line that names a missing package of the extra `train`; None for any other error."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return f"{name} is not installed; pip install 'titans-lab[train]'" if name in TRAIN else None


def one_line(error: BaseException, most: int = 300) -> str:
    """Return the message of a library's error on one line, cut to ``most`` characters."""
    return textwrap.shorten(str(error), most, placeholder=" ...") or type(error).__name__


@contextmanager
def within(place: str, kind: type[Exception] = UsageError, sep: str = ".") -> Iterator[None]:
    """Raise errors of type ``kind`` as UsageErrors that begin with ``place``, a field of the config."""
    try:
        yield
    except kind as error:
        raise UsageError(f"{place}{sep}{error}") from None


def nearest(word: str, valid: Iterable[str], otherwise: str = "") -> str:
    """Return a hint for an error: `did you mean x?`; if no valid word is near, ``otherwise`` or all."""
    valid = list(valid)
    return near(word, valid) or otherwise or f"valid: {', '.join(valid) or 'none'}"
