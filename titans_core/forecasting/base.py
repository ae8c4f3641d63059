"""The base of forecasters: a window of T steps of C channels in, a forecast of the next h steps out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from torch import Tensor

from titans_core.backbone import Model
from titans_core.blocks.base import NoOptions
from titans_core.config import Frozen
from titans_core.documents import check_not_empty


class Window(NamedTuple):
    """The shapes of a forecaster's input and output."""

    length: int
    """T, input steps."""
    horizon: int
    """h, predicted steps."""
    channels: int
    """C, series."""


class Forecast(NamedTuple):
    """The predicted values, [B, h, C]."""

    prediction: Tensor


class Forecaster(Model, ABC):
    """A model of one window, constructed as ``(config, window, options)``.

    Width, layers and heads come from `ModelConfig`, further options from ``Options``. A custom forecaster
    is a subclass named by its import path. Constructors raise ValueError in one line that begins with the
    offending field of ``Options`` or `ModelConfig`.
    """

    Options: ClassVar[type[Frozen]] = NoOptions

    @abstractmethod
    def predict(self, x_BTC: Tensor) -> Tensor:
        """[B, T, C] to [B, h, C]: the steps after the last."""

    def forward(self, x_BTC: Tensor) -> Forecast:
        """[B, T, C] values to the forecast of the h steps after them.

        Raises:
            ValueError: there is no row or no step.
        """
        check_not_empty(x_BTC, "x_BTC")
        return Forecast(self.predict(x_BTC))
