"""Learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable

from titans_platform.config import OptimConfig

SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done: 1 - done,
    "constant": lambda done: 1.0,
    "wsd": lambda done: min(1.0, 5 * (1 - done)),
    "halving": lambda done: 0.5 ** int(10 * done),
}
"""Schedules from 1 at the end of the warm-up to 0 at the last step, as functions of the fraction in [0, 1] of
these steps that is done. wsd (warm-up, stable, decay) decays linearly over the last fifth. halving is what
the forecasting literature calls type1, for ten epochs."""


def learning_rate(step: int, cfg: OptimConfig) -> float:
    """Learning rate of optimiser step ``step`` (0 is the first): linear warm-up to lr, then ``cfg.schedule``,
    scaled so that 1 is lr and 0 is min_lr_ratio * lr.
    """
    warmup = warmup_steps(cfg)
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, cfg.steps - 1 - warmup)
    high = SCHEDULES[cfg.schedule](min(1.0, done))
    return cfg.lr * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * high)


def warmup_steps(cfg: OptimConfig) -> int:
    """Number of warm-up steps; the last of them has the full learning rate."""
    given = cfg.warmup_steps
    return max(1, round(cfg.warmup_fraction * cfg.steps) if given is None else given)


def equal_rates(one: OptimConfig, other: OptimConfig) -> int:
    """Number of initial steps that have the same learning rate in both configs."""
    both = min(one.steps, other.steps)
    return next((s for s in range(both) if learning_rate(s, one) != learning_rate(s, other)), both)


def before_decay(cfg: OptimConfig) -> int | None:
    """Number of steps before a wsd run decays, from where it can be extended; None for other schedules."""
    if cfg.schedule != "wsd":
        return None
    return next((s for s in range(warmup_steps(cfg), cfg.steps) if learning_rate(s, cfg) < cfg.lr), None)
