"""PatchTST (Nie et al., ICLR 2023, arXiv 2211.14730)."""

from __future__ import annotations

from torch import Tensor, nn

from titans_core.config import ModelConfig
from titans_core.forecasting.base import Window
from titans_core.forecasting.patches import PatchForecaster, PatchOptions


def encoder_layers(config: ModelConfig, dropout: float) -> nn.ModuleList:
    """``n_layers`` of the Transformer's encoder, norms after each part, GELU."""
    return nn.ModuleList(
        nn.TransformerEncoderLayer(
            config.d_model,
            config.attention.heads,
            max(1, round(config.mlp_expansion * config.d_model)),
            dropout,
            "gelu",
            batch_first=True,
        )
        for _ in range(config.n_layers)
    )


class PatchTST(PatchForecaster):
    """A Transformer encoder over the patches of each channel, then a batch norm.

    Width, layers, heads and hidden width are those of `ModelConfig`. Layers have the norm of
    Time-Series-Library, whose results are those that papers compare with, in place of the first version's
    batch norm, and no residual attention scores.
    """

    def __init__(self, config: ModelConfig, window: Window, options: PatchOptions):
        super().__init__(config, window, options)
        self.layers = encoder_layers(config, options.dropout)
        self.norm = nn.BatchNorm1d(config.d_model)
        self.head_dropout = nn.Dropout(options.dropout)

    def encode(self, x_BND: Tensor) -> Tensor:
        for layer in self.layers:
            x_BND = layer(x_BND)
        x_BDN = self.norm(x_BND.transpose(1, 2))
        return self.head_dropout(x_BDN.transpose(1, 2))
