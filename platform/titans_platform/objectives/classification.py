"""Sequence classification, optionally after next-token pretraining on the training split.

Shapes: B rows of a batch, T tokens of its longest row, N sequences, K classes.
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from titans_core import ConvClassifier, Model, Pooling, SequenceClassifier
from titans_core.config import Frozen
from titans_platform.config import Fraction, RunConfig, SourceConfig, digest
from titans_platform.data import Tokenizer, load_tokenizer
from titans_platform.data.sources import HubSource
from titans_platform.data.stream import shuffled
from titans_platform.errors import UsageError
from titans_platform.evals.scoring import measure_distributed
from titans_platform.objectives.base import Objective, PrepareProgress, check_vocabulary, reject_data
from titans_platform.objectives.files import ItemStream, load_copy, read_table, save_copy
from titans_platform.tasks import Context, Measurement, Task

OPTIONS = "objective.options"
GENOMIC_BENCHMARKS = (
    "human_enhancers_cohn", "human_enhancers_ensembl", "human_ensembl_regulatory", "human_nontata_promoters",
    "human_ocr_ensembl",
)  # fmt: skip
"""The five datasets of the paper's Table 4, in its order. They are loaded from the Hub as
`katarinagresova/Genomic_Benchmarks_NAME`: columns seq and label, splits train and test."""
PUBLISHER = "katarinagresova/Genomic_Benchmarks_"


PARTS = ("train", "validation", "test")
SCHEMA = pa.schema([("sequence", pa.string()), ("label", pa.string())])
UNLABELLED = -1
"""Label of a row that is used for next-token pretraining."""


Split = dict[str, pa.Table]
"""A table of SCHEMA for each of PARTS, in the order of the file."""


class Labelled(NamedTuple):
    """A batch: each row is bos and a sequence, padded on the right."""

    tokens: Tensor
    """int64 [B, T]"""
    lengths: Tensor
    """int64 [B], number of tokens of each row without padding."""
    labels: Tensor
    """int64 [B]; UNLABELLED in a batch of pretraining."""


class LabelledData:
    """The items of each split as tokens and class indices; classes are the labels that occur, sorted.

    The first ``pretrain_steps`` batches are for next-token prediction.

    Raises:
        UsageError: a split is empty, or a sequence is longer than a row of ``length`` tokens.
    """

    def __init__(self, split: Split, tokenizer: Tokenizer, length: int, pretrain_steps: int = 0):
        self.split, self.tokenizer, self.pretrain_steps = split, tokenizer, pretrain_steps
        columns = {part: [column.to_pylist() for column in split[part].columns] for part in PARTS}
        self.classes = sorted({label for _, labels in columns.values() for label in labels}, key=_natural)
        number = {label: i for i, label in enumerate(self.classes)}
        self.tokens, self.labels = {}, {}
        for part, (sequences, labels) in columns.items():
            if not sequences:
                raise UsageError(f"objective.options.{part}_fraction: leaves {part} no sequence; raise it")
            self.tokens[part] = tokenizer.encode_batch(sequences)
            self.labels[part] = np.array([number[label] for label in labels])
        if (longest := 1 + max(len(ids) for part in PARTS for ids in self.tokens[part])) > length:
            short = f"a row of {length} tokens does not hold the longest sequence with its start"
            raise UsageError(f"data.sequence_length: {short}; set it to {longest}")
        items = digest([[part, *columns[part]] for part in PARTS], 16)
        self.fingerprint = digest([items, tokenizer.fingerprint, length], 16)

    @property
    def shares(self) -> Tensor:
        """[K] frequency of each class among the training items, float64."""
        counts = np.bincount(self.labels["train"], minlength=len(self.classes))
        return torch.from_numpy(counts / counts.sum())

    def train_stream(self, cfg: RunConfig, rank: int = 0, world_size: int = 1) -> ItemStream:
        """Training batches of a worker."""
        make = lambda step, indices: self.batch("train", indices, step >= self.pretrain_steps)  # noqa: E731
        return ItemStream(len(self.labels["train"]), cfg, rank, world_size, make)

    def batches(self, part: str, items: int, rows: int) -> Iterator[Labelled]:
        """Yield up to ``items`` items of a split, always the same ones, in batches of ``rows``."""
        order = shuffled(len(self.labels[part]), part)[:items]
        for i in range(0, len(order), rows):
            yield self.batch(part, order[i : i + rows])

    def batch(self, part: str, indices: Sequence[int] | NDArray[Any], labelled: bool = True) -> Labelled:
        """Return the items at ``indices`` of a split as one padded batch."""
        rows = [np.insert(self.tokens[part][i].astype(np.int64), 0, self.tokenizer.bos) for i in indices]
        tokens = pad_sequence([torch.from_numpy(row) for row in rows], True, self.tokenizer.pad)
        labels, lengths = torch.from_numpy(self.labels[part][indices]), torch.tensor([*map(len, rows)])
        return Labelled(tokens, lengths, labels if labelled else torch.full_like(labels, UNLABELLED))


def divide(items: pa.Table, fraction: float, seed: int) -> tuple[pa.Table, pa.Table]:
    """Split off a fraction of the items by a hash of each sequence and ``seed``.

    Equal sequences go to the same side, so that the split does not leak.
    """
    sequences = items["sequence"].to_pylist()
    texts = sorted(set(sequences), key=lambda text: hashlib.sha256(f"{seed}/{text}".encode()).digest())
    out = set(texts[: round(fraction * len(texts))])
    taken = np.array([text in out for text in sequences], dtype=bool)
    return items.filter(~taken), items.filter(taken)


def read_file(name: str, fields: tuple[str, str], option: str) -> pa.Table:
    """Read a .csv, .jsonl or .parquet file, optionally compressed.

    ``fields`` are the sequence and the label column. Raises UsageError that names ``option``.
    """
    table = read_table(name, option, fields)
    for field in fields:
        if field not in (known := table.column_names):
            raise UsageError(f"{option}: {name} has no column {field}; it has {', '.join(known)}")
    return _checked(*(table.column(field).to_pylist() for field in fields), where=f"{option}: {name}")


def read_hub(name: str, split: str, fields: tuple[str, str], cache: Path) -> pa.Table:
    """Load a split of a Hub dataset, or of a folder that `datasets` can load. Raises UsageError."""
    option = "objective.options.dataset"
    with HubSource(SourceConfig(kind="hub", dataset=name, split=split), option, cache).opened() as records:
        pairs = [tuple(record.get(field) for field in fields) for record in records]
    return _checked(*map(list, zip(*pairs, strict=True)), where=f"{option}: {name} ({split})")


def _checked(sequences: list[Any], labels: list[Any], where: str) -> pa.Table:
    """Reject missing values, and sequences that are not strings."""
    for i, (text, label) in enumerate(zip(sequences, labels, strict=True)):
        if not isinstance(text, str) or not text or label in (None, ""):
            missing = "label" if text and isinstance(text, str) else "sequence of text"
            raise UsageError(f"{where} has no {missing} in row {i}")
    return pa.table([sequences, [*map(str, labels)]], schema=SCHEMA)


def save_items(split: Split, path: Path) -> None:
    """Save a copy of the items."""
    names = {part: pa.array([part] * len(split[part]), pa.string()) for part in PARTS}
    save_copy(pa.concat_tables(split[part].append_column("part", x) for part, x in names.items()), path)


def load_items(path: Path) -> Split:
    """Load the copy of the items. Raises NotPrepared; UsageError if it is damaged."""
    items = load_copy(path)
    return {part: items.filter(items["part"].to_numpy() == part).drop_columns("part") for part in PARTS}


def _natural(label: str) -> tuple[int, str]:
    """Sort key of labels: numbers in numeric order, before strings."""
    return (int(label), label) if label.isdecimal() else (2**63, label)


class ClassificationOptions(Frozen):
    """Which sequences, and what is made of them."""

    path: str | None = Field(default=None, exclude=True)
    """A .csv, .jsonl or .parquet file (also .gz, .xz) of sequences and labels."""
    validation_path: str | None = Field(default=None, exclude=True)
    """The same for validation; None: a share of ``path``."""
    test_path: str | None = Field(default=None, exclude=True)
    """The same for the test; None: a share of ``path``."""
    folder: str | None = Field(default=None, exclude=True)
    """Folder of these files, if not the folder of the command."""
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
    """Input of the head: the mean of all positions, or the last."""
    network: Literal["backbone", "cnn"] = "backbone"
    """The model of ``model``, or GenomicBenchmarks' own baseline, which takes of it vocab_size alone."""
    pretrain_steps: Annotated[int, Field(ge=0)] = 0
    """Number of first steps of optim.steps that predict next tokens of the training part instead. A run that
    begins from a checkpoint of next-token training (start_from) needs none."""

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

    def prepare(self, root: Path, report: PrepareProgress | None = None) -> LabelledData:
        """Read the sequences again and save a copy."""
        split = self._read(root)
        save_items(split, self._copy(root))
        return self._data(split)

    def open(self, root: Path) -> LabelledData:
        """Open the copy that `prepare` saved."""
        return self._data(load_items(self._copy(root)))

    def build_model(self) -> Model:
        """Build the backbone with a classification head, or the convolutional baseline."""
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
        """Load the tokenizer that ``data`` names."""
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
        """Check also the vocabulary size, number of classes, and that some steps train on labels."""
        options, cfg = self.options, self.cfg
        reject_data(self.cfg, ("sources",), f"reads {OPTIONS}.path")
        if options.pretrain_steps >= (steps := cfg.optim.steps):
            cause = f"all {steps} of optim.steps; leave some for the classes"
            raise UsageError(f"{OPTIONS}.pretrain_steps: {cause}")
        check_vocabulary(self.cfg, self.tokenizer())
        if data is not None and (n := len(data.classes)) != options.classes:
            present = f"the data have {n} ({', '.join(data.classes[:10])})"
            raise UsageError(f"{OPTIONS}.classes: {options.classes}, but {present}; set it to {n}")
        super().check(data)

    def _read(self, root: Path) -> Split:
        options, seed = self.options, self.cfg.data.seed
        if options.dataset:
            cache = root / "data" / "huggingface"
            train, test = (read_hub(options.hub_name, s, options.fields, cache) for s in ("train", "test"))
            validation = None
        else:
            train, validation, test = (self._file(name) for name in ("path", "validation_path", "test_path"))
            assert train is not None
        remaining = 1.0
        if test is None:
            train, test = divide(train, options.test_fraction, seed)
            remaining -= options.test_fraction
        if validation is None:
            train, validation = divide(train, options.validation_fraction / remaining, seed)
        return dict(zip(PARTS, (train, validation, test), strict=True))

    def _file(self, option: str) -> pa.Table | None:
        if (name := getattr(self.options, option)) is None:
            return None
        path = Path(self.options.folder or "").expanduser() / name
        return read_file(str(path), self.options.fields, f"{OPTIONS}.{option}")

    def _copy(self, root: Path) -> Path:
        return root / "data" / "labelled" / f"{digest([vars(self.options), self.cfg.data.seed])}.parquet"

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

    def check(self, objective: Any, length: int, data: LabelledData | None) -> None:
        """Reject any length but the training length: sequences have fixed lengths."""
        if length != objective.cfg.data.sequence_length:
            raise UsageError("lengths: sequences have the lengths they have; leave it out")

    @abstractmethod
    def values(self, logits_BK: Tensor, labels_B: Tensor) -> Tensor:
        """[B] metric of each item."""

    @abstractmethod
    def guess(self, shares_K: Tensor) -> Tensor:
        """[K] logits of a baseline that only knows the class frequencies of the training split."""

    def measure(self, context: Context) -> Measurement:
        """Return the mean over `config.items` items of the split."""
        data: LabelledData = context.prepared
        batches = data.batches(self.options.part, context.config.items, context.scorer.rows(context.length))
        measured = measure_distributed(batches, partial(self._values, context, self.guess(data.shares)))
        values, guesses = (torch.cat(parts) for parts in zip(*measured, strict=True))
        stderr = values.std(correction=0).item() / math.sqrt(len(values))
        return Measurement(values.mean().item(), stderr, guesses.mean().item(), len(values))

    def _values(self, context: Context, guess_K: Tensor, batch: Labelled) -> tuple[Tensor, Tensor]:
        scorer = context.scorer
        tokens, lengths = (x.to(scorer.device) for x in (batch.tokens, batch.lengths))
        logits_BK = scorer.model(tokens, lengths_B=lengths).logits.double().cpu()
        return self.values(logits_BK, batch.labels), self.values(guess_K.expand_as(logits_BK), batch.labels)


class Accuracy(LabelledTask):
    """Share of the items whose likeliest class is theirs; chance is the class commonest in training."""

    name = "accuracy"

    def values(self, logits_BK: Tensor, labels_B: Tensor) -> Tensor:
        """[B] 1 if the prediction is right, else 0."""
        return (logits_BK.argmax(1) == labels_B).double()

    def guess(self, shares_K: Tensor) -> Tensor:
        """Return the class frequencies."""
        return shares_K


class ValidationOptions(PartOptions):
    """The validation part unless it says otherwise."""

    part: Literal["test", "validation"] = "validation"


class ClassLoss(LabelledTask):
    """Cross-entropy of the classes in nats; lower is better. Chance guesses their shares in training."""

    name = "class_loss"
    Options = ValidationOptions

    def values(self, logits_BK: Tensor, labels_B: Tensor) -> Tensor:
        """[B] cross-entropy in nats."""
        return F.cross_entropy(logits_BK, labels_B, reduction="none")

    def guess(self, shares_K: Tensor) -> Tensor:
        """Return the log class frequencies."""
        return shares_K.log()
