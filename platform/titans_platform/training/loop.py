"""The training loop, in plain PyTorch: it knows of no scheduler, no tracker and no file.

B rows of a worker, T tokens of a row, V the vocabulary.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from titans_core.telemetry import record
from titans_platform.config import OptimConfig
from titans_platform.errors import TitansError
from titans_platform.training.optim import adamw, learning_rate


class RowBatch(Protocol):
    """Rows of tokens, where documents start in them, and which predictions count."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def starts(self) -> Tensor: ...
    @property
    def loss(self) -> Tensor: ...


class Stream(Protocol):
    """Batches as a function of the step alone."""

    def batch(self, step: int) -> RowBatch: ...


class Diverged(TitansError):
    """The loss or its gradient stopped being a number. Another try would do the same."""


@dataclass(frozen=True)
class Hooks:
    """What the outside sees: ``on_step(step, metrics)`` after each, ``on_checkpoint()`` when one is due."""

    on_step: Callable[[int, dict[str, float]], None] = lambda step, metrics: None
    on_checkpoint: Callable[[], object] = lambda: None
    checkpoint_every: int = 0
    telemetry_every: int = 0


@dataclass
class Progress:
    """Where a run is, and what its result says of the way there. All of it is in the checkpoint."""

    step: int = 0
    """Optimiser steps done, which is the data position too."""
    seconds: float = 0.0
    tail_loss: float = 0.0
    tail_steps: int = 0
    telemetry: dict[str, float] = field(default_factory=dict)

    @property
    def final_loss(self) -> float:
        """Mean loss of the last twentieth of the steps, in nats."""
        return self.tail_loss / max(1, self.tail_steps)


class Trainer:
    """A model, its optimiser and the step they are at.

    The loss is the mean over rows of each row's mean cross-entropy over the positions that count, so
    a row with one answer weighs as much as a row of text, and neither the micro-batch nor the number of
    workers changes it. With a process group, each rank gives its own rows of the batch.
    """

    def __init__(
        self, model: nn.Module, cfg: OptimConfig, stream: Stream, device: torch.device | str = "cpu"
    ):
        self.device = torch.device(device)
        self.model = model.to(self.device)
        self.cfg = cfg
        self.stream = stream
        self.optimizer = adamw(self.model, cfg)
        self.progress = Progress()
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self._forward: Any = self.model if self.world_size == 1 else DistributedDataParallel(self.model)

    def run(self, hooks: Hooks, until: int | None = None) -> Progress:
        """Train from the current step to the last, or to step ``until``. Raises Diverged."""
        progress, steps = self.progress, self.cfg.steps
        last = min(steps, until or steps)
        self.model.train()
        while progress.step < last:
            number = progress.step + 1
            watched = _due(number, hooks.telemetry_every, steps)
            started = time.perf_counter()
            metrics = self.step(telemetry=watched)
            seconds = time.perf_counter() - started
            progress.seconds += seconds
            metrics["tokens_per_second"] = self.tokens_per_step / seconds
            hooks.on_step(number, metrics)
            if hooks.checkpoint_every and _due(number, hooks.checkpoint_every, last):
                hooks.on_checkpoint()
        return progress

    @cached_property
    def tokens_per_step(self) -> int:
        """Tokens of one optimiser step, over all workers."""
        return self.cfg.global_batch_size * (self.stream.batch(0).tokens.shape[1] - 1)

    def step(self, telemetry: bool = False) -> dict[str, float]:
        """One optimiser step; its loss (nats), gradient norm, rate and, where asked, telemetry."""
        progress = self.progress
        rate = learning_rate(progress.step, self.cfg)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss, seen = self._backward(self.stream.batch(progress.step), telemetry)
        norm = self._clip()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise Diverged(self._advice(loss, norm))
        progress.telemetry = seen or progress.telemetry
        self.optimizer.step()
        progress.step += 1
        if progress.step > 0.95 * self.cfg.steps:
            progress.tail_loss += loss
            progress.tail_steps += 1
        return {"loss": loss, "lr": rate, "grad_norm": norm} | seen

    def _backward(self, batch: RowBatch, telemetry: bool) -> tuple[float, dict[str, float]]:
        """Leave the whole batch's gradient in ``.grad``; its loss, and this rank's telemetry if asked for."""
        rows = self._over_workers(batch.loss.any(1).sum()).clamp(min=1)
        micro = list(self._micro_batches(batch))
        seen: dict[str, float] = {}
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        for i, (tokens, starts, counts) in enumerate(micro):
            last = i == len(micro) - 1
            with self._no_sync(last), record(self.model) if telemetry and last else nullcontext() as recorded:
                loss = self._row_losses(tokens, starts, counts).sum() / rows
                # DDP averages over workers where the sum is wanted
                (loss * self.world_size).backward()
            total += loss.detach()
            if recorded is not None:
                seen = recorded.summary()
        return self._over_workers(total).item(), seen

    def _row_losses(self, tokens: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
        """Mean cross-entropy of each row over the positions that count; 0 for a row that has none. [B]"""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.cfg.precision == "bf16"):
            logits_BTV = self._forward(tokens[:, :-1], document_starts=starts[:, :-1]).logits
        losses_BT = F.cross_entropy(logits_BTV.float().transpose(1, 2), tokens[:, 1:], reduction="none")
        return (losses_BT * counts).sum(1) / counts.sum(1).clamp(min=1)

    def _micro_batches(self, batch: RowBatch) -> Iterator[tuple[Tensor, ...]]:
        parts = (batch.tokens, batch.starts, batch.loss)
        on_device = [part.to(self.device, non_blocking=True) for part in parts]
        rows = self.cfg.micro_batch_size or len(batch.tokens)
        return zip(*(part.split(rows) for part in on_device), strict=True)

    def _clip(self) -> float:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if self.cfg.grad_clip is not None:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), self.cfg.grad_clip, norm)
        return norm.item()

    def _no_sync(self, last: bool):
        return nullcontext() if last or self.world_size == 1 else self._forward.no_sync()

    def _over_workers(self, value: Tensor) -> Tensor:
        value = value.to(self.device)
        if self.world_size > 1:
            dist.all_reduce(value)
        return value

    def _advice(self, loss: float, norm: float) -> str:
        seen = ", ".join(f"{k} {v:.3g}" for k, v in self.progress.telemetry.items()) or "none yet"
        return (
            f"step {self.progress.step + 1}: loss {loss:.4g}, gradient norm {norm:.4g}; last telemetry: "
            f"{seen}; try model.memory.surprise_bound=1, or a smaller model.memory.max_theta or optim.lr"
        )


def _due(step: int, every: int, steps: int) -> bool:
    return every > 0 and (step % every == 0 or step == steps)


@contextmanager
def deterministic(seed: int, threads: int) -> Iterator[None]:
    """Seeded, on ``threads`` CPU threads, deterministic kernels only; what was set before comes back."""
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(threads)
    # read by cuBLAS at its first use; without it its matmuls are not repeatable
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # filling what torch.empty gives costs time and guards only against reads of it, which we have none of
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    # CUDA has no deterministic form of some operations: warn there rather than refuse
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])
