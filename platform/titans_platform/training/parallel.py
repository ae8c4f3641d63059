"""A model on its devices: compilation, activation recomputation, DDP and FSDP, and how fast it runs there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

from titans_core import LanguageModel
from titans_core.blocks import Block
from titans_core.blocks.base import Recompute
from titans_core.sequence_parallel import SequenceParallel
from titans_kernels import accelerate, ran
from titans_platform.config import OptimConfig
from titans_platform.errors import UsageError
from titans_platform.provenance import gpu_named


def world_size() -> int:
    """Return the number of workers of this run; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Rank of this worker; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def same_statistics(model: nn.Module) -> None:
    """Copy rank 0's running statistics of batch norms to all ranks, which have seen different rows."""
    if world_size() > 1:
        for name, buffer in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                dist.broadcast(buffer, 0)


def leave() -> None:
    """Publish that this rank takes part in no more collectives."""
    if dist.is_initialized():
        dist.distributed_c10d._get_default_store().set(f"left/{rank()}", "")


def all_left(timeout: timedelta = timedelta(seconds=20)) -> bool:
    """Leave, and return True if every rank leaves within ``timeout``; the others may wait in a collective."""
    leave()
    ranks = [f"left/{each}" for each in range(world_size())]
    with suppress(dist.DistError):
        dist.distributed_c10d._get_default_store().wait(ranks, timeout)
        return True
    return False


def data_shard(cfg: OptimConfig) -> tuple[int, int]:
    """Return this worker's share of a batch's rows: one of all, or all of them under `parallel: sequence`."""
    return (0, 1) if cfg.parallel == "sequence" else (rank(), world_size())


def recomputed(optim: OptimConfig) -> Recompute:
    """Return what the blocks recompute on a GPU; ``optim.recompute`` may leave it open."""
    if optim.recompute is None:
        return "selective" if optim.compile is not False else False
    return optim.recompute


def parallelize(model: nn.Module, cfg: OptimConfig, device: torch.device) -> nn.Module:
    """Move ``model`` to ``device`` and parallelise it. Returns the module to call in training.

    ddp: every worker holds a replica, and the returned wrapper averages gradients. fsdp: the parameters of
    each block are sharded and gathered for its forward and backward pass; parameters outside the blocks
    (including tied embedding and head) form the root's group. hsdp: as fsdp within groups of `shard_workers`
    workers, with gradients averaged over the groups. Under fsdp and hsdp the parameters of ``model`` become
    DTensors, so the optimiser must be created after this call. sequence: as ddp, with all rows in every
    worker and a part of each row. Parameters and gradients are float32 in all of them.

    Raises UsageError if the workers do not divide into groups.
    """
    accelerate(model.to(device))
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for block in blocks:
        compiled = cfg.compile or (cfg.compile is None and device.type == "cuda")
        block.recompute = recomputed(cfg) if device.type == "cuda" else cfg.recompute or False
        if compiled:
            # block by block, in place and before sharding: identical blocks share the compiled code
            block.compile()
            ran.note("blocks", "compiled")
    if world_size() == 1:
        return model
    if cfg.parallel == "ddp":
        return DistributedDataParallel(model)
    if cfg.parallel == "sequence":
        # only the first worker starts from M_0
        divided = SequenceParallel(cast(LanguageModel, model))
        return DistributedDataParallel(divided, find_unused_parameters=True)
    # these imports take seconds, and neither a single worker nor DDP needs them
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for tensor in [*model.parameters(), *model.buffers()]:
        # fully_shard keeps each rank's own values, whereas DDP broadcasts rank 0's
        dist.broadcast(tensor.detach(), 0)
    if cfg.parallel == "fsdp":
        mesh = init_device_mesh(device.type, (world_size(),))
    else:
        # groups that each hold one sharded replica
        shared = cfg.shard_workers or int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
        if world_size() % shared:
            raise UsageError(f"optim.shard_workers: {shared} does not divide {world_size()} workers")
        sizes = world_size() // shared, shared
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("copies", "shards"))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@contextmanager
def gradient_sync(module: nn.Module, enabled: bool) -> Iterator[None]:
    """Enable or disable gradient synchronisation in the block; if disabled, gradients accumulate locally."""
    if set_sync := getattr(module, "set_requires_gradient_sync", None):  # FSDP2's
        set_sync(enabled)
    with module.no_sync() if isinstance(module, DistributedDataParallel) and not enabled else nullcontext():
        yield


def clip_gradients(model: nn.Module, limit: float | None) -> float:
    """Clip the gradients to the global norm ``limit``. Returns the norm before clipping, over all shards."""
    parameters = list(model.parameters())  # walking the modules takes longer than a small model's norm
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if whole := getattr(norm, "full_tensor", None):  # a DTensor
        norm = whole()
    if limit is not None:
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm.item()


UNTIMED, WARMUP, TRACED = 2, 1, 3
"""Steps that the profiler skips, warms up in, and traces."""


def device_metrics(device: torch.device, flops_per_second: float | None) -> dict[str, float]:
    """Return the metrics of a GPU; empty for a CPU.

    `memory_gib`: peak allocated memory; `tflops`: TFLOP/s of this worker; `mfu`: its fraction of the device's
    peak, if that is known.
    """
    if device.type != "cuda":
        return {}
    metrics = {"memory_gib": torch.cuda.max_memory_allocated(device) / 2**30}
    if flops_per_second is not None:
        metrics["tflops"] = flops_per_second / 1e12
        if gpu := gpu_named(torch.cuda.get_device_name(device)):
            metrics["mfu"] = flops_per_second / gpu.flops
    return metrics


@contextmanager
def profiled(path: Path) -> Iterator[Callable[[], None]]:
    """Write a profiler trace of a few steps to ``path`` (.json.gz, for Perfetto).

    Yields the function to call after each step.
    """
    # Kineto logs when it starts and stops
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    path.parent.mkdir(parents=True, exist_ok=True)
    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with profile(
        activities=[ProfilerActivity.CPU, *gpu],
        schedule=schedule(wait=0, warmup=WARMUP, active=TRACED, repeat=1, skip_first=UNTIMED),
        on_trace_ready=lambda trace: trace.export_chrome_trace(str(path)),
        record_shapes=True,
    ) as profiler:
        yield profiler.step
