"""RevIN: normalises each window and channel by its mean and deviation, and undoes it on the forecast."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

EPS = 1e-5


class Units(NamedTuple):
    """Mean and standard deviation of each window's channels, [B, 1, C]."""

    mean: Tensor
    deviation: Tensor


class RevIN(nn.Module):
    """Reversible instance normalisation (Kim et al., ICLR 2022).

    ``affine``: followed by a learned weight and bias per channel, undone too.
    """

    def __init__(self, channels: int, affine: bool = False):
        super().__init__()
        self.weight_C = nn.Parameter(torch.ones(channels)) if affine else None
        self.bias_C = nn.Parameter(torch.zeros(channels)) if affine else None

    def forward(self, x_BTC: Tensor) -> tuple[Tensor, Units]:
        """Return the normalised window [B, T, C], and its mean and deviation."""
        units = Units(
            x_BTC.mean(1, keepdim=True).detach(),
            (x_BTC.var(1, keepdim=True, correction=0) + EPS).sqrt().detach(),
        )
        x_BTC = (x_BTC - units.mean) / units.deviation
        if self.weight_C is not None and self.bias_C is not None:
            x_BTC = x_BTC * self.weight_C + self.bias_C
        return x_BTC, units

    def undo(self, y_BhC: Tensor, units: Units) -> Tensor:
        """[B, h, C] back in the units of the series."""
        if self.weight_C is not None and self.bias_C is not None:
            # the weight may come close to zero during training
            y_BhC = (y_BhC - self.bias_C) / (self.weight_C + EPS**2)
        return y_BhC * units.deviation + units.mean
