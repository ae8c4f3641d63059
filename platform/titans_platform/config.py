"""What a run is, in data: model, data, optimiser, evaluation, seed. Nothing here knows a path of storage."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, model_validator

from titans_core.config import Frozen, ModelConfig, PositiveInt
from titans_kernels.registry import source_file
from titans_platform.errors import UsageError
from titans_platform.files import read_json

Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1, le=10**12)]
"""Steps, rows or tokens: more than any run has, so that a slip of the keyboard is seen."""
NonNegative = Annotated[float, Field(ge=0)]


DEFAULTS_VERSION = 4
"""Raise it when the default of a field changes: names leave out what is at its default, and a run that left
the field out gives other numbers from then on. Raise it too when a variant computes something else.
`tests/runs/test_names.py` pins the defaults."""


NOT_IN_NAMES: dict[str, Any] = {
    **dict.fromkeys(("data", "checkpoint", "log", "start_from"), True),
    "eval": {"every"},
    "optim": {"recompute"},
}
"""Fields that change no number, and those that enter a name by their content."""

_SAVED = 10
"""Checkpoints of a run whose config leaves that open; in a long one there is one every 500 steps."""

VOCABULARIES = {"byte": 260, "dna": 8}
"""Ids of the tokenizers without a file: bytes or letters, document start, pad, up to a multiple of 4."""


class TaskConfig(Frozen):
    """A task of the registry (`titans_platform.evals`), its options, and the lengths it is asked at."""

    task: str
    options: dict[str, JsonValue] = Field(default_factory=dict)
    lengths: tuple[Annotated[float, Field(gt=0)], ...] = (1.0,)
    """Multiples of the training length; each is a separate measurement, and their mean the task's value."""
    weight: NonNegative = 1.0
    """Share of the rows of a `task` source; evaluation does not use it."""


class SourceConfig(Frozen):
    """Where training rows come from."""

    kind: Literal["corpus", "stdlib", "files", "hub", "task"]
    """corpus: the prose and code that the platform ships; stdlib: the source text of the Python that runs."""
    weight: NonNegative = 1.0
    """Share of the training rows; weights need not add up to 1. 0: validation only."""
    path: str | None = None
    """files: a file, folder or glob of .txt, .py, .jsonl, .parquet, .arrow (also .gz, .xz), or a URL of one,
    s3://bucket/folder, where the package is installed that fsspec reads it with."""
    dataset: str | None = None
    """hub: the dataset's name, e.g. HuggingFaceFW/fineweb-edu."""
    subset: str | None = None
    """hub: a configuration of the dataset. corpus: prose or code; None: both."""
    revision: str | None = None
    """hub: a commit or a branch; the newest commit where None, which the manifest records."""
    split: str = "train"
    text_field: str = "text"
    max_tokens: PositiveInt | None = None
    """Stop after so many tokens."""
    validation_fraction: Fraction = 0.05
    """Share of the documents (whole files) kept for validation; of a source of one document, the last part of
    its text. Task sources have none."""
    tasks: tuple[TaskConfig, ...] = ()
    """task: what to generate; each row is one item of exactly one training length."""
    rows: PositiveInt | None = None
    """task: items to generate; training goes round them again when they run out."""
    item_length: PositiveInt | None = None
    """task: tokens of an item; None: data.sequence_length. Longer items need ``data.rows: streams``: they are
    read row by row on a carried state."""

    @model_validator(mode="after")
    def _complete(self) -> SourceConfig:
        needed = {"files": "path", "hub": "dataset", "task": "tasks"}.get(self.kind)
        if needed and not getattr(self, needed):
            raise ValueError(f"{needed}: a source of kind {self.kind} needs it")
        if self.kind == "corpus" and self.subset not in (None, "prose", "code"):
            raise ValueError(f"subset: the corpus has prose and code, not {self.subset}")
        if self.kind == "task" and self.rows is None:
            raise ValueError("rows: a source of kind task needs it")
        return self

    def identity(self) -> dict[str, Any]:
        """What decides the documents it gives. A field added since is left out at its default."""
        added = {key for key in ("revision", "item_length") if not getattr(self, key)}
        return self.model_dump(mode="json", exclude={"weight"} | added)


class DataConfig(Frozen):
    """Sources, tokenizer and row length."""

    sources: Annotated[tuple[SourceConfig, ...], Field(min_length=1)] = (SourceConfig(kind="corpus"),)
    tokenizer: str = "byte"
    """`byte`, `dna`, the path of a SentencePiece .model or a tokenizer.json, or a Hub repository that has
    one."""
    sequence_length: Count = 4096
    """T, tokens of a training row."""
    packing: Literal["borders", "plain"] = "borders"
    """Documents: each begins afresh, or one follows the other as if they were one text."""
    rows: Literal["shuffled", "streams"] = "shuffled"
    """shuffled: rows in random order, each read from the initial state. streams: each row of a batch goes on
    where it ended at the step before, and the state is carried from step to step; with ``packing: borders`` a
    document begins on a row of its own and resets the state, with ``plain`` the state is carried across."""
    seed: int = 0
    """Seed of what is generated and of how documents are split; the order of rows takes the run's seed."""
    store: str | None = None
    """Where prepared shards are kept: a folder, s3://bucket/folder, gs://bucket/folder; None: `data/` under
    --root. It changes no number, and so no name."""
    cache_gb: Annotated[float, Field(gt=0)] = 20.0
    """Disk that shards of a remote store may take on each node, in the folder TITANS_CACHE names."""

    on_corrupt: Literal["refuse"] = "refuse"
    """Accepted for configs of earlier versions; damaged shards are always an error."""

    @model_validator(mode="after")
    def _long_items_need_streams(self) -> DataConfig:
        for i, source in enumerate(self.sources):
            if source.item_length not in (None, self.sequence_length) and self.rows != "streams":
                raise ValueError(
                    f"sources.{i}.item_length: items of {source.item_length} tokens do not fit in rows of "
                    f"{self.sequence_length}; set data.rows to streams, or data.sequence_length"
                )
        return self

    def item_tokens(self, source: SourceConfig) -> int:
        """Tokens of an item of a task source."""
        return source.item_length or self.sequence_length


class OptimConfig(Frozen):
    """AdamW with linear warm-up and a decay; the paper's values by default."""

    steps: Count = 1000
    global_batch_size: Count = 32
    """Rows of one optimiser step, over all workers and micro-batches."""
    micro_batch_size: Count | None = None
    """Rows of one forward pass; global_batch_size where None."""
    bptt_rows: PositiveInt = 1
    """data.rows: streams. Rows of each stream that one step reads and backpropagates through; the state is
    detached between steps (truncated backpropagation through time)."""
    reset_probability: Fraction = 0.0
    """data.rows: streams. The probability with which a stream begins anew from the initial state at a step,
    so that M_0 and short contexts stay trained."""
    carry_after: Annotated[int, Field(ge=0)] = 0
    """data.rows: streams. Steps before which no state is carried."""
    lr: Annotated[float, Field(gt=0)] = 4e-4
    schedule: Literal["cosine", "linear", "constant", "wsd", "halving"] = "cosine"
    """The rate after the warm-up: falling to min_lr_ratio, constant, constant with a decay at the end, or
    halved after each tenth of the steps."""
    min_lr_ratio: Fraction = 0.1
    warmup_fraction: Fraction = 0.05
    """Share of the steps over which the rate rises to lr."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """In place of warmup_fraction, so that a run with more steps has the same warm-up."""
    weight_decay: NonNegative = 0.1
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    grad_clip: Annotated[float, Field(gt=0)] | None = 1.0
    precision: Literal["fp32", "bf16"] = "fp32"
    on_divergence: Literal["stop", "skip", "rewind"] = "stop"
    """When the loss or its gradient is no number, or a spike: end the run; leave the batch out; or go back to
    the last checkpoint that was due, and leave out what came since. The batch is kept in the run's folder."""
    spike: Annotated[float, Field(gt=1)] | None = None
    """A loss above so many times the median of the last 64 steps is a spike; None: none is."""
    parallel: Literal["ddp", "fsdp", "hsdp"] = "ddp"
    """With several workers: each holds the whole model (ddp), or a share of its parameters (fsdp, FSDP2), or
    the workers of a node share one copy (hsdp)."""
    shard_workers: PositiveInt | None = None
    """hsdp: neighbouring workers that share one copy; None: those of a node."""
    recompute: bool = False
    """Keep only the input of each block and compute the rest again in the backward pass: less memory for a
    third more work. It changes no number, and so no name."""
    compile: bool | None = None
    """Compile the blocks with torch.compile; None: on a GPU. Sums are rounded otherwise."""


class EvalConfig(Frozen):
    """The columns of the table: each a list of tasks whose mean is the column's value."""

    columns: dict[str, tuple[TaskConfig, ...]] = Field(
        default_factory=lambda: {"lm_ppl": (TaskConfig(task="perplexity"),)}
    )
    items: PositiveInt = 200
    """Items a task and length."""
    perplexity_tokens: PositiveInt = 65_536
    """Validation tokens a perplexity is measured on."""
    batch_tokens: PositiveInt = 16_384
    """Tokens of one evaluation batch."""
    seed: int = 0
    every: PositiveInt | None = None
    """Optimiser steps between measurements of the validation loss while training, on perplexity_tokens; None:
    none. It changes no number, and so no name, without ``at: best`` and ``patience``."""
    at: Literal["last", "best"] = "last"
    """Which weights the columns are measured on: those of the last step, or those of the lowest validation
    loss among what ``every`` measures."""
    patience: PositiveInt | None = None
    """Training ends when so many measurements in a row found no lower validation loss; None: it does not."""


class CheckpointConfig(Frozen):
    """How often a run is saved. It changes no number, and so no name, but where on_divergence is rewind."""

    every: PositiveInt | None = None
    """Optimiser steps between checkpoints; None: a tenth of the run, at most 500."""
    keep: PositiveInt = 2
    """The newest checkpoints that are kept."""
    best: bool = True
    """Also keep the one with the lowest validation loss, where ``eval.every`` measures it."""


class LogConfig(Frozen):
    """What MLflow is told beside the numbers. It changes none of them, and so no name."""

    system_metrics: bool = False
    """Use of CPU, memory, disk, network and GPUs, every ten seconds; needs psutil."""


class ObjectiveConfig(Frozen):
    """What the run trains on: a name of `titans_platform.objectives`, or ``module:Class`` of your own."""

    kind: str = "next_token"
    options: dict[str, JsonValue] = Field(default_factory=dict)


class RunConfig(Frozen):
    """One run, whole: what its name and every number it gives are a function of."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    seed: int = 0
    threads: PositiveInt = 1
    """CPU threads of a worker: sums are taken in another order with another number of them."""
    start_from: str | None = None
    """Begin with the weights of another run, at its newest checkpoint: its name, folder or MLflow run id, or
    the folder of one checkpoint. The checkpoint's content is part of the name."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    objective: ObjectiveConfig = ObjectiveConfig()

    @model_validator(mode="after")
    def _streams_are_read(self) -> RunConfig:
        for key in ("bptt_rows", "reset_probability", "carry_after"):
            default = OptimConfig.model_fields[key].default
            if getattr(self.optim, key) != default and self.data.rows != "streams":
                raise ValueError(
                    f"optim.{key}: {getattr(self.optim, key)} has no effect on shuffled rows, which all "
                    "start from the initial state; set data.rows to streams"
                )
        return self

    @model_validator(mode="after")
    def _best_is_kept(self) -> RunConfig:
        needs = "at" if self.eval.at == "best" else "patience" if self.eval.patience else ""
        if needs and not (self.eval.every and self.checkpoint.best):
            raise ValueError(
                f"eval.{needs}: {getattr(self.eval, needs)} needs eval.every, and checkpoint.best"
            )
        return self

    @property
    def row_tokens(self) -> int:
        """Tokens of a row of one optimiser step: those that gradients flow through."""
        return self.data.sequence_length * self.optim.bptt_rows

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimiser step, over all workers."""
        return self.optim.global_batch_size * self.row_tokens

    @property
    def trained_context(self) -> int:
        """Tokens that training carries a state over: a row, or of streams about the longest stretch without a
        reset by chance. Borders of documents may make it less."""
        if self.data.rows == "shuffled":
            return self.row_tokens
        steps, p = max(1, self.optim.steps - self.optim.carry_after), self.optim.reset_probability
        # of n geometric stretches the longest has a mean of about ln(n) / p
        longest = math.log(max(math.e, steps * self.optim.global_batch_size * p)) / p if p else steps
        return round(min(steps, longest)) * self.row_tokens

    @property
    def tokens(self) -> int:
        """Tokens the run trains on."""
        return self.optim.steps * self.tokens_per_step

    @property
    def checkpoint_interval(self) -> int:
        """Optimiser steps between checkpoints."""
        return self.checkpoint.every or min(500, max(1, self.optim.steps // _SAVED))

    def fingerprint(self, data_fingerprint: str, eval_version: str, workers: int | str = 1) -> str:
        """Hash of all that decides the run's numbers: 12 hex digits, the cell's name.

        Only fields that differ from their defaults enter, so that a new field renames nothing. The data
        enters by its fingerprint (content, tokenizer, weights of the sources, T), never by the paths it was
        read from; a variant named by import path also by its source; ``workers`` where there are several,
        since they take sums in another order, "elastic" where there may be more or fewer; the checkpoint that
        the run starts from by its files, so that ``start_from`` has to be its folder (`runs.load.located`).
        Raises UsageError for a variant that cannot be imported, or where there is no such checkpoint.
        """
        parts: dict[str, Any] = {
            "defaults": DEFAULTS_VERSION,
            "run": self.model_dump(mode="json", exclude=NOT_IN_NAMES, exclude_defaults=True),
            "data": data_fingerprint,
            "eval": eval_version,
        }
        if sources := _sources(parts["run"]):
            parts["sources"] = sources
        if workers not in (0, 1):
            parts["workers"] = workers
        if self.optim.on_divergence == "rewind":
            # where it goes back to
            parts["checkpoints"] = self.checkpoint_interval
        if self.eval.at == "best" or self.eval.patience:
            # among which weights the best are looked for
            parts["validated"] = self.eval.every
        if self.start_from:
            parts["start_from"] = _content_of(self.start_from)
        return digest(parts)


def _content_of(checkpoint: str) -> str:
    """The hashes in a checkpoint's manifest, as one."""
    manifest = read_json(Path(checkpoint) / "manifest.json") or {}
    if not isinstance(files := manifest.get("files"), dict):
        raise UsageError(f"start_from: {checkpoint} is no checkpoint; give a run, or a folder step-XXXXXXXX")
    return digest(files)


def _sources(value: Any) -> dict[str, str]:
    """Hashes of the files behind import paths in a config (a variant, a rule, a task, an objective).

    The package's own are known by the commit; a file of one's own may change between two runs.
    """
    if isinstance(value, dict):
        return {path: found for inner in value.values() for path, found in _sources(inner).items()}
    if isinstance(value, list):
        return {path: found for inner in value for path, found in _sources(inner).items()}
    try:
        file = source_file(value) if isinstance(value, str) else None
    except ValueError as error:
        raise UsageError(str(error)) from None
    return {value: hashlib.sha256(file.read_bytes()).hexdigest()[:12]} if file else {}


def digest(value: Any, length: int = 12) -> str:
    """Hash of a JSON value that does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:length]
