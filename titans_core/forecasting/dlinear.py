"""DLinear (Zeng et al., AAAI 2023, arXiv 2205.13504)."""

from __future__ import annotations

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from titans_core.config import Frozen, ModelConfig
from titans_core.forecasting.base import Forecaster, Window


class DLinearOptions(Frozen):
    """What DLinear takes."""

    kernel: PositiveInt = 25
    """Steps of the moving average; an odd number."""


class DLinear(Forecaster):
    """A linear map of the moving average plus one of what is left, both shared by the channels.

    The average repeats the window's ends. Both maps start as the window's mean (each weight 1 / T), as
    published. The options' ``kernel`` has to be odd (ValueError).
    """

    Options = DLinearOptions

    def __init__(self, config: ModelConfig, window: Window, options: DLinearOptions):
        super().__init__()
        if options.kernel % 2 == 0:
            raise ValueError(f"kernel: {options.kernel} is not odd, so that the average has no middle")
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
