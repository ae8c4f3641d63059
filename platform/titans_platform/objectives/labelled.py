"""Labelled sequences: read, split, saved under the storage root, batched with padding.

Shapes: B rows of a batch, T tokens of its longest row, N sequences, K classes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pyarrow import parquet
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from titans_platform.config import SourceConfig, digest
from titans_platform.data import Tokenizer
from titans_platform.data.sources import HubSource
from titans_platform.data.stream import shuffled
from titans_platform.errors import UsageError
from titans_platform.objectives.files import ItemStream, load_copy, read_table, save_copy

PARTS = ("train", "validation", "test")
UNLABELLED = -1
"""Label of a row that is used for next-token pretraining."""


class Items(NamedTuple):
    """Sequences with their labels, in the order of the file."""

    sequences: list[str]
    labels: list[str]

    def take(self, which: NDArray[np.bool_]) -> Items:
        """The items where the mask ``which`` [N] is True."""
        index = np.flatnonzero(which)
        return Items([self.sequences[i] for i in index], [self.labels[i] for i in index])


Split = dict[str, Items]
"""The items of each split; see PARTS."""


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
        self.classes = sorted({label for items in split.values() for label in items.labels}, key=_natural)
        number = {label: i for i, label in enumerate(self.classes)}
        self.tokens, self.labels = {}, {}
        for part in PARTS:
            if not split[part].sequences:
                raise UsageError(f"objective.options.{part}_fraction: leaves {part} no sequence; raise it")
            self.tokens[part] = tokenizer.encode_batch(split[part].sequences)
            self.labels[part] = np.array([number[label] for label in split[part].labels])
        if (longest := 1 + max(len(ids) for part in PARTS for ids in self.tokens[part])) > length:
            short = f"a row of {length} tokens does not hold the longest sequence with its start"
            raise UsageError(f"data.sequence_length: {short}; set it to {longest}")
        self.fingerprint = digest([_content(split), tokenizer.fingerprint, length], 16)

    @property
    def shares(self) -> Tensor:
        """[K] frequency of each class among the training items, float64."""
        counts = np.bincount(self.labels["train"], minlength=len(self.classes))
        return torch.from_numpy(counts / counts.sum())

    def class_counts(self, part: str) -> dict[str, int]:
        """Number of items of each class in a split."""
        found = Counter(self.split[part].labels)
        return {label: found[label] for label in self.classes}

    def train_stream(self, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> ItemStream:
        """Training batches; ``batch_size`` is global, over all workers. Raises UsageError."""
        make = lambda step, which: self.batch("train", which, step >= self.pretrain_steps)  # noqa: E731
        return ItemStream(len(self.labels["train"]), batch_size, seed, rank, world_size, make)

    def batches(self, part: str, items: int, rows: int) -> Iterator[Labelled]:
        """Up to ``items`` items of a split, always the same ones, in batches of ``rows``."""
        order = shuffled(len(self.labels[part]), part)[:items]
        for i in range(0, len(order), rows):
            yield self.batch(part, order[i : i + rows])

    def batch(self, part: str, which: Sequence[int] | NDArray[Any], labelled: bool = True) -> Labelled:
        """The items ``which`` of a split as one padded batch."""
        rows = [np.insert(self.tokens[part][i].astype(np.int64), 0, self.tokenizer.bos) for i in which]
        tokens = pad_sequence([torch.from_numpy(row) for row in rows], True, self.tokenizer.pad)
        labels, lengths = torch.from_numpy(self.labels[part][which]), torch.tensor([len(row) for row in rows])
        return Labelled(tokens, lengths, labels if labelled else torch.full_like(labels, UNLABELLED))


def divide(items: Items, fraction: float, seed: int) -> tuple[Items, Items]:
    """Split off a fraction of the items by a hash of each sequence and ``seed``.

    Equal sequences go to the same side, so that the split does not leak.
    """
    texts = sorted(set(items.sequences), key=lambda text: hashlib.sha256(f"{seed}/{text}".encode()).digest())
    out = set(texts[: round(fraction * len(texts))])
    taken = np.array([text in out for text in items.sequences], dtype=bool)
    return items.take(~taken), items.take(taken)


def read_file(name: str, fields: tuple[str, str], option: str) -> Items:
    """Read a .csv, .jsonl or .parquet file, optionally compressed as .gz or .xz. ``fields`` are the sequence
    and the label column. Raises UsageError that names ``option``.
    """
    table = read_table(name, option)
    for field in fields:
        if field not in (known := table.column_names):
            raise UsageError(f"{option}: {name} has no column {field}; it has {', '.join(known)}")
    return _checked(*(table.column(field).to_pylist() for field in fields), where=f"{option}: {name}")


def read_hub(name: str, split: str, fields: tuple[str, str], cache: Path) -> Items:
    """Load a split of a Hub dataset, or of a folder that `datasets` can load. Raises UsageError."""
    option = "objective.options.dataset"
    source = HubSource(SourceConfig(kind="hub", dataset=name), option, cache)
    with source.opened(name, name, split=split) as records:
        pairs = [tuple(record.get(field) for field in fields) for record in records]
    return _checked(*map(list, zip(*pairs, strict=True)), where=f"{option}: {name} ({split})")


def _checked(sequences: list[Any], labels: list[Any], where: str) -> Items:
    """Reject missing values, and sequences that are not strings."""
    for i, (text, label) in enumerate(zip(sequences, labels, strict=True)):
        if not isinstance(text, str) or not text or label is None:
            raise UsageError(f"{where} has no {'label' if text else 'sequence'} in row {i}")
    return Items(sequences, [str(label) for label in labels])


def save_items(split: Split, index: Path) -> None:
    """Save the items in a content-addressed file that ``index`` points to."""
    rows = [(text, label, part) for part in PARTS for text, label in zip(*split[part], strict=True)]
    columns = dict(zip(("sequence", "label", "part"), map(list, zip(*rows, strict=True)), strict=True))
    save_copy(index, _content(split), ".parquet", lambda path: parquet.write_table(pa.table(columns), path))


def load_items(index: Path) -> Split:
    """Load the items that ``index`` points to. Raises NotPrepared; UsageError if their file is corrupt."""

    def read(path: Path, noted: dict[str, Any]) -> Split:
        columns = parquet.read_table(path).to_pydict()
        items, part = Items(columns["sequence"], columns["label"]), np.array(columns["part"])
        return {name: items.take(part == name) for name in PARTS}

    return load_copy(index, ".parquet", read, _content)


def _content(split: Split) -> str:
    return digest([[part, *split[part]] for part in PARTS], 16)


def _natural(label: str) -> tuple[int, str]:
    """Sort key of labels: numbers in numeric order, before strings."""
    return (int(label), "") if label.isdecimal() else (2**63, label)
