"""Before a run: its cost without its data (size, FLOPs, memory, time), and checks beside `Objective.check`.

A run that does not fit its workers or its machine fails within a second rather than after hours.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial, wraps
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from titans_core import Model, NeuralMemory
from titans_core.blocks.base import Recompute
from titans_core.footprint import forward_flops, recalled_bytes, saved_bytes_per_token
from titans_core.sequence_parallel import row_parts
from titans_kernels import supports
from titans_platform.config import EvalConfig, OptimConfig, RunConfig
from titans_platform.errors import UsageError, within
from titans_platform.objectives import Objective, build_objective, build_small
from titans_platform.runs.ray_session import available
from titans_platform.runs.reporter import LOGGERS
from titans_platform.runs.spec import NODE_GPUS, Machine, Resources, RunSpec, concurrency
from titans_platform.training.loop import Trainer, deterministic
from titans_platform.training.parallel import recomputed

Value = TypeVar("Value")
PROCESS_BYTES, CUDA_BYTES = 300 * 2**20, 3 * 2**29
"""Memory of a worker before it builds a model: interpreter, torch and Ray; on a GPU CUDA, NCCL and cuBLAS."""
BYTES_A_PARAMETER, BUCKET_BYTES = 16, 4
"""Bytes per parameter: the weight, its gradient and AdamW's two moments, in float32; DDP's buckets."""
MOST_SAVED, UNTRACED = 400, 8 * 2**30
"""Bytes that any block saves at most for each value of its input, and below which that bound will do."""
USUALLY_SAVED = 72
"""The same of a block that torch.compile cannot trace as one graph: what the largest of ours keeps, MAC."""
RECOMPUTED = 3
"""A block's activations, relative to what selective recomputation keeps of them."""
TIMED_PARAMETERS = 50e6
"""Models with more parameters are not timed."""
TIMED_FLOPS = 5e11
"""Limit on the floating-point operations of the timed steps, seconds on a few cores; larger steps are timed
on fewer rows."""
TIMED_ACTIVATIONS = 40
"""Approximate number of values saved for a block's backward pass, per value of its input."""
TIMED_STEPS, TIMED_SECONDS = 10, 1.0


def by_model(measure: Callable[[RunConfig], Value]) -> Callable[[RunConfig], Value]:
    """Cache a function of a config by its model and data: a grid has many cells but few models."""
    cached = cache(lambda text: measure(RunConfig.model_validate_json(text)))

    def by_key(cfg: RunConfig) -> Value:
        # a row's tokens depend on bptt_rows
        neutral = {"seed": 0, "optim": OptimConfig(bptt_rows=cfg.optim.bptt_rows), "eval": EvalConfig()}
        return cached(cfg.model_copy(update=neutral).model_dump_json())

    return wraps(measure)(by_key)


@by_model
def sizes(cfg: RunConfig) -> dict[str, int]:
    """Return ``parameters`` of the run's model, and ``state_bytes`` of a sequence of a row's length.

    The model is not built at full depth. Raises UsageError.
    """
    measures = Model.num_parameters, lambda m: m.state_bytes(cfg.data.sequence_length)
    return dict(zip(("parameters", "state_bytes"), _at_depth(build_objective(cfg), *measures), strict=True))


def _at_depth(objective: Objective[Any], *measures: Callable[[Model], int]) -> list[int]:
    """Measure the run's model; if its blocks are equal, by models of one and two."""
    layers = objective.cfg.model.n_layers
    few, more = ((1, 2), layers - 1) if objective.equal_blocks else ((layers,), 0)
    models = [build_small(objective, blocks) for blocks in few]
    first, *_, last = 2 * [[measure(model) for measure in measures] for model in models]
    return [a + more * (b - a) for a, b in zip(first, last, strict=True)]


@by_model
def training_flops(cfg: RunConfig) -> int | None:
    """Floating-point operations of the forward and backward pass of one row; None without sample rows.

    Counts as `forward_flops` does, on the meta device without recomputation; the backward pass is twice the
    forward pass.
    """
    objective = build_objective(cfg)
    if (batch := objective.sample_batch(1)) is None:
        return None
    batch = type(batch)(*(x.to("meta", torch.bfloat16 if x.is_floating_point() else None) for x in batch))

    return 3 * _at_depth(objective, partial(_flops, objective, batch))[0]


def _flops(objective: Objective[Any], batch: Any, model: Model) -> int:
    """Floating-point operations of a forward pass."""
    model.requires_grad_(False).to(torch.bfloat16)
    return forward_flops(lambda: objective.losses(model, batch))


def rows_at_once(cfg: RunConfig, resources: Resources) -> tuple[int, int]:
    """Rows of a worker's micro-batch, and into how many workers' parts each row is divided."""
    sequence = cfg.optim.parallel == "sequence"
    by_row, parts = (1, resources.min_workers) if sequence else (resources.min_workers, 1)
    return cfg.optim.micro_batch_size or -(-cfg.optim.global_batch_size // by_row), parts


def needed_memory(cfg: RunConfig, resources: Resources) -> dict[str, int]:
    """Memory of each worker in bytes, by the field of the config that it grows with.

    model: weights, gradients and optimiser moments, only the worker's shard of them under fsdp and hsdp;
    workers: a process, or CUDA and NCCL; data.sequence_length: a lower bound on the activations of a
    micro-batch, on a GPU an estimate of what one block holds; optim.micro_batch_size: on a GPU an estimate of
    what all blocks save; optim.stream_groups: carried states of the worker's streams, of all groups.
    """
    rows, parts = rows_at_once(cfg, resources)
    on_gpu, objective = bool(resources.gpus_per_worker), build_objective(cfg)
    groups = cfg.optim.stream_groups if cfg.data.rows == "streams" else 0
    streams = groups * -(-cfg.optim.global_batch_size * parts // resources.min_workers)
    shards = cfg.optim.shard_workers or min(resources.min_workers, NODE_GPUS)
    copies = {"ddp": 1, "sequence": 1, "fsdp": resources.min_workers, "hsdp": shards}
    saved, held = 0, 4 * objective.least_activations(rows) // parts
    if on_gpu and objective.equal_blocks:
        saved, held = _activations(objective, rows, parts)
    buckets = BUCKET_BYTES if on_gpu and resources.several and cfg.optim.parallel == "ddp" else 0
    return {
        "model": (BYTES_A_PARAMETER + buckets) * sizes(cfg)["parameters"] // copies[cfg.optim.parallel],
        "workers": CUDA_BYTES if on_gpu else PROCESS_BYTES,
        "data.sequence_length": held,
        "optim.micro_batch_size": saved,
        "optim.stream_groups": streams * sizes(cfg)["state_bytes"],
    }


def _activations(objective: Objective[Any], rows: int, parts: int) -> tuple[int, int]:
    """Return bytes of activations of a micro-batch on a GPU, each row divided into ``parts``.

    What torch.compile saves of all blocks for the backward pass, and what one block holds while its backward
    pass runs, with the logits. Of small models an upper bound, which takes no tracing.
    """
    cfg, length = objective.cfg, objective.block_tokens // parts
    tokens, layers, head = rows * length, cfg.model.n_layers, 4 * objective.head_activations(rows)
    if (most := MOST_SAVED * tokens * cfg.model.d_model) * (layers + 1) <= UNTRACED:
        return most * layers, most + head
    recompute = recomputed(cfg.optim)
    block = cfg.model.model_copy(update={"n_layers": 1})

    def saved(recompute: Recompute) -> float:
        options: Any = {"precision": cfg.optim.precision, "recompute": recompute}
        try:
            # a number, also where the trace has symbols
            return float(saved_bytes_per_token(block, rows, length, **options))
        except RuntimeError:  # Dynamo's too: it cannot trace the block as one graph
            return USUALLY_SAVED * block.d_model

    kept = saved(recompute)
    once = kept
    if recompute is True:
        once = saved(False)  # a block that was recomputed holds all that it would have saved
    elif recompute:
        once = RECOMPUTED * kept
    return round(tokens * layers * kept), round(tokens * once) + head + recalled_bytes(cfg.model, tokens)


def seconds_per_token(config: RunConfig) -> float | None:
    """Seconds of training per token, timed on random rows after one warm-up step; no data are needed.

    Takes the fastest of 2 to TIMED_STEPS steps within TIMED_SECONDS. A run with one thread is measured in CPU
    time, which the load of other processes does not affect.

    Returns None if the objective has no sample rows, the model has more than TIMED_PARAMETERS, or one row
    exceeds TIMED_FLOPS or half of this machine's memory.
    """
    if sizes(config)["parameters"] > TIMED_PARAMETERS:
        return None
    batch_size = config.optim.global_batch_size
    if not (rows := min(config.optim.micro_batch_size or batch_size, batch_size, timed_rows(config))):
        return None
    optim = config.optim.model_copy(update={"global_batch_size": rows, "micro_batch_size": None})
    with deterministic(0, config.threads):
        trainer = sample_trainer(config.model_copy(update={"optim": optim}))
        if not trainer:
            return None
        trainer.step()
        clock = time.process_time if config.threads == 1 else time.perf_counter
        seconds: list[float] = []
        while len(seconds) < 2 or (len(seconds) < TIMED_STEPS and sum(seconds) < TIMED_SECONDS):
            started = clock()
            trainer.step()
            seconds.append(clock() - started)
    return min(seconds) / (rows * config.row_tokens)


def sample_trainer(cfg: RunConfig, device: str = "cpu") -> Trainer | None:
    """Return a trainer on one batch of random rows; None if the objective has no sample rows."""
    objective = build_objective(cfg)
    if (batch := objective.sample_batch(cfg.optim.global_batch_size)) is None:
        return None
    stream: Any = SimpleNamespace(batch=lambda step: batch)
    length = cfg.data.sequence_length
    return Trainer(objective.build_model(), cfg.optim, stream, device, objective, sequence_length=length)


def timed_rows(config: RunConfig) -> int:
    """Rows for which three timed steps stay within TIMED_FLOPS and half of this machine's memory."""
    row = 4 * TIMED_ACTIVATIONS * build_objective(config).least_activations(1)
    row += 2 * sizes(config)["state_bytes"]
    by_memory = machine_memory() // 2 // row
    # counting the operations of a row that does not fit would also be slow
    flops = training_flops(config) if by_memory else None
    return min(by_memory, int(TIMED_FLOPS / (3 * flops)) if flops else by_memory)


def machine_memory() -> int:
    """Physical memory of this machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def plan(cfg: RunConfig, resources: Resources, spec: RunSpec | None) -> dict[str, Any]:
    """Return the run, its sizes and its cost, by the keys of `titans train --dry-run --json`. Trains nothing.

    ``spec`` is None if the data are not prepared yet.
    """
    planned: dict[str, Any] = {"workers": resources.workers, "threads": cfg.threads, "steps": cfg.optim.steps}
    planned |= {"data": spec.data, "cell": spec.name} if spec else {"data": "to be prepared"}
    planned["state"] = spec.folder.state() if spec else "missing"
    if spec and spec.start:
        planned["resume_from"] = str(spec.start)
    planned |= {"tokens": cfg.tokens} | sizes(cfg)
    planned["worker_bytes"] = sum(needed_memory(cfg, resources).values())
    if (flops := training_flops(cfg)) is not None:
        planned["flops_per_token"] = flops / cfg.row_tokens
    if resources.workers == 1 and (each := seconds_per_token(cfg)) is not None:
        planned["seconds"] = each * cfg.tokens
    return planned


def check_resources(
    cfg: RunConfig, resources: Resources, machine: Machine | None = None, shared: bool = False
) -> None:
    """Check loggers, that the machine or cluster can hold the run, and that the workers divide the batch.

    ``machine``: by default this one, or the cluster of the job. ``shared``: workers on this machine may share
    CPUs, as in `titans train`. Raises UsageError, or ClusterError on a cluster.
    """
    for name in cfg.log.loggers:
        LOGGERS.find(name)
    machine = machine or available(resources)
    if not machine.nodes and shared:
        machine = replace(machine, cpus=max(machine.cpus, resources.cpus))
    concurrency(resources, machine)
    if machine.gpu and resources.gpus_per_worker:
        check_kernels(cfg, machine.gpu.arch)
    if machine.gpu or not machine.nodes:
        _check_memory(cfg, resources, machine)
    if not resources.gpus_per_worker:
        check_backend(cfg)
    check_batch(cfg, resources)


def check_kernels(cfg: RunConfig, arch: int) -> None:
    """Check that a GPU of ``arch``, e.g. 90, can run the backend of each memory, and `auto` with kernels.

    Without kernels a step takes up to thirty times as long. Raises UsageError.
    """
    dtype = torch.bfloat16 if cfg.optim.precision == "bf16" else torch.float32
    for module in build_small(build_objective(cfg)).modules():
        if isinstance(module, NeuralMemory):
            with within("model.memory", ValueError):
                support = supports(module.config, cfg.model.d_model // module.config.heads, dtype, arch)
            if support.reason:
                raise UsageError(f"model.memory.{support.reason}")


def check_backend(cfg: RunConfig) -> None:
    """Check that the backend that a config names computes each memory on a CPU. Raises UsageError."""
    for module in build_small(build_objective(cfg)).modules():
        if isinstance(module, NeuralMemory) and module.config.backend != "auto":
            x_BTD = torch.zeros(1, module.config.chunk_size, cfg.model.d_model)
            with within("model.memory", ValueError), torch.no_grad():
                module.to_empty(device="cpu")(x_BTD)


def gpu_arch(device: torch.device | str) -> int:
    """Return the architecture of a GPU, e.g. 90; 0 for a CPU."""
    major, minor = torch.cuda.get_device_capability(device) if torch.device(device).type == "cuda" else (0, 0)
    return 10 * major + minor


def check_batch(cfg: RunConfig, resources: Resources) -> None:
    """Check that the rows of a step divide among workers and micro-batches. Raises UsageError."""
    rows, micro = cfg.optim.global_batch_size, cfg.optim.micro_batch_size
    for workers in range(resources.min_workers, resources.max_workers + 1):
        if cfg.optim.parallel == "sequence":
            try:
                row_parts(cfg.row_tokens, workers, cfg.model)
            except ValueError as error:
                raise UsageError(f"data.sequence_length: {error}; raise it, or use fewer workers") from None
            workers = 1  # each has all rows
        if rows < workers:
            raise UsageError(f"optim.global_batch_size: {rows} rows cannot be shared by {workers} workers")
        if rows % workers and cfg.optim.parallel != "ddp":
            # each forward pass gathers parameters from all workers, so all must run the same number of them
            raise UsageError(
                f"optim.global_batch_size: {rows} rows do not divide among {workers} workers, which "
                f"optim.parallel {cfg.optim.parallel} needs; give a multiple"
            )
        share = -(-rows // workers)
        if micro and share % micro:
            fit = ", ".join(str(n) for n in range(share, 0, -1) if share % n == 0)
            cause = f"{micro} does not divide the {share} rows of a worker"
            raise UsageError(f"optim.micro_batch_size: {cause}; give one of {fit}")


def _check_memory(cfg: RunConfig, resources: Resources, machine: Machine) -> None:
    """Raise UsageError if a worker needs more memory than the GPU, or its share of this machine, has."""
    gpu = machine.gpu if resources.gpus_per_worker else None
    available = machine_memory() // resources.max_workers
    if gpu:
        available = int(gpu.memory * 2**30 * min(1, resources.gpus_per_worker))
    needed = needed_memory(cfg, resources)
    if (total := sum(needed.values())) <= available:
        return
    rows, parts = rows_at_once(cfg, resources)
    # the first one at which the sum is too large
    field = list(needed)[sum(total <= available for total in accumulate(needed.values()))]
    parameters, tokens = sizes(cfg)["parameters"], -(-rows * cfg.row_tokens // parts)
    shares = ", ".join(f"{name} {size / 2**30:,.1f}" for name, size in needed.items() if size)
    bound, where, fix = "at least", "a worker here has", "make it smaller, or train on a cluster"
    if gpu and field != "model":
        cost = needed["optim.micro_batch_size"] + needed["data.sequence_length"]
        field, bound, where = "optim.micro_batch_size", "about", f"a GPU ({gpu.name}) has"
        room = cost - (total - available)
        fewer = next((n for n in range(rows - 1, 0, -1) if rows % n == 0 and n * cost <= rows * room), None)
        fix = f"{rows} is too large; give {fewer}" if fewer else "use a larger GPU, or optim.parallel: fsdp"
        fix += "" if cfg.optim.recompute is True else ", or set optim.recompute: true"
    raise UsageError(
        f"{field}: {parameters:,} parameters and {tokens:,} tokens at once take {bound} "
        f"{total / 2**30:,.1f} GiB to train ({shares}), {where} {available / 2**30:,.1f} GiB; {fix}"
    )
