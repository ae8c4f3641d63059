"""Every check that is made before a run: what would be found after hours is found in a second.

Three floors, each usable alone: the config by itself, the config on its resources and machine, the config
with its data.
"""

from __future__ import annotations

import glob
import os
import random
from functools import cache
from pathlib import Path
from typing import Any

import torch

from titans_core import LanguageModel, ModelConfig
from titans_platform.config import RunConfig
from titans_platform.data import PreparedData, open_prepared
from titans_platform.errors import UsageError, within
from titans_platform.evals import (
    GeneratedTask,
    build_generated,
    build_task,
    eval_version,
    row_length,
)
from titans_platform.evals.perplexity import Perplexity
from titans_platform.provenance import commit
from titans_platform.runs.ray_session import available
from titans_platform.runs.resources import Resources, concurrency
from titans_platform.runs.spec import RunSpec

BYTES_A_PARAMETER = 16
"""A weight, its gradient and AdamW's two moments, in float32."""


def run_name(cfg: RunConfig, data_fingerprint: str, resources: Resources = Resources()) -> str:
    """The run's name: the hash of all that its numbers are a function of."""
    return cfg.fingerprint(data_fingerprint, eval_version(cfg.eval))


def spec_for(cfg: RunConfig, root: Path, resources: Resources = Resources(), **fields: Any) -> RunSpec:
    """The run of a config whose data are prepared under ``root``; ``fields`` are those of `RunSpec`.

    Raises UsageError where the data are not prepared.
    """
    data = open_prepared(cfg.data, root)
    name = run_name(cfg, data.fingerprint, resources)
    return RunSpec(cfg, root.resolve(), **{"name": name, "commit": commit(), "resources": resources} | fields)


def build_model(cfg: RunConfig, data: PreparedData) -> LanguageModel:
    """The run's model at its initial weights. Raises UsageError: a small vocabulary, an unknown variant."""
    needed = data.tokenizer.vocab_size
    if cfg.model.vocab_size < needed:
        raise UsageError(
            f"model.vocab_size: {cfg.model.vocab_size} is less than the {needed} of tokenizer "
            f"{cfg.data.tokenizer}; set it to {needed}"
        )
    try:
        return LanguageModel(cfg.model)
    except ValueError as error:
        raise UsageError(f"model.{error}") from None


def parameters(model: ModelConfig) -> int:
    """Parameters of a model, without memory for them. Raises UsageError for what a part refuses."""
    try:
        return _parameters(model.model_dump_json())
    except ValueError as error:
        raise UsageError(f"model.{error}") from None


@cache
def _parameters(model: str) -> int:
    return build_on_meta(ModelConfig.model_validate_json(model)).num_parameters()


def build_on_meta(model: ModelConfig) -> LanguageModel:
    """The model without memory for its weights: sizes can be asked of it. Raises ValueError."""
    with torch.device("meta"):
        return LanguageModel(model)


def check_config(cfg: RunConfig) -> None:
    """What the config gets wrong by itself: a variant, a task, an option, a source that is not there.

    Raises UsageError that names the field.
    """
    parameters(cfg.model)
    for column, tasks in cfg.eval.columns.items():
        for i, task in enumerate(tasks):
            with within(f"eval.columns.{column}.{i}"):
                build_task(task)
    for i, source in enumerate(cfg.data.sources):
        for j, task in enumerate(source.tasks):
            with within(f"data.sources.{i}.tasks.{j}"):
                build_generated(task)


def check_sources(cfg: RunConfig) -> None:
    """Whether the files that the config names are on this machine. Raises UsageError."""
    for i, source in enumerate(cfg.data.sources):
        if source.path and not glob.glob(source.path, recursive=True):
            raise UsageError(f"data.sources.{i}.path: no file {source.path}")
    tokenizer = cfg.data.tokenizer
    if tokenizer.endswith((".model", ".json")) and not Path(tokenizer).is_file():
        raise UsageError(f"data.tokenizer: no file {tokenizer}; give a path, or `byte`")


def check_resources(cfg: RunConfig, resources: Resources) -> None:
    """Whether the batch can be shared by the workers, and the run placed where it would run.

    Raises UsageError, for a cluster ClusterError.
    """
    check_batch(cfg, resources)
    machine = available(resources)
    concurrency(resources, machine)
    if not machine.nodes:
        _check_memory(cfg, resources)


def check_batch(cfg: RunConfig, resources: Resources) -> None:
    """Whether the rows of a step divide among workers and micro-batches. Raises UsageError."""
    rows, workers, micro = cfg.optim.global_batch_size, resources.workers, cfg.optim.micro_batch_size
    if rows < workers:
        raise UsageError(f"optim.global_batch_size: {rows} rows cannot be shared by {workers} workers")
    if rows % workers:
        raise UsageError(f"optim.global_batch_size: {rows} rows do not divide among {workers} workers")
    if micro and (rows // workers) % micro:
        raise UsageError(
            f"optim.micro_batch_size: {micro} does not divide the {rows // workers} rows of a worker"
        )


def _check_memory(cfg: RunConfig, resources: Resources) -> None:
    """Refuse what this machine cannot hold at the very least."""
    count = parameters(cfg.model)
    rows = cfg.optim.micro_batch_size or cfg.optim.global_batch_size // resources.workers
    tokens = rows * cfg.data.sequence_length
    # what the backward pass needs at least: the residual stream of each block, the logits
    activations = 4 * tokens * (cfg.model.d_model * cfg.model.n_layers + cfg.model.vocab_size)
    have = _memory(resources)
    for field, need in (
        ("model", BYTES_A_PARAMETER * count),
        ("data.sequence_length", BYTES_A_PARAMETER * count + activations),
    ):
        if need > have:
            what = f"{count:,} parameters" + (f" and {tokens:,} tokens at once" if field != "model" else "")
            raise UsageError(
                f"{field}: {what} take at least {need / 2**30:,.0f} GiB to train, a worker here has "
                f"{have / 2**30:,.0f} GiB; make it smaller, or train on a cluster"
            )


def _memory(resources: Resources) -> int:
    """Bytes a worker on this machine may take at most."""
    if resources.gpus_per_worker and torch.cuda.is_available():
        return torch.cuda.mem_get_info()[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_data(cfg: RunConfig, data: PreparedData) -> None:
    """What only the prepared data can show: the vocabulary, the room for items. Raises UsageError."""
    with torch.device("meta"):
        build_model(cfg, data)
    for column, tasks in cfg.eval.columns.items():
        for i, task in enumerate(tasks):
            with within(f"eval.columns.{column}.{i}"):
                built = build_task(task)
                if isinstance(built, GeneratedTask):
                    _check_fits(built, task.lengths, cfg, data)
            if isinstance(built, Perplexity):
                data.validation(1)


def _check_fits(task: GeneratedTask, lengths: tuple[float, ...], cfg: RunConfig, data: PreparedData) -> None:
    """Make one item of each length: what does not fit would be found when the training is over."""
    for multiple in lengths:
        task.item(random.Random(0), row_length(multiple, cfg.data.sequence_length), data.tokenizer)
