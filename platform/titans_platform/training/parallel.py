"""How a model is trained on its devices: compiled, computed again, copied to each worker or shared out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from titans_core.blocks import Block
from titans_kernels import ran
from titans_platform.config import OptimConfig
from titans_platform.errors import UsageError


def world_size() -> int:
    """Workers of this run; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This worker among them; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def parallelize(model: nn.Module, cfg: OptimConfig, device: torch.device) -> nn.Module:
    """Move ``model`` to ``device`` and prepare it for all workers; the module that training calls.

    ddp: every worker holds the model and the returned wrapper averages gradients. fsdp: each block is a
    group of parameters that is gathered for its forward and backward pass, and what is outside the blocks
    (a tied embedding and head among it) is the root's group. hsdp: the same among `shard_workers`
    neighbours, and gradients are averaged over these groups. With either the parameters of ``model`` become
    DTensors, so an optimiser must be made after this call. All keep parameters and gradients in float32.

    Raises UsageError: the workers cannot be grouped, or share the rows of a batch.
    """
    model.to(device)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for block in blocks:
        block.recompute = cfg.recompute
        if cfg.compile or (cfg.compile is None and device.type == "cuda"):
            # each in place, before it is sharded: equal blocks share the compiled code
            block.compile()
            ran.note("blocks", "compiled")
    if world_size() == 1:
        return model
    if cfg.parallel == "ddp":
        return DistributedDataParallel(model)
    if cfg.global_batch_size % world_size():
        # each forward pass gathers parameters from all workers, so all must make as many
        raise UsageError(
            f"optim.global_batch_size: {cfg.global_batch_size} rows do not divide among {world_size()} "
            f"workers, which optim.parallel {cfg.parallel} needs; give a multiple"
        )
    # seconds of imports that one worker, and DDP, do without
    from torch.distributed.fsdp import fully_shard

    for tensor in [*model.parameters(), *model.buffers()]:
        # fully_shard keeps each worker's own values, DDP those of the first
        dist.broadcast(tensor.detach(), 0)
    mesh = _mesh(cfg, device)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _mesh(cfg: OptimConfig, device: torch.device) -> Any:
    """The workers as one group, or for hsdp as groups of which each shares one copy of the model."""
    from torch.distributed.device_mesh import init_device_mesh

    if cfg.parallel == "fsdp":
        return init_device_mesh(device.type, (world_size(),))
    shared = cfg.shard_workers or int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
    if world_size() % shared:
        raise UsageError(f"optim.shard_workers: {world_size()} workers make no groups of {shared}")
    return init_device_mesh(
        device.type, (world_size() // shared, shared), mesh_dim_names=("copies", "shards")
    )


@contextmanager
def gradient_sync(module: nn.Module, enabled: bool) -> Iterator[None]:
    """Whether backward passes in this block exchange gradients; without, they add up on each worker."""
    if set_sync := getattr(module, "set_requires_gradient_sync", None):  # FSDP2's
        set_sync(enabled)
    if isinstance(module, DistributedDataParallel) and not enabled:
        with module.no_sync():
            yield
    else:
        yield


def clip_gradients(model: nn.Module, limit: float | None) -> float:
    """Norm of all gradients, over all shards, before they are scaled down to ``limit``."""
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    if whole := getattr(norm, "full_tensor", None):  # a DTensor
        norm = whole()
    if limit is not None:
        nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm)
    return norm.item()
