"""AdamW's parameter groups and the learning rate of a step."""

from __future__ import annotations

import math

import torch
from torch import nn

from titans_platform.config import OptimConfig


def learning_rate(step: int, cfg: OptimConfig) -> float:
    """Rate of optimiser step ``step`` (0 is the first): linear warm-up, then cosine to min_lr_ratio."""
    warmup = max(1, round(cfg.warmup_fraction * cfg.steps))
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, cfg.steps - 1 - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return cfg.lr * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * cosine)


def adamw(model: nn.Module, cfg: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the model's own parameter groups, or its matrices decayed and the rest not."""
    groups = getattr(model, "parameter_groups", _groups_by_shape(model))
    return torch.optim.AdamW(
        groups(cfg.weight_decay), lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=1e-8, foreach=True
    )


def _groups_by_shape(model: nn.Module):
    def groups(weight_decay: float) -> list[dict]:
        trained = [p for p in model.parameters() if p.requires_grad]
        return [
            {"params": [p for p in trained if p.ndim == 2], "weight_decay": weight_decay},
            {"params": [p for p in trained if p.ndim != 2], "weight_decay": 0.0},
        ]

    return groups
