"""Evaluation by all workers of a process group: each measures its share, and all get every result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from titans_platform.errors import TitansError

Batch = TypeVar("Batch")
Result = TypeVar("Result")


def measure_shared(batches: Iterable[Batch], measure: Callable[[Batch], Result]) -> list[Result]:
    """``measure`` of every batch, in order and on every worker; worker r measures r, r + W, r + 2W, ...

    A batch is measured as it is given, by one worker, so the results do not depend on W. All workers make
    the same number of passes, since those of a sharded model need all of them: one that has no batch left
    measures another's and drops the result.

    Raises:
        TitansError: another worker could not measure; the own error is raised as it is.
    """
    rank, workers = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    batches, own, total = iter(batches), [], 0
    error: Exception | None = None
    try:
        while group := list(islice(batches, workers)):
            total += len(group)
            own.append(measure(group[min(rank, len(group) - 1)]))
    except Exception as raised:
        error = raised
    gathered = _gather(own, error)
    return [gathered[i % workers][i // workers] for i in range(total)]


def measure_alone(model: nn.Module, measure: Callable[[], Result]) -> Result:
    """What ``measure`` gives on the first worker, on every worker.

    The others wait, so that it can time what it does; of a sharded model all take part.
    """
    if not dist.is_initialized():
        return measure()
    found, error = None, None
    if dist.get_rank() == 0 or is_sharded(model):
        try:
            found = measure()
        except Exception as raised:
            error = raised
    return _gather(found, error)[0]


def is_sharded(model: nn.Module) -> bool:
    """The workers share the model's parameters out (FSDP2), so that each pass needs all of them."""
    return bool(_sharded(model))


def reshard(model: nn.Module) -> None:
    """Free what the last pass gathered of the parameters; after a pass without a backward nothing else does."""
    for module in _sharded(model):
        module.reshard()


def _sharded(model: nn.Module) -> list[Any]:
    if not dist.is_initialized():
        return []
    # a second of imports that a single worker need not wait for
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _gather(found: Any, error: Exception | None) -> list[Any]:
    """``found`` of every worker, unless one has an error: a worker that raised alone would leave the others
    waiting for it."""
    if not dist.is_initialized():
        outcomes = [(found, error and str(error))]
    else:
        outcomes = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, (found, error and str(error)))
    if error:
        raise error
    for rank, (_, reason) in enumerate(outcomes):
        if reason is not None:
            raise TitansError(f"evaluation failed on worker {rank}: {reason}")
    return [result for result, _ in outcomes]
