"""Sequence classification, optionally after next-token pretraining on the training split."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from titans_core import ConvClassifier, Model, Pooling, SequenceClassifier
from titans_core.config import Frozen
from titans_platform.config import Fraction, digest
from titans_platform.data import Tokenizer, load_tokenizer
from titans_platform.errors import UsageError
from titans_platform.evals import Measurement, Task
from titans_platform.evals.registry import Context
from titans_platform.evals.scoring import measure_distributed
from titans_platform.objectives.base import Objective, Report
from titans_platform.objectives.labelled import (
    PARTS,
    UNLABELLED,
    Items,
    Labelled,
    LabelledData,
    Split,
    divide,
    load_items,
    read_file,
    read_hub,
    save_items,
)

OPTIONS = "objective.options"
GENOMIC_BENCHMARKS = (
    "human_enhancers_cohn",
    "human_enhancers_ensembl",
    "human_ensembl_regulatory",
    "human_nontata_promoters",
    "human_ocr_ensembl",
)
"""The five datasets of the paper's Table 4, in its order. They are loaded from the Hub as
`katarinagresova/Genomic_Benchmarks_NAME`: columns seq and label, splits train and test."""
PUBLISHER = "katarinagresova/Genomic_Benchmarks_"


class ClassificationOptions(Frozen):
    """Which sequences, and what is made of them."""

    path: str | None = Field(default=None, exclude=True)
    """A .csv, .jsonl or .parquet file (also .gz, .xz) of sequences and labels."""
    validation_path: str | None = Field(default=None, exclude=True)
    """The same for validation; None: a share of ``path``."""
    test_path: str | None = Field(default=None, exclude=True)
    """The same for the test; None: a share of ``path``."""
    folder: str | None = Field(default=None, exclude=True)
    """Where these files are, if not in the folder of the command."""
    dataset: str | None = Field(default=None, exclude=True)
    """In place of files: one of GenomicBenchmarks' human sets, e.g. human_nontata_promoters, or a dataset of
    the Hub with splits train and test."""
    sequence_field: str | None = Field(default=None, exclude=True)
    """The column of sequences; None: sequence, of a dataset seq."""
    label_field: str = Field(default="label", exclude=True)
    validation_fraction: Fraction = 0.1
    """Share of the sequences kept for validation, by a hash of each and data.seed."""
    test_fraction: Fraction = 0.1
    classes: Annotated[int, Field(ge=2)] = 2
    """K, how many labels there are."""
    pooling: Pooling = "mean"
    """What the head reads: the mean of all positions, or the last."""
    network: Literal["backbone", "cnn"] = "backbone"
    """The model of ``model``, or GenomicBenchmarks' own baseline, which takes of it vocab_size alone."""
    pretrain_steps: Annotated[int, Field(ge=0)] = 0
    """So many of optim.steps, the first, train on next tokens of the training part instead. A run that begins
    from a checkpoint of next-token training (start_from) needs none."""

    @model_validator(mode="after")
    def _consistent(self) -> ClassificationOptions:
        if bool(self.path) == bool(self.dataset):
            raise ValueError("path: give a file of sequences and labels, or dataset in its place")
        if self.network == "cnn" and self.pretrain_steps:
            raise ValueError("pretrain_steps: network cnn predicts no next tokens; set it to 0")
        if self.validation_fraction + self.test_fraction >= 1:
            raise ValueError("validation_fraction: with test_fraction all of the sequences; lower one")
        return self

    @property
    def fields(self) -> tuple[str, str]:
        """Names of the sequence and the label column."""
        return self.sequence_field or ("seq" if self.dataset else "sequence"), self.label_field

    @property
    def hub_name(self) -> str:
        """The dataset's name on the Hub."""
        return f"{PUBLISHER}{self.dataset}" if self.dataset in GENOMIC_BENCHMARKS else str(self.dataset)


class Classification(Objective[LabelledData]):
    """Cross-entropy of each sequence's class in nats; in pretraining steps, of its next tokens."""

    Options = ClassificationOptions
    data_kind = "labelled"
    validation_task = "class_loss"

    def prepare(self, root: Path, report: Report | None = None) -> LabelledData:
        """Read the sequences again and save a copy."""
        split = self._read(root)
        save_items(split, self._index(root))
        return self._data(split)

    def open(self, root: Path) -> LabelledData:
        """Open the copy that `prepare` saved."""
        return self._data(load_items(self._index(root)))

    def build_model(self) -> Model:
        """The backbone with a classification head, or the convolutional baseline."""
        options, model = self.options, self.cfg.model
        try:
            if options.network == "cnn":
                length, pad = self.cfg.data.sequence_length, self.tokenizer().pad
                return ConvClassifier(model.vocab_size, options.classes, length, pad)
            return SequenceClassifier(model, options.classes, options.pooling)
        except ValueError as error:
            field = f"data.sequence_{error}" if options.network == "cnn" else f"model.{error}"
            raise UsageError(field) from None

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that ``data`` names."""
        return load_tokenizer(self.cfg.data.tokenizer)

    def losses(self, model: Callable[..., Any], batch: Labelled) -> Tensor:
        """[B] cross-entropy of each row's class; in pretraining, the mean over its next tokens."""
        if batch.labels[0] == UNLABELLED:
            losses_BT = model(batch.tokens[:, :-1], targets_BT=batch.tokens[:, 1:]).losses
            own_BT = torch.arange(losses_BT.shape[1], device=losses_BT.device) < batch.lengths[:, None] - 1
            return (losses_BT * own_BT).sum(1) / (batch.lengths - 1)
        logits_BK = model(batch.tokens, lengths_B=batch.lengths).logits.float()
        return F.cross_entropy(logits_BK, batch.labels, reduction="none")

    def sample_batch(self, rows: int) -> Labelled:
        """Random tokens of full length, with labels."""
        length = self.cfg.data.sequence_length
        tokens = torch.randint(self.cfg.model.vocab_size, (rows, length))
        return Labelled(tokens, torch.full((rows,), length), torch.zeros(rows, dtype=torch.long))

    def check_sources(self) -> None:
        """Load the tokenizer and read the files completely; a Hub dataset is not requested."""
        self.tokenizer()
        if self.options.path:
            self._read(Path())

    def check(self, data: LabelledData | None = None) -> None:
        """Also check vocabulary size, number of classes, and that some steps train on labels."""
        options, cfg = self.options, self.cfg
        self.reject_data(("sources",), f"reads {OPTIONS}.path")
        if options.pretrain_steps >= (steps := cfg.optim.steps):
            left = f"all {steps} of optim.steps; leave some for the classes"
            raise UsageError(f"{OPTIONS}.pretrain_steps: {left}")
        self.check_vocabulary(self.tokenizer())
        if data is not None and (n := len(data.classes)) != options.classes:
            found = f"the {n} of the sequences ({', '.join(data.classes[:10])})"
            raise UsageError(f"{OPTIONS}.classes: {options.classes} are not {found}; set it to {n}")
        super().check(data)

    def check_task(self, task: Task, lengths: Sequence[float], data: LabelledData | None) -> None:
        """Also reject ``lengths``: sequences have fixed lengths."""
        super().check_task(task, lengths, data)
        if tuple(lengths) != (1.0,):
            raise UsageError("lengths: sequences have the lengths they have; leave it out")

    def _read(self, root: Path) -> Split:
        options, seed = self.options, self.cfg.data.seed
        if options.dataset:
            cache = root / "data" / "huggingface"
            train, test = (read_hub(options.hub_name, s, options.fields, cache) for s in ("train", "test"))
            validation = None
        else:
            train, validation, test = (self._file(name) for name in ("path", "validation_path", "test_path"))
            assert train is not None
        left = 1.0
        if test is None:
            train, test = divide(train, options.test_fraction, seed)
            left -= options.test_fraction
        if validation is None:
            train, validation = divide(train, options.validation_fraction / left, seed)
        return dict(zip(PARTS, (train, validation, test), strict=True))

    def _file(self, option: str) -> Items | None:
        if (name := getattr(self.options, option)) is None:
            return None
        path = Path(self.options.folder or "").expanduser() / name
        return read_file(str(path), self.options.fields, f"{OPTIONS}.{option}")

    def _index(self, root: Path) -> Path:
        options, names = self.options, ("path", "validation_path", "test_path", "folder", "dataset")
        identity = [*(getattr(options, name) for name in names), options.fields, self.cfg.data.seed]
        identity += [options.validation_fraction, options.test_fraction]
        return root / "data" / "labelled" / f"{digest(identity)}.json"

    def _data(self, split: Split) -> LabelledData:
        length, steps = self.cfg.data.sequence_length, self.options.pretrain_steps
        return LabelledData(split, self.tokenizer(), length, steps)


class PartOptions(Frozen):
    """Which items are measured on."""

    part: Literal["test", "validation"] = "test"


class LabelledTask(Task):
    """Mean of a metric over held-out items."""

    Options = PartOptions
    data_kind = "labelled"

    @abstractmethod
    def values(self, logits_BK: Tensor, labels_B: Tensor) -> Tensor:
        """[B] metric of each item."""

    @abstractmethod
    def guess(self, shares_K: Tensor) -> Tensor:
        """[K] logits of a baseline that only knows the class frequencies of the training split."""

    def measure(self, context: Context) -> Measurement:
        """The mean over `config.items` items of the split."""
        data: LabelledData = context.prepared
        rows = context.scorer.rows(context.length)
        batches = data.batches(self.options.part, context.config.items, rows)
        measured = measure_distributed(batches, partial(self._values, context, self.guess(data.shares)))
        values, guesses = (torch.cat(parts) for parts in zip(*measured, strict=True))
        stderr = values.std(correction=0).item() / math.sqrt(len(values))
        return Measurement(values.mean().item(), stderr, guesses.mean().item(), len(values))

    def _values(self, context: Context, guess_K: Tensor, batch: Labelled) -> tuple[Tensor, Tensor]:
        scorer = context.scorer
        tokens, lengths = (x.to(scorer.device) for x in (batch.tokens, batch.lengths))
        logits_BK = scorer.model(tokens, lengths_B=lengths).logits.double().cpu()
        guesses_BK = guess_K.expand_as(logits_BK)
        return self.values(logits_BK, batch.labels), self.values(guesses_BK, batch.labels)


class Accuracy(LabelledTask):
    """Share of the items whose likeliest class is theirs; chance is the class commonest in training."""

    name = "accuracy"

    @property
    def chance(self) -> float:
        """An upper bound: it depends on the items, and `measure` returns it."""
        return 1.0

    def values(self, logits_BK: Tensor, labels_B: Tensor) -> Tensor:
        """[B] 1 if the prediction is right, else 0."""
        return (logits_BK.argmax(1) == labels_B).double()

    def guess(self, shares_K: Tensor) -> Tensor:
        """The class frequencies."""
        return shares_K


class ValidationOptions(PartOptions):
    """The validation part unless it says otherwise."""

    part: Literal["test", "validation"] = "validation"


class ClassLoss(LabelledTask):
    """Cross-entropy of the classes in nats; lower is better. Chance is that of their shares in training."""

    name = "class_loss"
    Options = ValidationOptions

    @property
    def chance(self) -> float:
        """An upper bound: it depends on the items, and `measure` returns it."""
        return math.inf

    def values(self, logits_BK: Tensor, labels_B: Tensor) -> Tensor:
        """[B] cross-entropy in nats."""
        return F.cross_entropy(logits_BK, labels_B, reduction="none")

    def guess(self, shares_K: Tensor) -> Tensor:
        """The log class frequencies."""
        return shares_K.log()
