"""Hyena, gated long convolutions (Poli et al. 2023, arXiv 2302.10866, Section 3; order 2).

Shapes: B batch, T tokens, S tokens before them, D model width, L taps, K convolution width, N documents.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from titans_core.blocks.base import Block, Positions
from titans_core.config import Frozen, ModelConfig
from titans_core.documents import Documents
from titans_core.layers import CausalConv
from titans_kernels import state_dtype, without_autocast

DIRECT = 64
"""Longest convolution computed as one matrix product; longer ones also use Fourier transforms."""


class HyenaOptions(Frozen):
    """Options of Hyena."""

    length: PositiveInt = 1024
    """L, the number of filter taps: its receptive field, and the number of past inputs in the state."""
    filter_width: PositiveInt = 64
    """Width of the network that generates the filter."""
    bands: PositiveInt = 2
    """Number of frequencies of its positional encoding, each as sine and cosine."""
    conv_kernel: PositiveInt = 3


class HyenaState(NamedTuple):
    """Hyena's state: the last inputs of the short and of the long convolution."""

    conv_BKC: Tensor
    inputs_BSD: Tensor


class ImplicitFilter(nn.Module):
    """The taps h_t of a filter as a network of t, times a window: ``h_t = f(t / L) exp(-a t / L)``.

    f has three layers with sine activations of learned frequency. a differs by channel: the window falls to
    1% between 0.3 L and 1.5 L. Weight decay does not apply to it, as published.
    """

    INNER, FREQUENCY, FAST, SLOW, LEFT = 2, 10.0, 0.3, 1.5, 0.01

    def __init__(self, channels: int, options: HyenaOptions):
        super().__init__()
        self.channels, self.options, width = channels, options, options.filter_width
        sizes = [1 + 2 * options.bands, *[width] * (self.INNER + 1)]
        pairs = list(pairwise(sizes))
        self.weights = nn.ParameterList(_uniform(n, n, m) for n, m in pairs)
        self.biases = nn.ParameterList(_uniform(n, m) for n, m in pairs)
        self.frequency = nn.Parameter(torch.full((width,), self.FREQUENCY))
        self.last = _uniform(width, width, channels)

    def forward(self, taps: int) -> Tensor:
        """[taps, D], the first ``taps`` of the filter, in the precision of a state."""
        weight, length = self.last, self.options.length
        dtype = state_dtype(weight)
        place = torch.arange(taps, device=weight.device, dtype=dtype)[:, None]
        t, bands = place / max(1, length - 1), self.options.bands
        frequencies = torch.linspace(1e-4, bands - 1, bands, device=t.device, dtype=dtype)
        angle = 2 * math.pi / length * place * frequencies
        h = torch.cat([t, angle.cos(), -angle.sin()], -1)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            h = torch.sin(self.frequency.to(dtype) * (h @ weight.to(dtype) + bias.to(dtype)))
        rate = torch.linspace(1 / self.SLOW, 1 / self.FAST, self.channels, device=t.device, dtype=dtype)
        return h @ self.last.to(dtype) * torch.exp(math.log(self.LEFT) * rate * t)


def _uniform(fan_in: int, *shape: int) -> nn.Parameter:
    bound = fan_in**-0.5
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))


class Hyena(Block):
    """``q * (h * (k v) + d k v)`` of projections q, k, v after a short convolution, h a filter of L taps.

    The convolution is exact and causal for any length. Its state is the last L - 1 inputs.
    """

    Options = HyenaOptions
    uses_persistent = False

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        D = config.d_model
        self.w_in = nn.Linear(D, 3 * D, bias=False)
        self.conv = CausalConv(3 * D, self.options.conv_kernel)
        self.filter = ImplicitFilter(D, self.options)
        self.skip_D = nn.Parameter(torch.randn(D))
        self.w_o = nn.Linear(D, D, bias=False)

    def mix(
        self, x_BTD: Tensor, state: HyenaState | None, positions: Positions
    ) -> tuple[Tensor, HyenaState | None]:
        documents = positions.documents
        state = state or self.start(1 if documents else x_BTD.shape[0])
        y, conv = self.conv(self.w_in(self.norm(x_BTD)), state.conv_BKC, documents)
        with without_autocast(y):
            q, k, v = y.to(state.inputs_BSD.dtype).chunk(3, -1)
            u = k * v
            y, inputs = self._filtered(u, state.inputs_BSD, documents)
            y = q * (y + self.skip_D * u)
        out = x_BTD + self.w_o(y.to(x_BTD.dtype))
        return out, None if documents else HyenaState(conv, inputs)

    def _filtered(
        self, u_BTD: Tensor, past_BSD: Tensor, documents: Documents | None
    ) -> tuple[Tensor, Tensor]:
        """Return the long convolution, and the inputs that it needs for later tokens."""
        if documents is not None:
            rows = _unpacked(u_BTD, documents)
            y = causal_convolution(rows, self._taps(rows.shape[1]), past_BSD)
            return y[documents.index_BT, documents.position_BT], past_BSD
        inputs = torch.cat([past_BSD, u_BTD], 1)
        y = causal_convolution(u_BTD, self._taps(inputs.shape[1]), past_BSD)
        keep = min(inputs.shape[1], self.options.length - 1)
        return y, inputs[:, inputs.shape[1] - keep :].clone()

    def _taps(self, tokens: int) -> Tensor:
        """Return the filter, zero-padded to ``tokens``."""
        h = self.filter(min(tokens, self.options.length))
        return F.pad(h, (0, 0, 0, tokens - len(h)))

    def start(self, batch: int) -> HyenaState:
        """Return the state before the first token."""
        weight = self.w_o.weight
        none = weight.new_zeros(batch, 0, weight.shape[0]).to(state_dtype(weight))
        return HyenaState(self.conv.zero_state(batch), none)

    def state_bytes(self, length: int) -> int:
        conv, none = self.start(1)
        kept = min(length, self.options.length - 1)
        return conv.nbytes + kept * none.shape[-1] * none.element_size()


def _unpacked(u_BTD: Tensor, documents: Documents) -> Tensor:
    """[N, longest, D], one zero-padded document per row."""
    rows, longest = documents.cu_seqlens.shape[0] - 1, int(documents.position_BT.max()) + 1
    empty = u_BTD.new_zeros(rows, longest, u_BTD.shape[-1])
    return empty.index_put((documents.index_BT, documents.position_BT), u_BTD)


def causal_convolution(u_BTD: Tensor, h: Tensor, past_BSD: Tensor) -> Tensor:
    """``y_t = sum_s h_{t - s} u_s`` over the tokens up to t and the ``past`` ones before them.

    h is [S + T, D]. Within blocks of up to DIRECT tokens it is a matrix product. What a block contributes
    to the next one, a pair of blocks to the next pair, and so on, is computed by Fourier transforms of the
    earlier tokens only, so that no rounding error of a later token reaches an earlier one.
    """
    u_BDT, h_DL, past_BDS = u_BTD.mT, h.mT, past_BSD.mT[:, :, None]
    y_BDT = _within(u_BDT, h_DL)
    if past_BDS.shape[-1]:
        y_BDT = y_BDT + _across(past_BDS, h_DL, u_BDT.shape[-1])[:, :, 0]
    return y_BDT.mT


def _within(u_BDT: Tensor, h_DL: Tensor) -> Tensor:
    """Convolve without past inputs, [B, D, T], by merging pairs of blocks."""
    T = u_BDT.shape[-1]
    joins = max(0, math.ceil(math.log2(T / DIRECT)))
    size = 4 * math.ceil(T / 2**joins / 4) if joins else T
    u, h = (F.pad(x, (0, size * 2**joins - T)) for x in (u_BDT, h_DL[:, :T]))
    blocks = u.unflatten(-1, (-1, size))
    y = _product(F.pad(h[:, :size], (size - 1, 0)), blocks)
    for join in range(joins):
        contribution = _across(blocks[:, :, ::2], h, size << join)
        y = torch.cat([y[:, :, ::2], y[:, :, 1::2] + contribution], -1)
        blocks = u.unflatten(-1, (-1, size << (join + 1)))
    return y.flatten(2)[..., :T]


def _across(x: Tensor, h_DL: Tensor, tokens: int) -> Tensor:
    """Return what blocks [B, D, N, S] contribute to the ``tokens`` tokens after each, [B, D, N, tokens]."""
    S = x.shape[-1]
    h_DL = h_DL[:, : S + tokens]
    if tokens == 1:
        return _product(h_DL[:, 1:], x)
    size = S + tokens + (S + tokens) % 2  # circular wrap-around only affects the first S outputs
    spectrum = torch.fft.rfft(x, size) * torch.fft.rfft(h_DL, size)[:, None]
    return torch.fft.irfft(spectrum, size)[..., S : S + tokens]


def _product(h_DL: Tensor, x: Tensor) -> Tensor:
    """``y_t = sum_s h_{t + S - 1 - s} x_s`` of [B, D, N, S], at the L - S + 1 positions with all taps."""
    windows = h_DL.unfold(-1, x.shape[-1], 1)  # [D, places, S]
    return torch.einsum("dts,bdns->bdnt", windows, x.flip(-1))
