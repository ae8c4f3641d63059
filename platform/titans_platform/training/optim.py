"""The optimiser, its learning-rate schedules, the attention windows of a step, and steps that diverged."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from titans_core import Model
from titans_core.interventions import Intervention, intervene, longest_window
from titans_platform.config import OptimConfig
from titans_platform.data.stream import uniform
from titans_platform.errors import TitansError, UsageError, within


def adamw(model: Model, cfg: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the model's own parameter groups: the model decides which weights have weight decay."""
    groups = model.parameter_groups(cfg.weight_decay)
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=1e-8, fused=True)


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
    """Return the learning rate of optimiser step ``step`` (0 is the first).

    Linear warm-up to lr, then ``cfg.schedule``, scaled so that 1 is lr and 0 is min_lr_ratio * lr.
    """
    warmup = warmup_steps(cfg)
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, cfg.steps - 1 - warmup)
    return cfg.lr * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * SCHEDULES[cfg.schedule](min(1.0, done)))


def warmup_steps(cfg: OptimConfig) -> int:
    """Return the number of warm-up steps; the last of them has the full learning rate."""
    configured = cfg.warmup_steps
    return max(1, round(cfg.warmup_fraction * cfg.steps) if configured is None else configured)


def equal_steps(one: OptimConfig, other: OptimConfig, seed: int) -> int:
    """Return the number of initial steps that have the same learning rate and window in both configs."""

    def differ(step: int) -> bool:
        if learning_rate(step, one) != learning_rate(step, other):
            return True
        return drawn_window(one, seed, step) != drawn_window(other, seed, step)

    both = min(one.steps, other.steps)
    return next(filter(differ, range(both)), both)


def before_decay(cfg: OptimConfig) -> int | None:
    """Return the number of steps before a wsd run decays, from where it can be extended; None for others."""
    if cfg.schedule != "wsd":
        return None
    return next((s for s in range(warmup_steps(cfg), cfg.steps) if learning_rate(s, cfg) < cfg.lr), None)


class Diverged(TitansError):
    """The loss or its gradient is not finite. Deterministic: a retry would fail too."""


def save_batch(folder: Path, batch: Any, step: int, rank: int, error: Diverged) -> str:
    """Save this rank's part of the batch as safetensors, with step and error. Returns a message."""
    from safetensors.torch import save_file

    path = folder / f"step-{step:08d}-rank{rank}.safetensors"
    metadata = {"step": str(step), "error": str(error)}
    tensors = {name: part.detach().cpu().contiguous() for name, part in batch._asdict().items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata)
    except OSError as failed:
        return f"its batch could not be saved in {folder}: {failed.strerror}"
    return f"its batch is in {path}"


def drawn_window(cfg: OptimConfig, seed: int, step: int) -> int | None:
    """Attention's window at optimiser step ``step`` (0 is the first); None: the model's own.

    One of ``cfg.windows``, all equally likely; in the last tenth of the steps the longest (SWAX, arXiv
    2509.24552). A function of the seed and the step only.
    """
    if not cfg.windows:
        return None
    if step >= 0.9 * cfg.steps:
        return max(cfg.windows)
    return cfg.windows[int(uniform(1, f"{seed}/window/{step}")[0] * len(cfg.windows))]


def check_windows(model: nn.Module, cfg: OptimConfig) -> None:
    """Reject windows that the model cannot take. Raises UsageError."""
    longest = longest_window(model)
    for window in cfg.windows:
        if longest is None:
            raise UsageError("optim.windows: the model has no attention window; set model.attention.window")
        with within("optim.windows", ValueError, ": "), intervene(model, Intervention(window=window)):
            pass
    if cfg.windows and max(cfg.windows) != longest:
        used = f"the longest is {max(cfg.windows)}, but the model is evaluated with {longest}"
        raise UsageError(f"optim.windows: {used}; add it to the list")
