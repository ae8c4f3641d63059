"""TimesNet (Wu et al., ICLR 2023, arXiv 2210.02186).

B windows, T steps of the window and h after it (L in all), D model width, k periods.
"""

from __future__ import annotations

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from titans_core.config import Frozen, ModelConfig
from titans_core.forecasting.base import Forecaster, Window
from titans_core.forecasting.normalize import RevIN
from titans_kernels import state_dtype, without_autocast


class TimesNetOptions(Frozen):
    """Options of TimesNet."""

    periods: PositiveInt = 5
    """k, the number of periods per block."""
    kernels: PositiveInt = 6
    """Kernels of an inception layer: 1 x 1, 3 x 3, ..."""
    dropout: float = Field(default=0.1, ge=0, lt=1)


class Inception(nn.Module):
    """The mean of 2-D convolutions with kernels of 1, 3, 5, ..."""

    def __init__(self, width: int, output: int, kernels: int):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(width, output, 2 * i + 1, padding=i) for i in range(kernels))

    def forward(self, x: Tensor) -> Tensor:
        """[B, D, rows, columns] to [B, output, rows, columns]."""
        return torch.stack([conv(x) for conv in self.convs]).mean(0)


class TimesBlock(nn.Module):
    """x + the periods' 2-D convolutions, weighted by the softmax of their amplitudes.

    A period's steps are the columns of an image, its repetitions the rows. Which periods these are is
    decided for all windows of a batch together, by their mean amplitude, as published.
    """

    def __init__(self, width: int, hidden: int, options: TimesNetOptions):
        super().__init__()
        self.periods = options.periods
        self.convs = nn.Sequential(
            Inception(width, hidden, options.kernels), nn.GELU(), Inception(hidden, width, options.kernels)
        )

    def forward(self, x_BLD: Tensor) -> Tensor:
        """[B, L, D] to [B, L, D]."""
        # transforms know no lower precision
        with without_autocast(x_BLD):
            amplitude_BF = torch.fft.rfft(x_BLD.to(state_dtype(x_BLD)), dim=1).abs().mean(-1)
        strongest = self._strongest(amplitude_BF)
        parts = torch.stack([self._folded(x_BLD, x_BLD.shape[1] // f) for f in strongest], -1)
        weights = amplitude_BF[:, strongest].softmax(-1)
        return x_BLD + (parts * weights[:, None, None]).sum(-1).to(x_BLD.dtype)

    def _strongest(self, amplitude_BF: Tensor) -> list[int]:
        """Frequencies, in oscillations over the L steps; the constant part is none."""
        count = min(self.periods, amplitude_BF.shape[1] - 1)
        if amplitude_BF.is_meta:  # shapes alone
            return list(range(1, count + 1))
        return (amplitude_BF.detach().mean(0)[1:].topk(count).indices + 1).tolist()

    def _folded(self, x_BLD: Tensor, period: int) -> Tensor:
        L = x_BLD.shape[1]
        image = F.pad(x_BLD.transpose(1, 2), (0, -L % period)).unflatten(-1, (-1, period))
        return self.convs(image).flatten(-2)[..., :L].transpose(1, 2)


class TimesNet(Forecaster):
    """RevIN, steps embedded by a convolution and lengthened by the horizon, blocks with norms, a linear head.

    ``d_model`` wide, ``n_layers`` blocks, hidden width ``mlp_expansion`` times that. Calendar features are
    not read.
    """

    Options = TimesNetOptions

    def __init__(self, config: ModelConfig, window: Window, options: TimesNetOptions):
        super().__init__()
        D, hidden = config.d_model, max(1, round(config.mlp_expansion * config.d_model))
        self.horizon = window.horizon
        self.revin = RevIN(window.channels)
        self.embedding = nn.Conv1d(window.channels, D, 3, padding=1, padding_mode="circular", bias=False)
        self.dropout = nn.Dropout(options.dropout)
        self.lengthen = nn.Linear(window.length, window.length + window.horizon)
        self.blocks = nn.ModuleList(TimesBlock(D, hidden, options) for _ in range(config.n_layers))
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(config.n_layers))
        self.head = nn.Linear(D, window.channels)

    def predict(self, x_BTC: Tensor) -> Tensor:
        x_BTC, units = self.revin(x_BTC)
        x_BDT = self.embedding(x_BTC.transpose(1, 2))
        x_BLD = self.lengthen(self.dropout(x_BDT)).transpose(1, 2)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x_BLD = norm(block(x_BLD))
        return self.revin.undo(self.head(x_BLD[:, -self.horizon :]), units)
