"""The training loop, in plain PyTorch; it does not depend on a scheduler, a tracker or files.

Shape suffixes: B rows of a worker, T tokens of a row, V the vocabulary.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from titans_core.backbone import Model
from titans_core.interventions import Intervention, intervene
from titans_core.state import ModelState
from titans_core.telemetry import healthy_limits, out_of_range, record
from titans_kernels.ran import graph_breaks, warn_once
from titans_platform.config import OptimConfig
from titans_platform.data.stream import StreamBatch
from titans_platform.training.optim import Diverged, adamw, drawn_window, learning_rate
from titans_platform.training.parallel import (
    clip_gradients,
    data_shard,
    device_metrics,
    gradient_sync,
    parallelize,
    rank,
    world_size,
)

log = logging.getLogger(__name__)

AHEAD = 2
"""Number of batches to prefetch."""


class Stream(Protocol):
    """Batches, each a NamedTuple of tensors [B, ...], that depend only on the step."""

    def batch(self, step: int) -> Any: ...


class Loss(Protocol):
    """The loss of each row of a batch, and which rows count. `Objective` implements it."""

    def losses(self, model: Callable[..., Any], batch: Any) -> Tensor:
        """[B] loss of each row in nats; 0 for a row without a target."""
        ...

    def counts(self, batch: Any) -> Tensor:
        """[B] bool: whether the row has a target."""
        ...


class CrossEntropy:
    """Next-token cross-entropy of each row, averaged over the positions that are not masked."""

    def losses(self, model: Callable[..., Any], batch: Any) -> Tensor:
        """[B] loss of each row in nats; 0 for a row in which every position is masked."""
        tokens, starts = batch.tokens, batch.starts[:, :-1]
        losses_BT = model(tokens[:, :-1], document_starts=starts, targets_BT=tokens[:, 1:]).losses
        return _row_means(losses_BT, batch.loss)

    def carried_losses(
        self, model: Callable[..., Any], batch: Any, state: ModelState | None
    ) -> tuple[Tensor, ModelState]:
        """[B] loss of each stream in nats, and the state after it. ``state`` None: all streams start."""
        tokens, reset_B = batch.tokens, None if state is None else batch.reset
        out = model(tokens[:, :-1], state, targets_BT=tokens[:, 1:], reset_B=reset_B)
        return _row_means(out.losses, batch.loss), out.state

    def counts(self, batch: Any) -> Tensor:
        """[B] bool: whether any position of the row is not masked."""
        return batch.loss.any(1)


def _row_means(losses_BT: Tensor, counts_BT: Tensor) -> Tensor:
    return (losses_BT * counts_BT).sum(1) / counts_BT.sum(1).clamp(min=1)


@dataclass(frozen=True)
class Hooks:
    """Callbacks: ``on_step(step, metrics)`` after every step, ``on_checkpoint()`` when a checkpoint is due.

    ``checkpoint_every``, ``telemetry_every`` and ``validate_every`` are intervals in steps; 0 means never. A
    checkpoint is also due after step ``checkpoint_at`` and, with ``checkpoint_best``, after each validation
    with the lowest loss so far. Training stops early after ``patience`` validations without improvement.
    ``validate()`` returns the validation loss, which is passed to ``on_step``.
    ``on_divergence(batch, error)`` saves the batch and returns a message with its path.
    """

    on_step: Callable[[int, dict[str, float]], None] = lambda step, metrics: None
    on_checkpoint: Callable[[], object] = lambda: None
    validate: Callable[[], float] = lambda: math.nan
    on_divergence: Callable[[Any, Diverged], str] = lambda batch, error: ""
    checkpoint_every: int = 0
    checkpoint_at: int | None = None
    checkpoint_best: bool = False
    telemetry_every: int = 0
    validate_every: int = 0
    patience: int = 0


@dataclass
class Progress:
    """The progress of a run, and the statistics that its result reports. Part of the checkpoint."""

    step: int = 0
    """Optimiser steps done."""
    worlds: list[list[int]] = field(default_factory=list)
    """[step, workers] for each change of the world size."""
    seconds: float = 0.0
    best_step: int = 0
    """The step of ``best_loss``; 0 before the first validation, or if the best checkpoint is not kept."""
    best_loss: float = sys.float_info.max
    """The lowest validation loss, in nats; the largest float until there is one: JSON has no infinity."""
    tail_loss: float = 0.0
    tail_steps: int = 0
    telemetry: dict[str, float] = field(default_factory=dict)

    @property
    def final_loss(self) -> float:
        """Mean loss of the last twentieth of the steps; the last loss if training stopped before that."""
        return self.tail_loss / max(1, self.tail_steps)


class Trainer:
    """A model, its optimiser and the training progress.

    The loss is the mean of the objective's losses over the rows that have a target. A row with a single
    answer thus has the same weight as a row of text, and the loss depends neither on the micro-batch size nor
    on the world size. The default objective is next-token cross-entropy. With a process group, ``stream``
    gives each rank its own rows of the batch.
    """

    def __init__(
        self, model: Model, cfg: OptimConfig, stream: Stream, device: torch.device | str = "cpu",
        objective: Loss | None = None, *, sequence_length: int, seed: int = 0,
    ):  # fmt: skip
        self.device = torch.device(device)
        self.world_size, self.shard = world_size(), data_shard(cfg)
        self._limits = healthy_limits(model)
        self._forward = parallelize(model, cfg, self.device)
        # the model for checkpoints and evaluation: not wrapped by DDP, sharded in place by FSDP2
        self.model, self.seed = model, seed
        self.cfg, self.stream, self.objective = cfg, stream, objective or CrossEntropy()
        self.optimizer, self.progress = adamw(model, cfg), Progress()
        self.states: dict[int, ModelState] = {}
        """State of this rank's streams by group, detached; empty if rows are shuffled."""
        self.tokens_per_step = cfg.global_batch_size * sequence_length * cfg.bptt_rows
        self.flops_per_token: float | None = None
        """FLOPs per token of a forward and backward pass; None if not counted."""

    def run(self, hooks: Hooks, until: int | None = None) -> Progress:
        """Train from the current step to the last one, or to step ``until``. Raises Diverged."""
        steps = self.cfg.steps
        last = min(steps, until or steps)
        self.model.train()
        with closing(batches_ahead(self.stream, range(self.progress.step, last), self.device)) as batches:
            while self.progress.step < last and not self._patience_exhausted(hooks):
                number = self.progress.step + 1
                started = time.perf_counter()
                batch = next(batches)
                waited = time.perf_counter() - started
                try:
                    metrics = self.step(batch, telemetry=_due(number, hooks.telemetry_every, steps))
                except Diverged as error:
                    saved = hooks.on_divergence(batch, error)
                    raise Diverged("; ".join(filter(None, (str(error), saved)))) from error
                for reason in graph_breaks():
                    warn_once("graph break", "part of the model runs eagerly", reason)
                seconds = time.perf_counter() - started
                self.progress.seconds += seconds
                speed, flops = self.tokens_per_step / seconds, self.flops_per_token
                metrics |= {"data_wait_seconds": waited, "tokens_per_second": speed}
                metrics |= device_metrics(self.device, flops and flops * speed / self.world_size)
                if _due(number, hooks.validate_every, steps):
                    metrics["validation_loss"] = self._validated(hooks)
                    if self._patience_exhausted(hooks) and not self.progress.tail_steps:
                        self.progress.tail_loss, self.progress.tail_steps = metrics["loss"], 1
                hooks.on_step(number, metrics)
                best = hooks.checkpoint_best and self.progress.best_step == number
                needed = best or number == hooks.checkpoint_at or self._patience_exhausted(hooks)
                if needed or _due(number, hooks.checkpoint_every, last):
                    hooks.on_checkpoint()
        return self.progress

    def _patience_exhausted(self, hooks: Hooks) -> bool:
        """Return True if the last ``patience`` validations brought no improvement."""
        best, allowed = self.progress.best_step, hooks.patience * hooks.validate_every
        return bool(hooks.patience and best and self.progress.step - best >= allowed)

    def _validated(self, hooks: Hooks) -> float:
        """Return the validation loss, averaged over ranks so that all agree on the best checkpoint."""
        local = torch.tensor(hooks.validate() / self.world_size, dtype=torch.float64)
        loss, progress = self._over_workers(local).item(), self.progress
        if hooks.checkpoint_best and loss < progress.best_loss:
            progress.best_loss, progress.best_step = loss, progress.step
        return loss

    def step(self, batch: Any = None, telemetry: bool = False) -> dict[str, float]:
        """Take one optimiser step. Returns loss (nats), learning rate, gradient norm and optional telemetry.

        ``batch`` is this rank's part of the batch; None: read it from the stream. Raises Diverged.
        """
        progress = self.progress
        rate = learning_rate(progress.step, self.cfg)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        batch = self.stream.batch(progress.step) if batch is None else batch
        loss, state, seen = self._backward(batch, telemetry)
        norm = clip_gradients(self.model, self.cfg.grad_clip)
        # all ranks agree, because both numbers are reduced over ranks
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise self._diverged(loss, norm)
        progress.telemetry = seen or progress.telemetry
        if (message := out_of_range(seen, self._limits)) and rank() == 0:
            log.warning("step %d: %s", progress.step + 1, message)
            self._limits = {}  # warn once
        self.optimizer.step()
        if state is not None:
            self.states[self._group] = state
        progress.step += 1
        if progress.step > 0.95 * self.cfg.steps:
            progress.tail_loss += loss
            progress.tail_steps += 1
        return {"loss": loss, "lr": rate, "grad_norm": norm} | seen

    @property
    def _group(self) -> int:
        """The group of streams whose turn it is."""
        return self.progress.step % self.cfg.stream_groups

    def _backward(self, batch: Any, telemetry: bool) -> tuple[float, ModelState | None, dict[str, float]]:
        """Accumulate the gradient of the whole batch in ``.grad``.

        Returns the loss, the state of this rank's streams after the batch, and telemetry if it is on.
        """
        # non_blocking has no effect for memory that is not pinned
        batch = type(batch)(*(part.to(self.device, non_blocking=part.is_pinned()) for part in batch))
        # under `parallel: sequence` every worker has, and counts, all rows
        rows = self._over_workers(self.objective.counts(batch).sum()) * self.shard[1] / self.world_size
        rows = rows.clamp(min=1)
        size = self.cfg.micro_batch_size or len(batch[0])
        parts = [type(batch)(*part) for part in zip(*(x.split(size) for x in batch), strict=True)]
        carried = self.states.get(self._group)
        states = [None] * len(parts) if carried is None else carried.split([len(p[0]) for p in parts])
        after: list[ModelState] = []
        seen: dict[str, float] = {}
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        window = drawn_window(self.cfg, self.seed, self.progress.step)
        for i, (part, state) in enumerate(zip(parts, states, strict=True)):
            last = i == len(parts) - 1
            shortened = intervene(self.model, Intervention(window=window)) if window else nullcontext()
            watched = record(self.model) if telemetry and last else nullcontext()
            with gradient_sync(self._forward, last), shortened, watched as recorded:
                losses_B, ended = self._losses(part, state)
                loss = losses_B.sum() / rows
                # DDP and FSDP average gradients over ranks, but the sum is needed
                (loss * self.world_size).backward()
            total += loss.detach()
            after += [ended.detach()] if ended else []
            if recorded is not None:
                seen = recorded.summary()
        return self._over_workers(total).item(), ModelState.cat(after) if after else None, seen

    def _losses(self, part: Any, state: ModelState | None) -> tuple[Tensor, ModelState | None]:
        """[B] losses of a micro-batch, and the state after it if its rows are streams."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.cfg.precision == "bf16"):
            if isinstance(part, StreamBatch):
                return cast(CrossEntropy, self.objective).carried_losses(self._forward, part, state)
            return self.objective.losses(self._forward, part), None

    def _over_workers(self, value: Tensor) -> Tensor:
        value = value.to(self.device)
        if self.world_size > 1:
            dist.all_reduce(value)
        return value

    def _diverged(self, loss: float, norm: float) -> Diverged:
        seen = ", ".join(f"{k} {v:.3g}" for k, v in self.progress.telemetry.items()) or "none yet"
        fix = "try model.memory.surprise_bound=1, or a smaller model.memory.max_theta or optim.lr"
        wrong = f"step {self.progress.step + 1}: loss {loss:.4g}, gradient norm {norm:.4g}"
        return Diverged(f"{wrong}; last telemetry: {seen}; {fix}")


def batches_ahead(stream: Stream, steps: range, device: torch.device) -> Generator[Any, None, None]:
    """Prefetch the batches of ``steps`` in order, in a thread; in pinned memory for a GPU.

    Uses a thread rather than DataLoader's processes: a batch is a few reads of memory-mapped files, and
    forking a process that runs Ray's threads is unsafe. An exception of the stream is raised at its step.
    Close the iterator to end the thread.
    """

    def load(step: int) -> Any:
        batch = stream.batch(step)
        if device.type != "cuda":
            return batch
        # pinning uses the thread's current device, which in a new thread is device 0
        torch.cuda.set_device(device)
        return type(batch)(*(part.pin_memory() for part in batch))

    thread = ThreadPoolExecutor(1, "loader")
    waiting = deque(thread.submit(load, step) for step in steps[:AHEAD])
    try:
        for i in range(len(steps)):
            batch = waiting.popleft().result()
            if i + AHEAD < len(steps):
                waiting.append(thread.submit(load, steps[i + AHEAD]))
            yield batch
    finally:
        thread.shutdown(cancel_futures=True)


def _due(step: int, every: int, steps: int) -> bool:
    return every > 0 and (step % every == 0 or step == steps)


@contextmanager
def deterministic(seed: int, threads: int) -> Iterator[None]:
    """Seed torch, and use ``threads`` CPU threads and deterministic kernels, both restored at the end."""
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(threads)
    # read by cuBLAS at its first use; without it its matmuls are not deterministic
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # filling the memory of torch.empty takes time and only guards against reads of it, which we never do
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    # some operations have no deterministic CUDA kernel: warn there instead of raising
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])
