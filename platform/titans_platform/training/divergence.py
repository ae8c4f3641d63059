"""When the loss or its gradient is no number, or the loss leaps: how it is seen, and which batch."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median
from typing import Any

from titans_platform.errors import TitansError

WINDOW = 64
"""Steps whose losses a spike is measured by."""
JUDGED_FROM = 16
"""Steps that there must have been before a loss can be a spike: the first ones fall steeply."""
SKIPS = 10
"""Batches in a row that may be left out; after that it is not the batch that is at fault."""
REWINDS = 3
"""Times that a run goes back to a checkpoint before it stops."""


class Diverged(TitansError):
    """The loss or its gradient stopped being a number, or the loss leapt. Another try would do the same."""

    loss = norm = math.nan


def judge(loss: float, norm: float, recent: list[float], spike: float | None) -> str | None:
    """What is wrong with a step's loss and gradient norm, after steps with ``recent`` losses; None: nothing.

    All workers find the same: both numbers are sums over workers.
    """
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return f"loss {loss:.4g}, gradient norm {norm:.4g}"
    if spike is None or len(recent) < JUDGED_FROM:
        return None
    usual = median(recent)
    if 0 < spike * usual < loss:
        return f"loss {loss:.4g} after a median of {usual:.4g}, gradient norm {norm:.4g}"
    return None


def save_batch(folder: Path, batch: Any, step: int, rank: int, error: Diverged) -> str:
    """Write a worker's part of the batch as safetensors, with step, loss and norm; a line that says where."""
    from safetensors.torch import save_file

    path = folder / f"step-{step:08d}-rank{rank}.safetensors"
    about = {"step": str(step), "loss": repr(error.loss), "grad_norm": repr(error.norm)}
    tensors = {name: part.detach().cpu().contiguous() for name, part in batch._asdict().items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, about)
    except OSError as failed:
        return f"its batch could not be saved in {folder}: {failed.strerror}"
    return f"its batch is in {path}"
