"""Regression of a series: from T steps of C channels the h steps after them, by mean squared error."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from titans_core import SeriesModel
from titans_core.config import Frozen, PositiveInt
from titans_platform.config import DataConfig, Fraction, digest
from titans_platform.errors import UsageError
from titans_platform.evals import Measurement, Task, row_length
from titans_platform.evals import register as register_task
from titans_platform.evals.registry import Context
from titans_platform.evals.scoring import measure_shared
from titans_platform.objectives.base import Input, Objective, Report, register
from titans_platform.objectives.series import SeriesData, Table, Windows, keep, kept, read_series, sines

PATH = "objective.options.path"


class SeriesOptions(Frozen):
    """Which series, and how far ahead."""

    path: str | None = Field(default=None, exclude=True)
    """A .csv, .parquet or .npy file (also .gz, .xz); rows are steps in the order of time."""
    columns: tuple[str, ...] = ()
    """The file's columns to take, by name; every column of numbers where empty."""
    channels: PositiveInt = 1
    """C, where ``columns`` does not say it."""
    sines: PositiveInt | None = None
    """In place of a file: so many steps of generated waves, by data.seed."""
    horizon: PositiveInt = 1
    """h, steps to predict."""
    patch: PositiveInt = 1
    """Steps of one token; divides data.sequence_length."""
    validation_fraction: Fraction = 0.2
    """Share of the steps, the last in time, kept for validation."""

    @model_validator(mode="after")
    def _one_source(self) -> SeriesOptions:
        if bool(self.path) == bool(self.sines):
            raise ValueError("path: give the file of a series, or sines in its place")
        return self

    @property
    def width(self) -> int:
        """C, the number of channels."""
        return len(self.columns) or self.channels


@register("regression")
class Regression(Objective[SeriesData]):
    """Mean squared error of a row's h x C values in units of the training part's standard deviation."""

    Options = SeriesOptions
    data_kind = "series"
    positions = "time steps"
    loss_unit = "MSE"
    validation_task = "mse"

    def prepare(self, root: Path, report: Report | None = None) -> SeriesData:
        """Read the series again, and keep what it holds now."""
        table = self._read()
        keep(table, self._index(root))
        return self._cut(table)

    def open(self, root: Path) -> SeriesData:
        """The series as it was when it was prepared."""
        return self._cut(kept(self._index(root)))

    def build_model(self) -> SeriesModel:
        """A series model."""
        options = self.options
        try:
            return SeriesModel(self.cfg.model, options.width, options.horizon, options.patch)
        except ValueError as error:
            raise UsageError(f"model.{error}") from None

    def least_activations(self, rows: int) -> int:
        """A token is a patch."""
        return super().least_activations(rows) // self.options.patch

    def losses(self, model: Callable[..., Any], batch: Windows) -> Tensor:
        """[B] mean squared error of each window."""
        return (model(batch.inputs).prediction.float() - batch.targets).square().mean((1, 2))

    def inputs(self, data: SeriesData) -> list[Input]:
        """The series, by its content."""
        where = self.options.path or f"{self.options.sines} steps of sines"
        steps = {"training steps": data.train_steps, "validation steps": data.validation_steps}
        return [Input("series", data.fingerprint, where, steps)]

    def sample_batch(self, rows: int) -> Windows:
        """Normal values."""
        options = self.options
        inputs = torch.randn(rows, self.cfg.data.sequence_length, options.width)
        return Windows(inputs, torch.randn(rows, options.horizon, options.width))

    def check_sources(self) -> None:
        """The file, read whole."""
        self._read()

    def check(self, data: SeriesData | None = None) -> None:
        """Also that the config names no text, which nothing would read, and how many channels there are."""
        options, given, default = self.options, self.cfg.data, DataConfig()
        for name in ("sources", "tokenizer"):
            if getattr(given, name) != getattr(default, name):
                raise UsageError(f"data.{name}: objective regression reads {PATH}; leave it out")
        if given.sequence_length % options.patch:
            raise UsageError(
                f"objective.options.patch: {options.patch} does not divide data.sequence_length "
                f"{given.sequence_length}"
            )
        if data is not None and len(data.channels) != options.width:
            raise UsageError(
                f"objective.options.channels: {options.width} are not the {len(data.channels)} of the "
                f"series; set it to {len(data.channels)}, or name columns"
            )
        super().check(data)

    def check_task(self, task: Task, lengths: Sequence[float], data: SeriesData | None) -> None:
        """Also that every length is whole patches and, with data, that there are as many steps."""
        super().check_task(task, lengths, data)
        for multiple in lengths:
            length = row_length(multiple, self.cfg.data.sequence_length)
            if length % self.options.patch:
                raise UsageError(f"lengths: {length} steps are no multiple of patch {self.options.patch}")
            if data is not None:
                next(data.validation(length, 1, 1))

    def _read(self) -> Table:
        options = self.options
        if options.sines:
            return sines(options.sines, options.width, self.cfg.data.seed)
        return read_series(options.path, options.columns, PATH)

    def _index(self, root: Path) -> Path:
        options = self.options
        identity = [options.path, options.columns, options.sines, options.width, self.cfg.data.seed]
        return root / "data" / "series" / f"{digest(identity)}.json"

    def _cut(self, table: Table) -> SeriesData:
        options = self.options
        return SeriesData(table, self.cfg.data.sequence_length, options.horizon, options.validation_fraction)


class SeriesError(Task):
    """Mean error of predictions on validation windows; lower is better.

    Chance is the error of the training part's mean, which is 0 in standard units.
    """

    data_kind = "series"
    error: ClassVar[Callable[[Tensor], Tensor]]
    """Of each number, from how far the prediction is off."""

    @property
    def chance(self) -> float:
        """Infinite: it depends on the series; `measure` gives it."""
        return math.inf

    def measure(self, context: Context) -> Measurement:
        """Error on `config.items` windows of `context.length` steps.

        The standard error counts only windows without a common target as independent.
        """
        data: SeriesData = context.prepared
        batches = data.validation(context.length, context.config.items, context.scorer.rows(context.length))
        measured = measure_shared(batches, partial(self._errors, context))
        errors, guesses = (torch.cat(parts).double() for parts in zip(*measured, strict=True))
        apart = min(len(errors), data.validation_steps // data.horizon)
        stderr = errors.std(correction=0).item() / math.sqrt(apart)
        return Measurement(errors.mean().item(), stderr, guesses.mean().item(), len(errors))

    def _errors(self, context: Context, batch: Windows) -> tuple[Tensor, Tensor]:
        """[B] errors of the model, and of the training part's mean."""
        scorer = context.scorer
        predicted = scorer.model(batch.inputs.to(scorer.device)).prediction.float().cpu()
        error = type(self).error
        return error(predicted - batch.targets).mean((1, 2)), error(batch.targets).mean((1, 2))


@register_task
class MeanSquaredError(SeriesError):
    """Mean squared error."""

    name = "mse"
    error = staticmethod(torch.square)


@register_task
class MeanAbsoluteError(SeriesError):
    """Mean absolute error."""

    name = "mae"
    error = staticmethod(torch.abs)
