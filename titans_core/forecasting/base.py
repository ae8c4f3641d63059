"""What every forecaster has in common: a window of T steps of C channels in, the h steps after it out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from torch import Tensor

from titans_core.backbone import Model
from titans_core.blocks.base import NoOptions
from titans_core.config import Frozen
from titans_core.documents import check_not_empty


class Window(NamedTuple):
    """The shape of what a forecaster reads and gives."""

    length: int
    """T, steps that it sees."""
    horizon: int
    """h, steps that it predicts."""
    channels: int
    """C"""


class Forecast(NamedTuple):
    """The values that follow, [B, h, C]."""

    prediction: Tensor


class Forecaster(Model, ABC):
    """A model of one window. A subclass is made of ``(config, window, options)``.

    Width, layers and heads are those of `ModelConfig`, where it has any; what it takes beyond them is in
    ``Options``. One of your own is a subclass in a file of yours, named by its import path. A constructor
    raises ValueError for what does not fit, in a line that begins with the field: of ``Options``, or else of
    `ModelConfig`.
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
