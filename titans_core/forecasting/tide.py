"""TiDE (Das et al., TMLR 2023, arXiv 2304.08424)."""

from __future__ import annotations

from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from titans_core.config import Frozen, ModelConfig
from titans_core.forecasting.base import Forecaster, Window
from titans_core.forecasting.normalize import RevIN


class TiDEOptions(Frozen):
    """Options of TiDE."""

    output: PositiveInt = 8
    """Decoder features per predicted step."""
    hidden: PositiveInt = 128
    """Hidden width of the map from features to the value."""
    dropout: float = Field(default=0.3, ge=0, lt=1)


class ResidualBlock(nn.Module):
    """LN(W_2 relu(W_1 x) + W_3 x); ``norm`` off leaves out LN."""

    def __init__(self, width: int, hidden: int, output: int, dropout: float, norm: bool = True):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, output)
        self.skip, self.dropout = nn.Linear(width, output), nn.Dropout(dropout)
        self.norm = nn.LayerNorm(output) if norm else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to [..., output]."""
        x = self.dropout(self.down(F.relu(self.up(x)))) + self.skip(x)
        return x if self.norm is None else self.norm(x)


class TiDE(Forecaster):
    """Residual MLPs that encode a channel's window and decode each step, plus a linear map of the window.

    ``d_model`` is their width, ``n_layers`` the blocks of the encoder and of the decoder. The last block has
    no LN: of a single value it would leave nothing. Calendar features are not read.
    """

    Options = TiDEOptions

    def __init__(self, config: ModelConfig, window: Window, options: TiDEOptions):
        super().__init__()
        D, drop = config.d_model, options.dropout
        widths = [window.length] + [D] * (2 * config.n_layers - 1)
        self.revin = RevIN(window.channels)
        self.blocks = nn.Sequential(*(ResidualBlock(width, D, D, drop) for width in widths))
        self.decoder = ResidualBlock(D, D, window.horizon * options.output, drop)
        self.value = ResidualBlock(options.output, options.hidden, 1, drop, norm=False)
        self.linear = nn.Linear(window.length, window.horizon)
        self.horizon = window.horizon

    def predict(self, x_BTC: Tensor) -> Tensor:
        x_BTC, units = self.revin(x_BTC)
        x_BCT = x_BTC.transpose(1, 2)
        steps = self.decoder(self.blocks(x_BCT)).unflatten(-1, (self.horizon, -1))
        y_BCh = self.value(steps).squeeze(-1) + self.linear(x_BCT)
        return self.revin.undo(y_BCh.transpose(1, 2), units)
