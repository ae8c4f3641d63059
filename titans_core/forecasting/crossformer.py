"""Crossformer (Zhang and Yan, ICLR 2023).

B windows, C channels, S segments of P steps, D model width, R routers, h steps ahead.
"""

from __future__ import annotations

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from titans_core.config import Frozen, ModelConfig
from titans_core.forecasting.base import Forecaster, Window


class CrossformerOptions(Frozen):
    """Options of Crossformer."""

    segment: PositiveInt = 12
    """P, steps per token of a channel; the window is padded on the left with its first value."""
    routers: PositiveInt = 10
    """R, through which channels of a segment attend to each other."""
    dropout: float = Field(default=0.2, ge=0, lt=1)


class MultiHeadAttention(nn.Module):
    """LN(x + attention to others), then LN(x + MLP(x))."""

    def __init__(self, config: ModelConfig, dropout: float):
        super().__init__()
        D, hidden = config.d_model, max(1, round(config.mlp_expansion * config.d_model))
        self.attention = nn.MultiheadAttention(D, config.attention.heads, dropout, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(D, hidden), nn.GELU(), nn.Linear(hidden, D))
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_NSD: Tensor, others_NKD: Tensor) -> Tensor:
        """[N, S, D] with [N, K, D] to [N, S, D]."""
        seen, _ = self.attention(x_NSD, others_NKD, others_NKD, need_weights=False)
        x_NSD = self.norms[0](x_NSD + self.dropout(seen))
        return self.norms[1](x_NSD + self.dropout(self.mlp(x_NSD)))


class TwoStage(nn.Module):
    """Attention over the segments of each channel, then over the channels of each segment by routers."""

    def __init__(self, config: ModelConfig, segments: int, options: CrossformerOptions):
        super().__init__()
        D, dropout = config.d_model, options.dropout
        self.time, self.across = MultiHeadAttention(config, dropout), MultiHeadAttention(config, dropout)
        self.gather = nn.MultiheadAttention(D, config.attention.heads, dropout, batch_first=True)
        self.routers_SRD = nn.Parameter(torch.randn(segments, options.routers, D))

    def forward(self, x_BCSD: Tensor) -> Tensor:
        """[B, C, S, D] to [B, C, S, D]."""
        x = x_BCSD.flatten(0, 1)
        x = self.time(x, x).view_as(x_BCSD).transpose(1, 2)
        per_segment = x.flatten(0, 1)
        routers = self.routers_SRD.repeat(len(x_BCSD), 1, 1)
        gathered, _ = self.gather(routers, per_segment, per_segment, need_weights=False)
        return self.across(per_segment, gathered).view_as(x).transpose(1, 2)


class Merge(nn.Module):
    """Merges pairs of neighbouring segments; an odd last one is repeated."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.map = nn.LayerNorm(2 * width), nn.Linear(2 * width, width)

    def forward(self, x_BCSD: Tensor) -> Tensor:
        """[B, C, S, D] to [B, C, ceil(S / 2), D]."""
        if x_BCSD.shape[2] % 2:
            x_BCSD = torch.cat([x_BCSD, x_BCSD[:, :, -1:]], 2)
        return self.map(self.norm(torch.cat([x_BCSD[:, :, ::2], x_BCSD[:, :, 1::2]], -1)))


class Decoder(nn.Module):
    """One scale: future segments attend to themselves, then to the encoder, and predict their values."""

    def __init__(self, config: ModelConfig, segments: int, options: CrossformerOptions):
        super().__init__()
        self.own = TwoStage(config, segments, options)
        self.seen = MultiHeadAttention(config, options.dropout)
        self.head = nn.Linear(config.d_model, options.segment)

    def forward(self, x_BCSD: Tensor, encoded_BCKD: Tensor) -> tuple[Tensor, Tensor]:
        """[B, C, S, D] for the next scale, and values [B, C, S, P]."""
        x = self.own(x_BCSD)
        x = self.seen(x.flatten(0, 1), encoded_BCKD.flatten(0, 1)).view_as(x)
        return x, self.head(x)


class Crossformer(Forecaster):
    """``n_layers`` encoder layers, each at half the resolution of the one before, a decoder at each scale.

    The forecast is the sum over scales, the embedding's included. `ModelConfig` sets width, heads and hidden
    width.
    """

    Options = CrossformerOptions

    def __init__(self, config: ModelConfig, window: Window, options: CrossformerOptions):
        super().__init__()
        self.segment, self.horizon = options.segment, window.horizon
        segments, ahead = -(-window.length // options.segment), -(-window.horizon // options.segment)
        D, C, scales = config.d_model, window.channels, range(config.n_layers)
        self.embedding, self.norm = nn.Linear(options.segment, D), nn.LayerNorm(D)
        self.dropout = nn.Dropout(options.dropout)
        self.position_CSD = nn.Parameter(torch.randn(C, segments, D))
        self.ahead_CSD = nn.Parameter(torch.randn(C, ahead, D))
        self.merges = nn.ModuleList(Merge(D) if i else nn.Identity() for i in scales)
        self.encoders = nn.ModuleList(TwoStage(config, -(-segments // 2**i), options) for i in scales)
        self.decoders = nn.ModuleList(Decoder(config, ahead, options) for _ in range(config.n_layers + 1))

    def predict(self, x_BTC: Tensor) -> Tensor:
        x_BCT = x_BTC.transpose(1, 2)
        missing = -x_BCT.shape[-1] % self.segment
        x_BCT = torch.cat([x_BCT[..., :1].expand(-1, -1, missing), x_BCT], -1)
        x = self.embedding(x_BCT.unflatten(-1, (-1, self.segment))) + self.position_CSD
        scales = [self.dropout(self.norm(x))]
        for merge, encoder in zip(self.merges, self.encoders, strict=True):
            scales.append(encoder(merge(scales[-1])))
        y, parts = self.ahead_CSD.expand(len(x_BTC), -1, -1, -1), []
        for decoder, encoded in zip(self.decoders, scales, strict=True):
            y, part = decoder(y, encoded)
            parts.append(part)
        return torch.stack(parts).sum(0).flatten(2)[..., : self.horizon].transpose(1, 2)
