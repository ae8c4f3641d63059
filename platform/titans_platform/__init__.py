"""Data, training, tuning, tracking, evaluation and the command line around `titans_core`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titans_platform.runs.load import load_run

__all__ = ["load_run"]


def __getattr__(name: str) -> Any:
    if name != "load_run":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # imported on first use: it brings torch, and `titans --help` answers at once
    from titans_platform.runs.load import load_run

    return load_run
