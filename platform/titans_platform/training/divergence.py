"""Divergence: detect a loss or gradient that is not finite, or a loss spike, and save the batch."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median
from typing import Any

from titans_platform.errors import TitansError

WINDOW = 64
"""Number of recent losses whose median a spike is measured against."""
JUDGED_FROM = 16
"""Minimum number of recent losses to detect a spike: the loss falls steeply in the first steps."""
SKIPS = 10
"""Maximum number of consecutive batches to skip; beyond it the batch is not the cause."""
REWINDS = 3
"""Maximum number of rewinds to a checkpoint before a run stops."""


class Diverged(TitansError):
    """The loss or its gradient is not finite, or the loss spiked. Deterministic: a retry would fail too."""

    loss = norm = math.nan


def judge(loss: float, norm: float, recent: list[float], spike: float | None) -> str | None:
    """Why a step has diverged, given its loss, gradient norm and the ``recent`` losses; None if it has not.

    All ranks agree, because both numbers are reduced over ranks.
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
    """Save this rank's part of the batch as safetensors, with step, loss and norm. Returns a message."""
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
