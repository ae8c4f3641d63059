"""RLinear (Li et al. 2023, arXiv 2305.10721)."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor, nn

from titans_core.config import Frozen, ModelConfig
from titans_core.forecasting.base import Forecaster, Window
from titans_core.forecasting.normalize import RevIN


class RLinearOptions(Frozen):
    """What RLinear takes."""

    dropout: float = Field(default=0.1, ge=0, lt=1)
    """Share of the window's values that training leaves out."""


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
