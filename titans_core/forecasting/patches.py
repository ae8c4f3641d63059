"""Patches of each channel as tokens: what PatchTST and Simba read, and how both predict.

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
    """What a forecaster of patches takes."""

    patch: PositiveInt = 16
    """P, steps of a token."""
    stride: PositiveInt = 8
    """Steps from one patch to the next."""
    dropout: float = Field(default=0.1, ge=0, lt=1)


class PatchForecaster(Forecaster):
    """RevIN, patches with a learned position, an encoder, and a linear head on all of its outputs.

    Channels are rows of a batch of their own: the encoder sees one at a time, and all share its weights. The
    window's last value is repeated ``stride`` times, as published. A subclass gives `encode`.
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
