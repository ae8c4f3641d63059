"""Real-valued series: read, saved under the storage root, split by time, standardised, cut into windows.

Shapes: B windows, T input steps, h target steps, C channels, N steps of the whole series.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pyarrow import csv, parquet
from torch import Tensor

from titans_platform.config import digest
from titans_platform.errors import UsageError, one_line
from titans_platform.objectives.files import OPENERS, ItemStream, load_copy, opened, save_copy


class Table(NamedTuple):
    """The values of a series and the names of its channels."""

    values_NC: NDArray[np.float64]
    channels: tuple[str, ...]


class Windows(NamedTuple):
    """A batch of windows."""

    inputs: Tensor
    """float32 [B, T, C]"""
    targets: Tensor
    """float32 [B, h, C], the steps that follow the inputs."""


class Parts(NamedTuple):
    """Sizes in steps of the consecutive training, validation and test splits; steps after them are unused."""

    training: int
    validation: int
    test: int = 0

    @staticmethod
    def of(steps: int, split: Sequence[float]) -> Parts:
        """From sizes in steps, or fractions of the series; validation gets the remainder of rounding.

        Raises UsageError if the series is too short.
        """
        if sum(split) > 1 + 1e-9:
            parts = Parts(*(int(part) for part in split))
        else:
            training, test = int(steps * split[0]), int(steps * split[2])
            parts = Parts(training, steps - training - test, test)
        if sum(parts) > steps:
            raise UsageError(
                f"objective.options.split: {sum(parts)} steps are more than the {steps} of the series"
            )
        return parts


Part = Literal["validation", "test"]


class SeriesData:
    """A standardised series; validation and test follow the training split in time.

    Mean and standard deviation of each channel are those of the training split.

    Raises:
        UsageError: a split is too short for one window.
    """

    def __init__(
        self,
        table: Table,
        length: int,
        horizon: int,
        validation_fraction: float,
        split: Sequence[float] | None = None,
    ):
        N = len(table.values_NC)
        self.channels, self.length, self.horizon = table.channels, length, horizon
        kept = round(validation_fraction * N)
        self.parts = Parts.of(N, split) if split else Parts(N - kept, kept)
        self.train_steps, self.validation_steps, _ = self.parts
        self.windows = self.train_steps - length - horizon + 1
        if self.windows < 1:
            raise UsageError(
                f"data.sequence_length: {self.train_steps} training steps make no window of {length} + "
                f"{horizon}; lower it, or objective.options.horizon"
            )
        if self.validation_steps < horizon or 0 < self.parts.test < horizon:
            name = "split" if split else "validation_fraction"
            few = "test" if self.validation_steps >= horizon else "validation"
            raise UsageError(
                f"objective.options.{name}: {getattr(self.parts, few)} {few} steps make no "
                f"horizon of {horizon}; raise it"
            )
        train = table.values_NC[: self.train_steps]
        # a constant channel has zero standard deviation
        scale = np.where(train.std(0) > 0, train.std(0), 1.0)
        self.values_NC = torch.from_numpy(((table.values_NC - train.mean(0)) / scale).astype(np.float32))
        self.fingerprint = digest([_content(table), length], 16)

    def train_stream(self, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> ItemStream:
        """Training batches; ``batch_size`` is global, over all workers. Raises UsageError."""

        def batch(step: int, which: NDArray[np.int64]) -> Windows:
            return self.cut(which, self.length)

        return ItemStream(self.windows, batch_size, seed, rank, world_size, batch)

    def held_out(
        self, length: int, items: int, batch_size: int, part: Part = "validation"
    ) -> Iterator[Windows]:
        """Up to ``items`` evenly spaced windows of ``length`` steps, with targets in one split.

        Targets are the same for every ``length``; inputs may reach back into the previous split.
        Raises UsageError if fewer than ``length`` steps precede the targets, or if the split does not exist.
        """
        if not getattr(self.parts, part):
            raise UsageError("options.part: the series has no test part; give objective.options.split")
        first = self.parts.training + (self.parts.validation if part == "test" else 0)
        last = first + getattr(self.parts, part) - self.horizon
        if length > first:
            raise UsageError(f"lengths: {length} steps of input are more than the {first} before the targets")
        starts = np.unique(np.linspace(first, last, min(items, last - first + 1)).round().astype(np.int64))
        for i in range(0, len(starts), batch_size):
            yield self.cut(starts[i : i + batch_size] - length, length)

    def cut(self, starts: NDArray[np.int64], length: int) -> Windows:
        """Windows of ``length`` steps that start at ``starts``, with their targets."""
        index = torch.from_numpy(starts)[:, None] + torch.arange(length + self.horizon)
        whole = self.values_NC[index]
        return Windows(whole[:, :length], whole[:, length:])


def save_series(table: Table, index: Path) -> None:
    """Save the series in a content-addressed file that ``index`` points to."""
    values = table.values_NC
    save_copy(index, _content(table), ".npy", lambda path: np.save(path, values), channels=table.channels)


def load_series(index: Path) -> Table:
    """Load the series that ``index`` points to. Raises NotPrepared; UsageError if its file is corrupt."""
    return load_copy(
        index, ".npy", lambda path, noted: Table(np.load(path), tuple(noted["channels"])), _content
    )


def _content(table: Table) -> str:
    shape = f"{table.values_NC.shape}{table.channels}".encode()
    return hashlib.sha256(shape + np.ascontiguousarray(table.values_NC).tobytes()).hexdigest()[:16]


def read_series(name: str, columns: Sequence[str], field: str) -> Table:
    """Read a .csv, .parquet (numeric columns, or those named) or .npy ([N] or [N, C]) file.

    Optionally compressed as .gz or .xz. Raises UsageError that names ``field``.
    """
    with opened(name, READERS, field) as (read, file):
        return _checked(read(file), columns, f"{field}: {name}")


def _checked(table: pa.Table, columns: Sequence[str], where: str) -> Table:
    """The named columns, or all numeric ones. Raises UsageError if a value is missing."""
    numbers = [f.name for f in table.schema if pa.types.is_integer(f.type) or pa.types.is_floating(f.type)]
    if missing := next((column for column in columns if column not in numbers), ""):
        raise UsageError(f"{where} has no numeric column {missing}; it has {', '.join(numbers)}")
    chosen = tuple(columns or numbers)
    if not chosen or not len(table):
        raise UsageError(f"{where} has no numbers")
    values_NC = np.stack([table.column(name).cast(pa.float64()).to_numpy() for name in chosen], 1)
    wrong = np.argwhere(~np.isfinite(values_NC))
    if len(wrong):
        step, channel = wrong[0]
        raise UsageError(f"{where} has no finite number in row {step} of {chosen[channel]}")
    return Table(values_NC, chosen)


def _read_npy(file: Any) -> pa.Table:
    values = np.load(file, allow_pickle=False)
    values_NC = values.astype(np.float64).reshape(len(values), -1)
    return pa.table({str(i): column for i, column in enumerate(values_NC.T)})


READERS: dict[str, Callable[..., pa.Table]] = {
    ".csv": csv.read_csv,
    ".parquet": lambda file: parquet.read_table(io.BytesIO(file.read())),
    ".npy": _read_npy,
}


def sines(steps: int, channels: int, seed: int) -> Table:
    """Generate noisy sums of three sines: a predictable series that needs no file."""
    generator, t = np.random.default_rng(seed), np.arange(steps)[:, None]
    values_NC = 0.1 * generator.standard_normal((steps, channels))
    for period in (8, 24, 36):
        values_NC += np.sin(2 * np.pi * t / period + generator.uniform(0, 2 * np.pi, channels))
    return Table(values_NC, tuple(map(str, range(channels))))


FOLDER = "objective.options.folder"
ETT = "https://github.com/zhouhaoyi/ETDataset, folder ETT-small"
OTHERS = "the datasets that the README of https://github.com/thuml/Time-Series-Library links to"


class Dataset(NamedTuple):
    """Specification of a benchmark's file."""

    file: str
    steps: int
    channels: int
    split: tuple[float, float, float]
    """Sizes of the training, validation and test split, in steps or as fractions."""
    source: str
    """Where its authors publish it."""
    sha256: str | None = None
    """Hash of the uncompressed file; None: unknown, only the shape is checked."""


# 12, 4 and 4 months of 30 days; by convention the rest is unused
HOURS = (12 * 30 * 24, 4 * 30 * 24, 4 * 30 * 24)
QUARTERS = (4 * HOURS[0], 4 * HOURS[1], 4 * HOURS[2])
SHARES = (0.7, 0.1, 0.2)
DATASETS = {
    "ETTh1": Dataset(
        "ETTh1.csv", 17_420, 7, HOURS, ETT, "f18de3ad269cef59bb07b5438d79bb3042d3be49bdeecf01c1cd6d29695ee066"
    ),
    "ETTh2": Dataset("ETTh2.csv", 17_420, 7, HOURS, ETT),
    "ETTm1": Dataset(
        "ETTm1.csv",
        69_680,
        7,
        QUARTERS,
        ETT,
        "6ce1759b1a18e3328421d5d75fadcb316c449fcd7cec32820c8dafda71986c9e",
    ),
    "ETTm2": Dataset("ETTm2.csv", 69_680, 7, QUARTERS, ETT),
    "Weather": Dataset(
        "weather.csv",
        52_696,
        21,
        SHARES,
        OTHERS,
        "34ee981d07313e51da2a50bb600072c8ae4a69cb4b0651f4cb93a069d7a2ba63",
    ),
    "ECL": Dataset("electricity.csv", 26_304, 321, SHARES, OTHERS),
    "Traffic": Dataset("traffic.csv", 17_544, 862, SHARES, OTHERS),
}
"""Keyed by the names in the paper's Table 3."""


def read_dataset(name: str, folder: str | None, columns: Sequence[str] = ()) -> Table:
    """Read a benchmark's series from its file in ``folder``, optionally compressed as .gz or .xz.

    Raises UsageError if the file is missing or is not the standard one.
    """
    known = DATASETS[name]
    if folder is None:
        raise UsageError(f"{FOLDER}: dataset {name} needs the folder of {known.file}, from {known.source}")
    places = [Path(folder).expanduser() / f"{known.file}{suffix}" for suffix in ("", *OPENERS)]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise UsageError(f"{FOLDER}: no {known.file} (or .gz, .xz) in {folder}; it is from {known.source}")
    if known.sha256 and (found := _sha256(path)) != known.sha256:
        raise UsageError(
            f"{FOLDER}: {path} is not the standard file: its sha256 is {found}, not {known.sha256}; get it "
            f"from {known.source}, or name it as objective.options.path"
        )
    table = read_series(str(path), columns, FOLDER)
    steps, channels = table.values_NC.shape
    if (steps, channels) != (known.steps, len(columns) or known.channels):
        raise UsageError(
            f"{FOLDER}: {path} has {steps} steps of {channels} channels, {name} has {known.steps} of "
            f"{known.channels}; get it from {known.source}"
        )
    return table


def _sha256(path: Path) -> str:
    try:
        with OPENERS.get(path.suffix, open)(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, EOFError, ValueError) as error:
        raise UsageError(f"{FOLDER}: {path} cannot be read: {one_line(error)}") from None
