"""What is checked before a run, beside `Objective.check`: whether it fits its workers and its machine.

What would be found after hours is found in a second.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from titans_core import Model
from titans_platform.config import EvalConfig, OptimConfig, RunConfig
from titans_platform.errors import UsageError
from titans_platform.objectives import build_objective
from titans_platform.provenance import commit
from titans_platform.runs.ray_session import available
from titans_platform.runs.spec import Resources, RunSpec, concurrency
from titans_platform.training.checkpoint import check_weights

PROCESS_BYTES = 300 * 2**20
"""A worker's own: the interpreter, torch, Ray."""
BYTES_A_PARAMETER = 16
"""A weight, its gradient and AdamW's two moments, in float32."""


def spec_for(cfg: RunConfig, root: Path, resources: Resources = Resources(), **fields: Any) -> RunSpec:
    """The run of a config whose data are prepared under ``root``; ``fields`` are those of `RunSpec`.

    Raises UsageError where the data are not prepared.
    """
    objective = build_objective(cfg)
    name = objective.run_name(objective.open(root).fingerprint, resources.named)
    return RunSpec(cfg, root.resolve(), **{"name": name, "commit": commit(), "resources": resources} | fields)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run's model."""

    parameters: int
    state_bytes: int
    """Bytes that one sequence carries after a training length."""


def sizes(cfg: RunConfig) -> Sizes:
    """The sizes of the run's model, quick however large it is. Raises UsageError."""
    # of the config only what a model can be a function of: a grid has few models and many cells
    of = cfg.model_copy(update={"seed": 0, "optim": OptimConfig(), "eval": EvalConfig()})
    return _sizes(of.model_dump_json())


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


def check_resources(cfg: RunConfig, resources: Resources, shared: bool = False) -> None:
    """Whether the batch can be shared by the workers, and the run placed where it would run.

    ``shared``: on this machine workers may share CPUs, as those of `titans train` do. Raises UsageError, for
    a cluster ClusterError.
    """
    check_batch(cfg, resources)
    machine = available(resources)
    if not machine.nodes and shared:
        machine = replace(machine, cpus=max(machine.cpus, resources.cpus))
    concurrency(resources, machine)
    if not machine.nodes:
        _check_memory(cfg, resources)


def check_start(cfg: RunConfig) -> None:
    """Whether the checkpoint at ``start_from`` has the weights of the run's model. Raises UsageError."""
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
    """Whether the rows of a step divide among workers and micro-batches. Raises UsageError."""
    for workers in range(resources.least, resources.most + 1):
        _check_share(cfg, workers)


def _check_share(cfg: RunConfig, workers: int) -> None:
    rows, micro = cfg.optim.global_batch_size, cfg.optim.micro_batch_size
    if rows < workers:
        raise UsageError(f"optim.global_batch_size: {rows} rows cannot be shared by {workers} workers")
    if rows % workers and cfg.optim.parallel == "fsdp":
        # each forward pass gathers parameters from all workers, so all must make as many
        raise UsageError(
            f"optim.global_batch_size: {rows} rows do not divide among {workers} workers, which "
            "optim.parallel fsdp needs; give a multiple"
        )
    share = -(-rows // workers)
    if micro and share % micro:
        raise UsageError(f"optim.micro_batch_size: {micro} does not divide the {share} rows of a worker")


def _check_memory(cfg: RunConfig, resources: Resources) -> None:
    """Refuse what this machine cannot hold at the very least."""
    count, workers = sizes(cfg).parameters, resources.most
    rows = cfg.optim.micro_batch_size or cfg.optim.global_batch_size // workers
    tokens = rows * cfg.data.sequence_length
    on_gpu = bool(resources.gpus_per_worker) and torch.cuda.is_available()
    have = torch.cuda.mem_get_info()[1] if on_gpu else _machine_memory() // workers
    model = BYTES_A_PARAMETER * count + (0 if on_gpu else PROCESS_BYTES)
    activations = 4 * rows * build_objective(cfg).least_activations()
    field = "model" if BYTES_A_PARAMETER * count > have else "workers" if model > have else None
    if field is None and model + activations > have:
        field, model = "data.sequence_length", model + activations
    if field:
        tokens_too = f" and {tokens:,} tokens at once" if field == "data.sequence_length" else ""
        raise UsageError(
            f"{field}: {count:,} parameters{tokens_too} take at least {model / 2**30:,.1f} GiB to train, a "
            f"worker here has {have / 2**30:,.1f} GiB; make it smaller, or train on a cluster"
        )


def _machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
