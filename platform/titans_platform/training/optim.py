"""AdamW's parameter groups and the learning rate of a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import nn

from titans_platform.config import OptimConfig


class Grouped(Protocol):
    """A model that says which of its weights decay."""

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]: ...


SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done: 1 - done,
    "constant": lambda done: 1.0,
    "wsd": lambda done: min(1.0, 5 * (1 - done)),
}
"""From 1 at the end of the warm-up to 0 at the last step, by the share in [0, 1] of the steps between that
is done. wsd (warm-up, stable, decay) falls in a line over the last fifth of them."""


def learning_rate(step: int, cfg: OptimConfig) -> float:
    """Rate of optimiser step ``step`` (0 is the first): linear warm-up to lr, then ``cfg.schedule``.

    A schedule's 1 is lr and its 0 is min_lr_ratio * lr.
    """
    warmup = max(1, round(cfg.warmup_fraction * cfg.steps))
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, cfg.steps - 1 - warmup)
    high = SCHEDULES[cfg.schedule](min(1.0, done))
    return cfg.lr * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * high)


def adamw(model: nn.Module, cfg: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the model's own parameter groups: it knows which of its weights decay may pull on."""
    groups = cast(Grouped, model).parameter_groups(cfg.weight_decay)
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=1e-8, foreach=True)
