"""AdamW's parameter groups and the learning rate of a step."""

from __future__ import annotations

import math
from typing import Any, Protocol, cast

import torch
from torch import nn

from titans_platform.config import OptimConfig


class Grouped(Protocol):
    """A model that says which of its weights decay."""

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]: ...


def learning_rate(step: int, cfg: OptimConfig) -> float:
    """Rate of optimiser step ``step`` (0 is the first): linear warm-up, then cosine to min_lr_ratio."""
    warmup = max(1, round(cfg.warmup_fraction * cfg.steps))
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, cfg.steps - 1 - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return cfg.lr * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * cosine)


def adamw(model: nn.Module, cfg: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the model's own parameter groups: it knows which of its weights decay may pull on."""
    groups = cast(Grouped, model).parameter_groups(cfg.weight_decay)
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=1e-8, foreach=True)
