"""Save and restore the state of the random number generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """The state of every generator a run draws from."""
    cuda = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    numpy = np.random.get_state(legacy=False)
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy, **cuda}


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore a state returned by `rng_state`."""
    torch.set_rng_state(state["torch"])
    random.setstate(_as_tuple(state["python"]))
    np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(v) for v in value) if isinstance(value, list | tuple) else value
