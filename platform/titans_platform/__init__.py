"""Data, training, tuning, tracking, evaluation and the command line around `titans_core`."""

from typing import TYPE_CHECKING

from titans_kernels.registry import lazy_exports

if TYPE_CHECKING:
    from titans_platform.runs.load import load_run

__all__ = ["load_run"]

# imported on first use: it brings torch, and `titans --help` answers at once
__getattr__ = lazy_exports("titans_platform", __all__, "runs.load")
