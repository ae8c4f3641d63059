"""iTransformer (Liu et al., ICLR 2024, arXiv 2310.06625)."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor, nn

from titans_core.config import Frozen, ModelConfig
from titans_core.forecasting.base import Forecaster, Window
from titans_core.forecasting.normalize import RevIN
from titans_core.forecasting.patchtst import encoder_layers


class ITransformerOptions(Frozen):
    """Options of iTransformer."""

    dropout: float = Field(default=0.1, ge=0, lt=1)


class ITransformer(Forecaster):
    """A Transformer encoder whose tokens are the channels, each a linear map of its whole window.

    `ModelConfig` sets width, layers, heads and hidden width. Calendar features, tokens of their
    own in the published code, are not read.
    """

    Options = ITransformerOptions

    def __init__(self, config: ModelConfig, window: Window, options: ITransformerOptions):
        super().__init__()
        self.revin = RevIN(window.channels)
        self.embedding = nn.Linear(window.length, config.d_model)
        self.dropout = nn.Dropout(options.dropout)
        self.layers = encoder_layers(config, options.dropout)
        self.norm = nn.LayerNorm(config.d_model)
        self.head = nn.Linear(config.d_model, window.horizon)

    def predict(self, x_BTC: Tensor) -> Tensor:
        x_BTC, units = self.revin(x_BTC)
        x_BCD = self.dropout(self.embedding(x_BTC.transpose(1, 2)))
        for layer in self.layers:
            x_BCD = layer(x_BCD)
        return self.revin.undo(self.head(self.norm(x_BCD)).transpose(1, 2), units)
