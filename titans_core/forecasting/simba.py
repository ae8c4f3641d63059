"""Simba (Patro and Agneeswaran 2024, arXiv 2403.15360): a sequence mixer, and EinFFT across channels.

The sequence mixer is a block of `ModelConfig.variant`: Mamba as published, or the neural memory in its place.
"""

from __future__ import annotations

from typing import cast

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from titans_core.blocks import Block, Positions, resolve
from titans_core.config import ModelConfig
from titans_core.forecasting.base import Window
from titans_core.forecasting.patchtst import PatchForecaster, PatchOptions
from titans_core.init import initialize
from titans_core.layers import RMSNorm
from titans_kernels import state_dtype, without_autocast


class SimbaOptions(PatchOptions):
    """Options of Simba."""

    groups: PositiveInt = 4
    """G, the number of channel groups that EinFFT mixes separately; divides d_model."""
    shrink: NonNegativeFloat = 0.01
    """Soft-thresholding (softshrink) of the spectrum."""


class EinFFT(nn.Module):
    """Two complex layers on the spectrum of the tokens, with a block-diagonal weight of G groups.

    For the Fourier transform X of x over tokens and groups (as the published code has it), with complex
    weights W and biases b of each group: ``Y = shrink(W_2 relu(W_1 X + b_1) + b_2)``; relu and shrink act on
    real and imaginary parts each by themselves. The output is the real part of the inverse transform of Y.
    """

    def __init__(self, width: int, options: SimbaOptions):
        super().__init__()
        if width % options.groups:
            raise ValueError(f"d_model: {options.groups} groups of EinFFT do not divide {width}")
        self.groups, self.shrink, size = options.groups, options.shrink, width // options.groups
        self.weights = nn.ParameterList(0.02 * torch.randn(2, self.groups, size, size) for _ in range(2))
        self.biases = nn.ParameterList(0.02 * torch.randn(2, self.groups, size) for _ in range(2))

    def forward(self, x_BND: Tensor) -> Tensor:
        """[B, N, D] to [B, N, D]."""
        with without_autocast(x_BND):  # transforms know no lower precision
            x = x_BND.to(state_dtype(x_BND)).unflatten(-1, (self.groups, -1))
            x = torch.fft.fft2(x, dim=(1, 2), norm="ortho")
            real, imaginary = self._layer(0, x.real, x.imag)
            real, imaginary = self._layer(1, F.relu(real), F.relu(imaginary))
            spectrum = torch.complex(F.softshrink(real, self.shrink), F.softshrink(imaginary, self.shrink))
            y = torch.fft.ifft2(spectrum, dim=(1, 2), norm="ortho").real
        return y.flatten(-2).to(x_BND.dtype)

    def _layer(self, index: int, real: Tensor, imaginary: Tensor) -> tuple[Tensor, Tensor]:
        """W x + b of complex numbers, group by group; [B, N, G, D / G]."""
        (w, v), (b, c) = (x[index].to(real.dtype) for x in (self.weights, self.biases))
        return _grouped(real, w) - _grouped(imaginary, v) + b, _grouped(real, v) + _grouped(imaginary, w) + c


def _grouped(x: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("...gd,gde->...ge", x, weight)


class Simba(PatchForecaster):
    """Blocks of ``x + mixer(norm x)``, then ``x + EinFFT(norm x)``, over the patches of each channel.

    The paper leaves open how a series becomes tokens; here it is PatchTST's way. The mixer is the sequence
    mixer of `ModelConfig.variant` without its feed-forward layer, whose place EinFFT has.
    """

    Options = SimbaOptions

    def __init__(self, config: ModelConfig, window: Window, options: SimbaOptions):
        super().__init__(config, window, options)
        self.window = window
        block, bare = resolve(config), config.model_copy(update={"mlp_expansion": 0.0})
        self.mixers = nn.ModuleList(block(bare) for _ in range(config.n_layers))
        initialize(self.mixers, config.n_layers)
        self.norms = nn.ModuleList(RMSNorm(config.d_model) for _ in range(config.n_layers))
        self.channels = nn.ModuleList(EinFFT(config.d_model, options) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.d_model)

    def encode(self, x_BND: Tensor) -> Tensor:
        positions = Positions(torch.arange(x_BND.shape[1], device=x_BND.device)[None])
        for mixer, norm, channels in zip(self.mixers, self.norms, self.channels, strict=True):
            x_BND, _ = mixer(x_BND, None, positions)
            x_BND = x_BND + self.dropout(channels(norm(x_BND)))
        return self.norm(x_BND)

    def state_bytes(self, length: int) -> int:
        # each channel is read by itself
        return self.window.channels * sum(cast(Block, m).state_bytes(self.patches) for m in self.mixers)
