"""What a run costs: numbers of its model, floating-point operations, memory, time. No data are needed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from titans_core import Model
from titans_platform.config import EvalConfig, OptimConfig, RunConfig
from titans_platform.objectives import build_objective
from titans_platform.runs.spec import Resources
from titans_platform.training.loop import Trainer, deterministic

PROCESS_BYTES = 300 * 2**20
"""A worker's own: the interpreter, torch, Ray."""
BYTES_A_PARAMETER = 16
"""A weight, its gradient and AdamW's two moments, in float32."""
TIMED_PARAMETERS = 50e6
"""Above so many parameters no step is timed on the spot."""
TIMED_FLOPS = 5e11
"""Of the steps that are timed on the spot, seconds on a few cores; a step of more is timed on fewer rows."""
TIMED_ACTIVATIONS = 40
"""Numbers that a block's backward pass keeps of each number of its input, about."""
TIMED_STEPS, TIMED_SECONDS = 10, 1.0


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run's model."""

    parameters: int
    state_bytes: int
    """Bytes that one sequence carries after a training length."""


def sizes(cfg: RunConfig) -> Sizes:
    """The sizes of the run's model, quick however large it is. Raises UsageError."""
    return _sizes(_model_alone(cfg).model_dump_json())


def _model_alone(cfg: RunConfig) -> RunConfig:
    """Of the config only what a model can be a function of: a grid has few models and many cells."""
    return cfg.model_copy(update={"seed": 0, "optim": OptimConfig(), "eval": EvalConfig()})


@cache
def _sizes(text: str) -> Sizes:
    """Blocks are equal: two small models tell the size of any number of blocks."""
    cfg = RunConfig.model_validate_json(text)
    objective, further = build_objective(cfg), cfg.model.n_layers - 1
    one, two = (objective.build_small(blocks) for blocks in (1, 2))

    def of(measure: Callable[[Model], int]) -> int:
        return measure(one) + further * (measure(two) - measure(one))

    length = cfg.data.sequence_length
    return Sizes(of(lambda m: m.num_parameters()), of(lambda m: m.state_bytes(length)))


@cache
def _forward_flops(text: str) -> int | None:
    """Of one row, counted in the products of a pass on the meta device, which has shapes alone."""
    from torch.utils.flop_counter import FlopCounterMode

    cfg = RunConfig.model_validate_json(text)
    objective = build_objective(cfg)
    if (batch := objective.sample_batch(1)) is None:
        return None
    batch = type(batch)(*(part.to("meta") for part in batch))

    def of(blocks: int) -> int:
        model = objective.build_small(blocks).requires_grad_(False)
        with FlopCounterMode(display=False) as counter:
            objective.losses(model, batch)
        return counter.get_total_flops()

    return of(1) + (cfg.model.n_layers - 1) * (of(2) - of(1))


def training_flops(cfg: RunConfig) -> int | None:
    """Floating-point operations of a row's forward and backward pass; None where there are no sample rows.

    Those of matrix products, of attention and of the memory's inner gradients; nothing that is computed
    again is counted twice. The backward pass has two products for each of the forward pass.
    """
    forward = _forward_flops(_model_alone(cfg).model_dump_json())
    return None if forward is None else 3 * forward


class Needed(NamedTuple):
    """Bytes that a worker needs at the very least."""

    model: int
    """Weights, gradients and moments: its share of them where they are shared out."""
    process: int
    activations: int
    """What the backward pass of a micro-batch is computed from."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


def least_memory(cfg: RunConfig, resources: Resources) -> Needed:
    """Bytes that each worker needs at the very least."""
    rows = cfg.optim.micro_batch_size or -(-cfg.optim.global_batch_size // resources.max_workers)
    copies = {"ddp": 1, "fsdp": resources.max_workers, "hsdp": cfg.optim.shard_workers or 1}
    return Needed(
        BYTES_A_PARAMETER * sizes(cfg).parameters // copies[cfg.optim.parallel],
        0 if resources.gpus_per_worker else PROCESS_BYTES,
        4 * build_objective(cfg).least_activations(rows),
    )


def seconds_per_token(config: RunConfig) -> float | None:
    """Time optimiser steps on rows of random content, after one to warm up: no data are needed.

    The fastest of 2 to TIMED_STEPS steps, in TIMED_SECONDS. With one thread its CPU time, so that what other
    processes do at the moment does not count.

    None: the objective has no sample rows, the model has more than TIMED_PARAMETERS, or one row takes more
    than TIMED_FLOPS or than half of this machine's memory.
    """
    if sizes(config).parameters > TIMED_PARAMETERS:
        return None
    batch_size, length = config.optim.global_batch_size, config.data.sequence_length
    rows = min(config.optim.micro_batch_size or batch_size, batch_size, timed_rows(config))
    if not rows:
        return None
    optim = config.optim.model_copy(update={"global_batch_size": rows, "micro_batch_size": None})
    with deterministic(0, config.threads):
        objective = build_objective(config)
        if (batch := objective.sample_batch(rows)) is None:
            return None
        model = objective.build_model()
        trainer = Trainer(model, optim, _Repeated(batch), objective=objective, sequence_length=length)
        trainer.step()
        clock = time.process_time if config.threads == 1 else time.perf_counter
        seconds: list[float] = []
        while len(seconds) < 2 or (len(seconds) < TIMED_STEPS and sum(seconds) < TIMED_SECONDS):
            started = clock()
            trainer.step()
            seconds.append(clock() - started)
    return min(seconds) / (rows * config.row_tokens)


def timed_rows(config: RunConfig) -> int:
    """Rows that three steps can be timed on in seconds and in half of the machine's memory."""
    row = 4 * TIMED_ACTIVATIONS * build_objective(config).least_activations(1)
    row += 2 * sizes(config).state_bytes
    by_memory = machine_memory() // 2 // row
    # counting the operations of a row that does not fit takes long too
    flops = training_flops(config) if by_memory else None
    return min(by_memory, int(TIMED_FLOPS / (3 * flops)) if flops else by_memory)


def machine_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class _Repeated(NamedTuple):
    """A stream whose every batch is the same."""

    only: Any

    def batch(self, step: int) -> Any:
        """The batch, whatever the step."""
        return self.only
