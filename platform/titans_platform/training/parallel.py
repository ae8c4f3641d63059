"""How a model is trained by several workers: a copy on each (DDP), or its parameters shared out (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from titans_core.blocks import Block


def world_size() -> int:
    """Workers of this run; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This worker among them; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def parallelize(model: nn.Module, kind: str, device: torch.device) -> nn.Module:
    """Move ``model`` to ``device`` and prepare it for all workers; the module that training calls.

    ddp: every worker holds the model and the returned wrapper averages gradients. fsdp: each block is a
    group of parameters that is gathered for its forward and backward pass, and what is outside the blocks
    (a tied embedding and head among it) is the root's group. The parameters of ``model`` become DTensors,
    so an optimiser must be made after this call. Both keep parameters and gradients in float32.
    """
    model.to(device)
    if world_size() == 1:
        return model
    if kind == "ddp":
        return DistributedDataParallel(model)
    # seconds of imports that one worker, and DDP, do without
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for tensor in [*model.parameters(), *model.buffers()]:
        # fully_shard keeps each worker's own values, DDP those of the first
        dist.broadcast(tensor.detach(), 0)
    mesh = init_device_mesh(device.type, (world_size(),))
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


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
