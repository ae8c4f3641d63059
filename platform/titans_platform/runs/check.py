"""Checks before a run, in addition to `Objective.check`: does it fit its workers and its machine?

A run that cannot work fails within a second rather than after hours.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from titans_platform.config import RunConfig
from titans_platform.errors import UsageError
from titans_platform.objectives import build_objective
from titans_platform.provenance import commit
from titans_platform.runs.cost import least_memory, machine_memory, sizes
from titans_platform.runs.ray_session import available
from titans_platform.runs.spec import Resources, RunSpec, concurrency
from titans_platform.training.checkpoint import check_weights


def spec_for(cfg: RunConfig, root: Path, resources: Resources = Resources(), **fields: Any) -> RunSpec:
    """Build a `RunSpec` for a config whose data are prepared under ``root``; ``fields`` are passed to it.

    Raises UsageError if the data are not prepared.
    """
    objective = build_objective(cfg)
    name = objective.run_name(objective.open(root).fingerprint, resources.hashed_workers)
    return RunSpec(cfg, root.resolve(), **{"name": name, "commit": commit(), "resources": resources} | fields)


def check_resources(cfg: RunConfig, resources: Resources, shared: bool = False) -> None:
    """Check that the batch divides among the workers and that the machine or cluster can hold the run.

    ``shared``: workers on this machine may share CPUs, as those of `titans train` do. Raises UsageError, or
    ClusterError on a cluster.
    """
    check_batch(cfg, resources)
    machine = available(resources)
    if not machine.nodes and shared:
        machine = replace(machine, cpus=max(machine.cpus, resources.cpus))
    concurrency(resources, machine)
    if not machine.nodes:
        _check_memory(cfg, resources)


def check_start(cfg: RunConfig) -> None:
    """Check that the checkpoint at ``start_from`` has the weights of the run's model. Raises UsageError."""
    if cfg.start_from is None:
        return
    with torch.device("meta"):
        model = build_objective(cfg).build_model()
    assert isinstance(model, torch.nn.Module)
    try:
        check_weights(Path(cfg.start_from), model)
    except UsageError as error:
        raise UsageError(f"start_from: {error}") from None


def check_batch(cfg: RunConfig, resources: Resources) -> None:
    """Check that the rows of a step divide among workers and micro-batches. Raises UsageError."""
    for workers in range(resources.min_workers, resources.max_workers + 1):
        _check_share(cfg, workers)


def _check_share(cfg: RunConfig, workers: int) -> None:
    rows, micro = cfg.optim.global_batch_size, cfg.optim.micro_batch_size
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
        raise UsageError(f"optim.micro_batch_size: {micro} does not divide the {share} rows of a worker")


def _check_memory(cfg: RunConfig, resources: Resources) -> None:
    """Raise UsageError if the lower bound on the memory of a worker exceeds what this machine has."""
    workers = resources.max_workers
    rows = cfg.optim.micro_batch_size or cfg.optim.global_batch_size // workers
    on_gpu = bool(resources.gpus_per_worker) and torch.cuda.is_available()
    have = torch.cuda.mem_get_info()[1] if on_gpu else machine_memory() // workers
    needed = least_memory(cfg, resources)
    if needed.total <= have:
        return
    if needed.model + needed.process > have:
        field, tokens = "model" if needed.model > have else "workers", ""
    else:
        field, tokens = "data.sequence_length", f" and {rows * cfg.row_tokens:,} tokens at once"
    least = needed.total if tokens else needed.model + needed.process
    raise UsageError(
        f"{field}: {sizes(cfg).parameters:,} parameters{tokens} take at least {least / 2**30:,.1f} GiB to "
        f"train, a worker here has {have / 2**30:,.1f} GiB; make it smaller, or train on a cluster"
    )
