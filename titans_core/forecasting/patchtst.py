"""Forecasters whose tokens are patches of a channel: their base, and PatchTST (Nie et al., ICLR 2023, arXiv
2211.14730).

B windows, T steps, C channels, N patches of P steps, D model width, h steps ahead.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from titans_core.config import Frozen, ModelConfig
from titans_core.forecasting.base import Forecaster, Window
from titans_core.forecasting.normalize import RevIN


class PatchOptions(Frozen):
    """Options of a forecaster of patches."""

    patch: PositiveInt = 16
    """P, steps of a token."""
    stride: PositiveInt = 8
    """Steps between the starts of two patches."""
    dropout: float = Field(default=0.1, ge=0, lt=1)


class PatchForecaster(Forecaster):
    """RevIN, patches with a learned position, an encoder, and a linear head on all of its outputs.

    Channels are independent: each is a row of the encoder's batch, with shared weights. The window's last
    value is repeated ``stride`` times, as published. A subclass defines `encode`.
    """

    Options = PatchOptions

    def __init__(self, config: ModelConfig, window: Window, options: PatchOptions):
        super().__init__()
        if options.patch > window.length:
            raise ValueError(f"patch: {options.patch} steps are more than the {window.length} of a window")
        self.patch, self.stride = options.patch, options.stride
        self.patches = (window.length - options.patch) // options.stride + 2
        self.revin = RevIN(window.channels)
        self.embedding = nn.Linear(options.patch, config.d_model, bias=False)
        self.position_ND = nn.Parameter(torch.empty(self.patches, config.d_model).uniform_(-0.02, 0.02))
        self.dropout = nn.Dropout(options.dropout)
        self.head = nn.Linear(self.patches * config.d_model, window.horizon)

    @abstractmethod
    def encode(self, x_BND: Tensor) -> Tensor:
        """[B C, N, D] to the same shape: the tokens of each channel."""

    def predict(self, x_BTC: Tensor) -> Tensor:
        x_BTC, units = self.revin(x_BTC)
        x_BCT = nn.functional.pad(x_BTC.transpose(1, 2), (0, self.stride), mode="replicate")
        x_BCNP = x_BCT.unfold(-1, self.patch, self.stride)
        x = self.dropout(self.embedding(x_BCNP.flatten(0, 1)) + self.position_ND)
        y_Bh = self.head(self.encode(x).flatten(1))
        y_BCh = y_Bh.view(*x_BCT.shape[:2], -1)
        return self.revin.undo(y_BCh.transpose(1, 2), units)


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

    `ModelConfig` sets width, layers, heads and hidden width. Layers have LayerNorm, as in
    Time-Series-Library, whose results papers report, instead of the first version's batch norm, and no
    residual attention scores.
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
