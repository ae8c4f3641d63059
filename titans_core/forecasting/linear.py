"""Linear forecasters: DLinear (Zeng et al., AAAI 2023, arXiv 2205.13504) and RLinear (Li et al. 2023, arXiv
2305.10721).
"""

from __future__ import annotations

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from titans_core.config import Frozen, ModelConfig
from titans_core.forecasting.base import Forecaster, Window
from titans_core.forecasting.normalize import RevIN


class DLinearOptions(Frozen):
    """Options of DLinear."""

    kernel: PositiveInt = 25
    """Steps of the moving average; an odd number."""


class DLinear(Forecaster):
    """A linear map of the moving average (trend) plus one of the remainder, both shared by all channels.

    The average replicates the window's ends. Both maps are initialised to the window's mean (each weight 1
    / T), as published. Raises ValueError for an even ``kernel``.
    """

    Options = DLinearOptions

    def __init__(self, config: ModelConfig, window: Window, options: DLinearOptions):
        super().__init__()
        if options.kernel % 2 == 0:
            raise ValueError(f"kernel: {options.kernel} is not odd; a centred average needs an odd one")
        self.side = options.kernel // 2
        self.trend = nn.Linear(window.length, window.horizon)
        self.rest = nn.Linear(window.length, window.horizon)
        for part in (self.trend, self.rest):
            nn.init.constant_(part.weight, 1 / window.length)

    def predict(self, x_BTC: Tensor) -> Tensor:
        x_BCT = x_BTC.transpose(1, 2)
        ends = (x_BCT[..., :1].expand(-1, -1, self.side), x_BCT[..., -1:].expand(-1, -1, self.side))
        padded = torch.cat([ends[0], x_BCT, ends[1]], -1)
        average = F.avg_pool1d(padded, 2 * self.side + 1, 1)
        return (self.trend(average) + self.rest(x_BCT - average)).transpose(1, 2)


class RLinearOptions(Frozen):
    """Options of RLinear."""

    dropout: float = Field(default=0.1, ge=0, lt=1)
    """Dropout of the window's values."""


class RLinear(Forecaster):
    """RevIN, and one linear map from the window to the horizon that all channels share."""

    Options = RLinearOptions

    def __init__(self, config: ModelConfig, window: Window, options: RLinearOptions):
        super().__init__()
        self.revin = RevIN(window.channels, affine=True)
        self.dropout = nn.Dropout(options.dropout)
        self.map = nn.Linear(window.length, window.horizon)

    def predict(self, x_BTC: Tensor) -> Tensor:
        x_BTC, units = self.revin(x_BTC)
        y_BCh = self.map(self.dropout(x_BTC).transpose(1, 2))
        return self.revin.undo(y_BCh.transpose(1, 2), units)
