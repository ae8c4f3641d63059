"""Time-series forecasting: predict h steps from the T steps before them, by mean squared error.

A series is split by time, standardised and cut into windows.

Shapes: B windows, T input steps, h target steps, C channels, N steps of the whole series.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, JsonValue, model_validator
from torch import Tensor

from titans_core import SeriesModel
from titans_core.config import Frozen, PositiveInt
from titans_core.forecasting import FORECASTERS, Forecaster, Window
from titans_platform.config import Fraction, RunConfig, digest
from titans_platform.errors import UsageError, nearest, within
from titans_platform.evals.scoring import measure_distributed
from titans_platform.loading import validate
from titans_platform.objectives.base import Objective, PrepareProgress, reject_data
from titans_platform.objectives.files import (
    DATASETS,
    ItemStream,
    SeriesTable,
    content,
    load_series,
    read_dataset,
    read_series,
    save_series,
    sines,
)
from titans_platform.tasks import Context, Measurement, Task

PATH = "objective.options.path"
FORECASTER = "objective.options.forecaster"
Share = Annotated[float, Field(gt=0)]


class SeriesOptions(Frozen):
    """Which series, how far ahead, and what predicts."""

    path: str | None = Field(default=None, exclude=True)
    """A .csv, .parquet or .npy file (also .gz, .xz); rows are steps in the order of time."""
    dataset: str | None = None
    """In place of a path: a benchmark of long-term forecasting, with its split: ETTh1, ETTh2, ETTm1, ETTm2,
    Weather, ECL or Traffic."""
    folder: str | None = Field(default=None, exclude=True)
    """Folder of the dataset's file: ETTh1.csv, ..., weather.csv, electricity.csv, traffic.csv (or with .gz
    or .xz)."""
    columns: tuple[str, ...] = ()
    """The file's columns to take, by name; every column of numbers where empty."""
    channels: PositiveInt = 1
    """C, where ``columns`` does not say it."""
    sines: PositiveInt | None = None
    """In place of a file: number of steps of generated waves, seeded by data.seed."""
    horizon: PositiveInt = 1
    """h, steps to predict."""
    patch: PositiveInt = 1
    """Steps of one token; divides data.sequence_length."""
    validation_fraction: Fraction = 0.2
    """Share of the steps, the last in time, kept for validation."""
    split: tuple[Share, Share, Share] | None = None
    """In place of validation_fraction: training, validation and test part in the order of time, in steps or
    in shares of the series that add up to 1."""
    forecaster: str | None = None
    """dlinear, rlinear, itransformer, patchtst, crossformer, tide, timesnet, simba, or ``module:Class`` of
    your own; None: blocks of model.variant read the window."""
    forecaster_options: dict[str, JsonValue] = Field(default_factory=dict)
    """Options of the forecaster beyond `model`."""

    @model_validator(mode="after")
    def _consistent(self) -> SeriesOptions:
        if [bool(self.path), bool(self.sines), bool(self.dataset)].count(True) != 1:
            raise ValueError("path: give the file of a series, or sines in its place, or dataset")
        if self.dataset and self.dataset not in DATASETS:
            raise ValueError(f"dataset: {self.dataset!r} is unknown; {nearest(self.dataset, DATASETS)}")
        if self.forecaster and self.patch > 1:
            raise ValueError("patch: forecasters cut windows by themselves; leave it out")
        if self.forecaster_options and not self.forecaster:
            raise ValueError("forecaster_options: give the forecaster that takes them")
        if self.split and any(part % 1 for part in self.split) and abs(sum(self.split) - 1) > 1e-6:
            raise ValueError(f"split: shares add up to {sum(self.split):g}, not to 1")
        return self

    @property
    def width(self) -> int:
        """Number of channels C."""
        return len(self.columns) or (DATASETS[self.dataset].channels if self.dataset else self.channels)

    @property
    def parts(self) -> tuple[float, float, float] | None:
        """The configured split, or else the dataset's."""
        return self.split or (DATASETS[self.dataset].split if self.dataset else None)


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
        """Read sizes in steps, or fractions of the series; validation gets the remainder of rounding.

        Raises UsageError if the series is too short.
        """
        if sum(split) > 1 + 1e-9:
            parts = Parts(*(int(part) for part in split))
        else:
            training, test = int(steps * split[0]), int(steps * split[2])
            parts = Parts(training, steps - training - test, test)
        if (n := sum(parts)) > steps:
            raise UsageError(f"objective.options.split: {n} steps are more than the {steps} of the series")
        return parts


Part = Literal["validation", "test"]


class SeriesData:
    """A standardised series; validation and test follow the training split in time.

    Mean and standard deviation of each channel are computed on the training split.

    Raises:
        UsageError: a split is too short for one window.
    """

    def __init__(
        self, table: SeriesTable, length: int, horizon: int, validation_fraction: float,
        split: Sequence[float] = (),
    ):  # fmt: skip
        N = len(table.values_NC)
        self.channels, self.length, self.horizon = table.channels, length, horizon
        kept = round(validation_fraction * N)
        self.parts = Parts.of(N, split) if split else Parts(N - kept, kept)
        training, validation, test = self.parts
        self.windows = training - length - horizon + 1
        if self.windows < 1:
            short = f"{training} training steps are too few for a window of {length} + {horizon}"
            raise UsageError(f"data.sequence_length: {short}; lower it, or objective.options.horizon")
        if validation < horizon or 0 < test < horizon:
            name = "split" if split else "validation_fraction"
            part = "test" if validation >= horizon else "validation"
            short = f"{getattr(self.parts, part)} {part} steps are too few for a horizon of {horizon}"
            raise UsageError(f"objective.options.{name}: {short}; raise it")
        train = table.values_NC[:training]
        # a constant channel has zero standard deviation
        scale = np.where(train.std(0) > 0, train.std(0), 1.0)
        self.values_NC = torch.from_numpy(((table.values_NC - train.mean(0)) / scale).astype(np.float32))
        self.fingerprint = digest([content(table), length], 16)

    def train_stream(self, cfg: RunConfig, rank: int = 0, world_size: int = 1) -> ItemStream:
        """Training batches of a worker."""
        make = lambda step, indices: self.cut(indices, self.length)  # noqa: E731
        return ItemStream(self.windows, cfg, rank, world_size, make)

    def held_out(
        self, length: int, items: int, batch_size: int, part: Part = "validation"
    ) -> Iterator[Windows]:
        """Yield up to ``items`` evenly spaced windows of ``length`` steps, with targets in one split.

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
        whole = self.values_NC[torch.from_numpy(starts)[:, None] + torch.arange(length + self.horizon)]
        return Windows(whole[:, :length], whole[:, length:])


class Regression(Objective[SeriesData]):
    """Mean squared error over a window's h x C targets, in training-split standard deviations."""

    Options = SeriesOptions
    data_kind = "series"
    positions = "time steps"
    loss_unit = "MSE"
    validation_task = "mse"

    def prepare(self, root: Path, report: PrepareProgress | None = None) -> SeriesData:
        """Read the series again and save a copy."""
        table = self._read()
        save_series(table, self._copy(root))
        return self._cut(table)

    def open(self, root: Path) -> SeriesData:
        """Open the copy that `prepare` saved."""
        return self._cut(load_series(self._copy(root)))

    def build_model(self) -> SeriesModel | Forecaster:
        """Build a series model, or the forecaster that the options name."""
        options, model, at = self.options, self.cfg.model, f"{FORECASTER}_options"
        if not options.forecaster:
            with within("model", ValueError):
                return SeriesModel(model, options.width, options.horizon, options.patch)
        try:
            kind = FORECASTERS.find(options.forecaster, FORECASTER)
        except ValueError as error:
            raise UsageError(str(error)) from None
        parsed = validate(kind.Options, options.forecaster_options, at)
        try:
            return kind(model, Window(self.cfg.data.sequence_length, options.horizon, options.width), parsed)
        except ValueError as error:
            # the message starts with the field
            known = str(error).partition(":")[0] in kind.Options.model_fields
            raise UsageError(f"{at if known else 'model'}.{error}") from None

    @property
    def block_tokens(self) -> int:
        """One token per patch; a forecaster is counted without its blocks."""
        return 0 if self.options.forecaster else self.cfg.row_tokens // self.options.patch

    def head_activations(self, rows: int) -> int:
        """Return the size of a forecaster's input windows."""
        return rows * self.cfg.data.sequence_length * self.options.width if self.options.forecaster else 0

    def losses(self, model: Callable[..., Any], batch: Windows) -> Tensor:
        """[B] mean squared error of each window."""
        return (model(batch.inputs).prediction.float() - batch.targets).square().mean((1, 2))

    def sample_batch(self, rows: int) -> Windows:
        """Draw standard normal values."""
        options = self.options
        inputs = torch.randn(rows, self.cfg.data.sequence_length, options.width)
        return Windows(inputs, torch.randn(rows, options.horizon, options.width))

    def check_sources(self) -> None:
        """Read the file completely."""
        self._read()

    def check(self, data: SeriesData | None = None) -> None:
        """Reject also text sources, which would be ignored, and check the number of channels."""
        options, length = self.options, self.cfg.data.sequence_length
        reject_data(self.cfg, ("sources", "tokenizer"), f"reads {PATH}")
        if length % options.patch:
            cause = f"{options.patch} does not divide data.sequence_length {length}"
            raise UsageError(f"objective.options.patch: {cause}")
        if data is not None and (n := len(data.channels)) != options.width:
            cause = f"{options.width}, but the series has {n}"
            raise UsageError(f"objective.options.channels: {cause}; set it to {n}, or name columns")
        super().check(data)

    def _read(self) -> SeriesTable:
        options = self.options
        if options.sines:
            return sines(options.sines, options.width, self.cfg.data.seed)
        if options.dataset:
            return read_dataset(options.dataset, options.folder, options.columns)
        return read_series(options.path, options.columns, PATH)

    def _copy(self, root: Path) -> Path:
        options = self.options
        chosen = [options.path, options.dataset, options.columns, options.sines, options.width]
        return root / "data" / "series" / f"{digest([*chosen, self.cfg.data.seed])}.parquet"

    def _cut(self, table: SeriesTable) -> SeriesData:
        options, length = self.options, self.cfg.data.sequence_length
        return SeriesData(table, length, options.horizon, options.validation_fraction, options.parts or ())


class ErrorOptions(Frozen):
    """Which windows are predicted."""

    part: Part = "validation"
    """The part of the series that their targets are in."""


class SeriesError(Task):
    """Mean error of predictions on validation or test windows; lower is better.

    Chance is the error of predicting the training split's mean, which is 0 after standardisation.
    """

    Options = ErrorOptions
    data_kind = "series"
    error: ClassVar[Callable[[Tensor], Tensor]]
    """Elementwise error, given prediction minus target."""

    def check(self, objective: Any, length: int, data: SeriesData | None) -> None:
        """Check that the length is a multiple of the patch and, with data, that enough steps exist."""
        options, reads = objective.options, objective.cfg.data.sequence_length
        if options.forecaster and length != reads:
            raise UsageError(f"lengths: a forecaster reads {reads} steps, not {length}")
        if length % options.patch:
            raise UsageError(f"lengths: {length} steps are no multiple of patch {options.patch}")
        if data is not None:
            next(data.held_out(length, 1, 1, self.options.part))

    def measure(self, context: Context) -> Measurement:
        """Error on `config.items` windows of `context.length` steps.

        The standard error counts only windows with disjoint targets as independent.
        """
        data: SeriesData = context.prepared
        part, rows = self.options.part, context.scorer.rows(context.length)
        batches = data.held_out(context.length, context.config.items, rows, part)
        measured = measure_distributed(batches, partial(self._errors, context))
        errors, guesses = (torch.cat(parts).double() for parts in zip(*measured, strict=True))
        independent = min(len(errors), getattr(data.parts, part) // data.horizon)
        stderr = errors.std(correction=0).item() / math.sqrt(independent)
        return Measurement(errors.mean().item(), stderr, guesses.mean().item(), len(errors))

    def _errors(self, context: Context, batch: Windows) -> tuple[Tensor, Tensor]:
        """[B] errors of the model, and of predicting the training split's mean."""
        scorer = context.scorer
        predicted = scorer.model(batch.inputs.to(scorer.device)).prediction.float().cpu()
        error = type(self).error
        return error(predicted - batch.targets).mean((1, 2)), error(batch.targets).mean((1, 2))


class MeanSquaredError(SeriesError):
    """Mean squared error."""

    name = "mse"
    error = staticmethod(torch.square)


class MeanAbsoluteError(SeriesError):
    """Mean absolute error."""

    name = "mae"
    error = staticmethod(torch.abs)
