"""The config of a run: model, data, optimiser, evaluation, seed. It holds no storage paths."""

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
from titans_platform.files import hash_of, read_json
from titans_platform.text import flatten, texts

Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1, le=10**12)]
"""Steps, rows or tokens; the upper limit catches typing errors."""
NonNegative = Annotated[float, Field(ge=0)]


DEFAULTS_VERSION = 4
"""Increment it when the default of a field changes, since hashes leave out fields at their defaults, and when
a variant's computation changes. `tests/runs/test_names.py` pins the defaults."""


NOT_IN_NAMES: dict[str, Any] = dict.fromkeys(("data", "checkpoint", "log", "start_from"), True)
NOT_IN_NAMES |= {"eval": {"every"}, "optim": {"recompute"}}
"""Fields left out of the hash: they do not affect results, or enter it by their content."""


MAX_VALIDATION_TOKENS = 50_000_000
"""Limit on what is held out of a source with ``max_tokens``; 5% of 15B would be 750M."""

VOCABULARIES = {"byte": 260, "dna": 8}
"""Vocabulary sizes of the built-in tokenizers: bytes or letters, document start, pad, to a multiple of 4."""


class TaskConfig(Frozen):
    """A task of the registry (`titans_platform.tasks`), its options, and the lengths it is evaluated at."""

    task: str
    options: dict[str, JsonValue] = Field(default_factory=dict)
    lengths: Annotated[tuple[Annotated[float, Field(gt=0, le=2**20)], ...], Field(min_length=1)] = (1.0,)
    """Multiples of the training length; each is a separate measurement, and their mean the task's value."""
    weight: NonNegative = 1.0
    """Share of the rows of a `task` source; evaluation does not use it."""


FIELD_KINDS = {
    "path": ["files"], "dataset": ["hub"], "subset": ["hub", "corpus"], "revision": ["hub"], "split": ["hub"],
    "text_field": ["files", "hub"], "tasks": ["task"], "rows": ["task"], "item_length": ["task"],
}  # fmt: skip
"""The kinds of sources that have a field; every kind has the others."""


class SourceConfig(Frozen):
    """A source of training rows."""

    kind: Literal["corpus", "files", "hub", "task"]
    """corpus: the shipped prose and code."""
    weight: NonNegative = 1.0
    """Share of the training rows; weights are normalised. 0: validation only."""
    path: str | None = None
    """files: a file, folder or glob of .txt, .py, .jsonl, .ndjson, .json, .parquet, .arrow (also .gz, .xz,
    .bz2, .zst), or a URL of one, such as s3://bucket/folder, which needs fsspec's package for that protocol
    (s3fs)."""
    dataset: str | None = None
    """hub: the dataset's name, e.g. HuggingFaceFW/fineweb-edu."""
    subset: str | None = None
    """hub: a configuration of the dataset. corpus: prose or code; None: both."""
    revision: str | None = None
    """hub: a commit or a branch; None: the newest commit, which the manifest records."""
    split: str = "train"
    text_field: str = "text"
    max_tokens: PositiveInt | None = None
    """Stop after this many tokens."""
    validation_fraction: Fraction = 0.05
    """Fraction of the documents (whole files) held out for validation; of a source with one document, the end
    of its text. At most about 50M tokens of a source with ``max_tokens``. Task sources hold out none."""
    tasks: tuple[TaskConfig, ...] = ()
    """task: what to generate; each row is one item of exactly one training length."""
    rows: PositiveInt | None = None
    """task: items to generate; training repeats them when they run out."""
    item_length: PositiveInt | None = None
    """task: tokens of an item; None: data.sequence_length. Longer items need ``data.rows: streams``: they are
    read row by row with carried state."""

    @model_validator(mode="after")
    def _complete(self) -> SourceConfig:
        for needed in {"files": ["path"], "hub": ["dataset"], "task": ["tasks", "rows"]}.get(self.kind, ()):
            if not getattr(self, needed):
                raise ValueError(f"{needed}: missing; a source of kind {self.kind} needs it")
        if self.kind == "corpus" and self.subset not in (None, "prose", "code"):
            raise ValueError(f"subset: the corpus has prose and code, not {self.subset}")
        for key, kinds in FIELD_KINDS.items():
            if self.kind not in kinds and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key}: a source of kind {self.kind} has none; leave it out")
        return self

    @property
    def held_out(self) -> float:
        """The fraction that is held out: ``validation_fraction``, or less for MAX_VALIDATION_TOKENS."""
        return min(self.validation_fraction, MAX_VALIDATION_TOKENS / (self.max_tokens or 1))

    def identity(self) -> dict[str, Any]:
        """Return the fields that determine its documents. Later additions are left out at their defaults."""
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
    """borders: each document is read on its own; plain: documents are concatenated as one text."""
    rows: Literal["shuffled", "streams"] = "shuffled"
    """shuffled: rows in random order, each read from the initial state. streams: each row of a batch
    continues the text of the previous step, and the state is carried from step to step; with
    ``packing: borders`` a document starts on a new row and resets the state, with ``plain`` the state is
    carried across documents."""
    seed: int = 0
    """Seed of generated data and of the train/validation split; the order of rows uses the run's seed."""
    store: str | None = None
    """Folder of prepared shards; None: `data/` under --root. Not part of the run's hash."""

    @model_validator(mode="after")
    def _long_items_need_streams(self) -> DataConfig:
        for i, source in enumerate(self.sources):
            if source.item_length not in (None, self.sequence_length) and self.rows != "streams":
                long = f"items of {source.item_length} tokens do not fit in rows of {self.sequence_length}"
                fix = "set data.rows to streams, or data.sequence_length"
                raise ValueError(f"sources.{i}.item_length: {long}; {fix}")
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
    """Rows of one forward pass (the rest is gradient accumulation); None: global_batch_size."""
    bptt_rows: PositiveInt = 1
    """data.rows: streams. Rows of each stream that one step reads and backpropagates through; the state is
    detached between steps (truncated backpropagation through time)."""
    stream_groups: PositiveInt = 1
    """data.rows: streams. Groups of ``global_batch_size`` streams that take turns: step s reads on in group
    s mod stream_groups, whose state has waited. Successive steps then read different documents, as shuffled
    rows do, and a stream is ``stream_groups`` times as short."""
    reset_probability: Fraction = 0.0
    """data.rows: streams. Probability per step that a stream is reset to the initial state,
    so that M_0 and short contexts stay trained."""
    windows: tuple[PositiveInt, ...] = ()
    """Stochastic windows: attention's window (MAC: segment) is drawn from these for each step, and is the
    longest in the last tenth of the steps (SWAX, arXiv 2509.24552). The longest is the model's own, with
    which it is evaluated. Empty: always the model's own."""
    lr: Annotated[float, Field(gt=0)] = 4e-4
    schedule: Literal["cosine", "linear", "constant", "wsd", "halving"] = "cosine"
    """Learning rate after the warm-up: decay to min_lr_ratio (cosine, linear), constant, constant with a
    final decay (wsd), or halved after each tenth of the steps."""
    min_lr_ratio: Fraction = 0.1
    warmup_fraction: Fraction = 0.05
    """Fraction of the steps used for linear warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Overrides warmup_fraction, so that a run with more steps has the same warm-up."""
    weight_decay: NonNegative = 0.1
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    grad_clip: Annotated[float, Field(gt=0)] | None = 1.0
    precision: Literal["fp32", "bf16"] = "fp32"
    parallel: Literal["ddp", "fsdp", "hsdp", "sequence"] = "ddp"
    """With several workers: replicate the model (ddp), shard it over all workers (fsdp, FSDP2), or shard it
    within a node and replicate across nodes (hsdp), or replicate it and give each worker a part of every row
    (sequence), which passes its recurrent state on to the next."""
    shard_workers: PositiveInt | None = None
    """hsdp: workers in a shard group, of consecutive ranks; None: the workers of a node."""
    recompute: bool | Literal["selective"] | None = None
    """Activation checkpointing: keep only the input of each block and recompute the rest in the backward
    pass (true: a third more compute), or keep the results of matrix products, attention and the memory's
    kernels (selective). None: selective in compiled blocks on a GPU. Not part of the run's hash."""
    compile: bool | None = None
    """Compile the blocks with torch.compile; None: only on a GPU. Rounding differs."""


class EvalConfig(Frozen):
    """The columns of the table: each a list of tasks whose mean is the column's value."""

    columns: dict[str, Annotated[tuple[TaskConfig, ...], Field(min_length=1)]] = Field(
        default_factory=lambda: {"lm_ppl": (TaskConfig(task="perplexity"),)}
    )
    items: PositiveInt = 200
    """Items per task and length."""
    perplexity_tokens: PositiveInt = 65_536
    """Validation tokens on which perplexity is measured."""
    batch_tokens: PositiveInt = 16_384
    """Tokens of one evaluation batch."""
    seed: int = 0
    every: PositiveInt | None = None
    """Optimiser steps between measurements of the validation loss during training, on perplexity_tokens;
    None: never. Part of the run's hash only with ``at: best`` or ``patience``."""
    at: Literal["last", "best"] = "last"
    """The weights to evaluate: the last step's, or the ones with the lowest validation loss that ``every``
    measured."""
    patience: PositiveInt | None = None
    """Early stopping: stop after this many measurements without a lower validation loss; None: off."""


class CheckpointConfig(Frozen):
    """Checkpoint interval and retention. Not part of the run's hash."""

    every: PositiveInt | None = None
    """Optimiser steps between checkpoints; None: a tenth of the run, at most 500."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    best: bool = True
    """Also keep the checkpoint with the lowest validation loss, if ``eval.every`` is set."""


class LogConfig(Frozen):
    """Logging beside the run's numbers in MLflow. Not part of the run's hash."""

    loggers: list[str] = Field(default_factory=list)
    """Loggers beside MLflow: ``module:Class`` of a `titans_platform.runs.reporter.Logger`;
    examples/loggers.py has TensorBoard and Weights & Biases."""


class ObjectiveConfig(Frozen):
    """The training objective: a name of `titans_platform.objectives`, or ``module:Class`` of your own."""

    kind: str = "next_token"
    options: dict[str, JsonValue] = Field(default_factory=dict)


class RunConfig(Frozen):
    """The complete config of a run: with the data, it determines the run's name and results."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    seed: Annotated[int, Field(ge=0, lt=2**62)] = 0
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """CPU threads per worker. Part of the run's hash, as the order of summation depends on it."""
    start_from: str | None = None
    """Initialise the weights from the newest checkpoint of another run: its name, folder or MLflow run id, or
    the folder of one checkpoint. The checkpoint's content is part of the run's hash."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    objective: ObjectiveConfig = ObjectiveConfig()

    @model_validator(mode="after")
    def _streams_are_read(self) -> RunConfig:
        if self.data.rows == "streams":
            return self
        for key in ("bptt_rows", "stream_groups", "reset_probability"):
            if (setting := getattr(self.optim, key)) != OptimConfig.model_fields[key].default:
                cause = "has no effect on shuffled rows, which all start from the initial state"
                raise ValueError(f"optim.{key}: {setting} {cause}; set data.rows to streams")
        if self.optim.parallel == "sequence":
            cause = "a row's state from worker to worker, but documents begin inside shuffled rows"
            raise ValueError(f"optim.parallel: sequence passes {cause}; set data.rows to streams")
        return self

    @model_validator(mode="after")
    def _best_is_kept(self) -> RunConfig:
        if not (self.eval.every and self.checkpoint.best):
            if self.eval.at == "best":
                raise ValueError("eval.at: best needs eval.every and checkpoint.best: true")
            if patience := self.eval.patience:
                raise ValueError(f"eval.patience: {patience} needs eval.every and checkpoint.best: true")
        return self

    @property
    def row_tokens(self) -> int:
        """Tokens of a row of one optimiser step, through which gradients flow."""
        return self.data.sequence_length * self.optim.bptt_rows

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimiser step, over all workers."""
        return self.optim.global_batch_size * self.row_tokens

    @property
    def trained_context(self) -> int:
        """Longest context that training carries a state over, in tokens: a row, or with streams about the
        longest span without a random reset. Document borders may shorten it."""
        if self.data.rows == "shuffled":
            return self.row_tokens
        optim, p = self.optim, self.optim.reset_probability
        steps = max(1, optim.steps)
        # the longest of n geometric spans has a mean of about ln(n) / p
        longest = math.log(max(math.e, steps * optim.global_batch_size * p)) / p if p else steps
        return round(min(max(1, steps // optim.stream_groups), longest)) * self.row_tokens

    @property
    def tokens(self) -> int:
        """Tokens the run trains on."""
        return self.optim.steps * self.tokens_per_step

    def fingerprint(self, data_fingerprint: str, eval_version: str, workers: int | str = 1) -> str:
        """Hash of everything that determines the run's results: 12 hex digits, the cell's name.

        Only fields that differ from their defaults are hashed, so that a new field renames no run. The data
        is hashed by its fingerprint (content, tokenizer, source weights, T), never by its paths; a class
        named by import path also by its source; ``workers`` if there are several, since the order of
        summation differs, or "elastic" if their number may change; the checkpoint to start from by its files,
        so that ``start_from`` must be its folder (`runs.load.located`). Raises UsageError for a class that
        cannot be imported or a checkpoint that does not exist.
        """
        parts: dict[str, Any] = {
            "defaults": DEFAULTS_VERSION,
            "run": self.model_dump(mode="json", exclude=NOT_IN_NAMES, exclude_defaults=True),
            "data": data_fingerprint,
            "eval": eval_version,
        }
        if sources := _sources(parts["run"]):
            parts["sources"] = sources
        if files := hashes_of(parts["run"].get("eval")):
            parts["files"] = files
        if workers not in (0, 1):
            parts["workers"] = workers
        if self.eval.at == "best" or self.eval.patience:
            # it determines which weights can be the best
            parts["validated"] = self.eval.every
        if point := self.start_from:
            files = (read_json(Path(point) / "manifest.json") or {}).get("files")
            if not isinstance(files, dict):
                fix = "give a run, or a folder step-XXXXXXXX"
                raise UsageError(f"start_from: {point} is not a checkpoint; {fix}")
            parts["start_from"] = digest(files)
        return digest(parts)


def _sources(value: Any) -> dict[str, str]:
    """Hashes of the files behind import paths in a config (a variant, a rule, a task, an objective).

    Classes of the package are covered by the commit; a user's file may change between two runs.
    """
    try:
        files = {text: file for text in texts(value) if (file := source_file(text))}
    except ValueError as error:
        raise UsageError(str(error)) from None
    return {text: hash_of(file)[:12] for text, file in files.items()}


def hashes_of(options: Any) -> dict[str, str]:
    """Return the hash of each file or folder of files whose path is in the options of tasks."""
    named = ((key.rpartition(".")[2], text) for key, leaf in flatten(options).items() for text in texts(leaf))
    names = (Path(text) for key, text in named if key in ("path", "books") or "/" in text or "." in text)
    # a folder around the runs themselves never stays the same
    known = (name for name in names if name.exists() and not Path.cwd().is_relative_to(name.resolve()))
    below = {str(name): sorted(name.rglob("*")) if name.is_dir() else [name] for name in known}
    return {name: digest([hash_of(p) for p in paths if p.is_file()]) for name, paths in below.items()}


def digest(value: Any, length: int = 12) -> str:
    """Hash of a JSON value that does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:length]
