"""Small layers shared by the blocks.

Shapes: B batch, T tokens, D model width, H heads, C channels, K convolution width.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from titans_core.documents import Documents
from titans_kernels import state_dtype, without_autocast

EPS = 1e-6
"""Epsilon of every norm."""


class RMSNorm(nn.RMSNorm):
    """RMSNorm with the weight in the input's precision: torch leaves its fused kernel when they differ."""

    def __init__(self, width: int):
        super().__init__(width, eps=EPS)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """[..., D] to [..., D], times silu(gate) and in the gate's precision if one [..., D] is given."""
        y = F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), EPS)
        return y if gate is None else y.to(gate.dtype) * F.silu(gate)


class GateLinear(nn.Linear):
    """nn.Linear in the precision of the memory's state: in bfloat16 a gate near 1 would round to 1."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., D] to [..., F], before the sigmoid."""
        dtype = state_dtype(self.weight)
        with without_autocast(input):
            return F.linear(input.to(dtype), self.weight.to(dtype), self.bias.to(dtype))


class HeadNorm(nn.Module):
    """Weight and bias of the LN inside each head's memory, [H, E]; the operator applies them."""

    def __init__(self, heads: int, width: int):
        super().__init__()
        self.weight_HE = nn.Parameter(torch.empty(heads, width))
        self.bias_HE = nn.Parameter(torch.empty(heads, width))


class CausalConv(nn.Module):
    """Depthwise convolution over the last K tokens; starts afresh at each document.

    With ``pointwise`` it is depthwise-separable: a linear layer over the channels follows.
    """

    def __init__(self, channels: int, kernel: int, pointwise: bool = False):
        super().__init__()
        self.weight_KC = nn.Parameter(torch.empty(kernel, channels))
        self.pointwise = nn.Linear(channels, channels, bias=False) if pointwise else None

    def forward(
        self, x_BTC: Tensor, state_BKC: Tensor, documents: Documents | None = None
    ) -> tuple[Tensor, Tensor]:
        """y_t = sum_j w_j x_{t-j}, through the pointwise layer if there is one.

        ``state_BKC`` holds the K - 1 inputs before the first token ([1, K - 1, C] before every document
        when packed). Returns y and the state after the last token.
        """
        w, T = self.weight_KC, x_BTC.shape[1]
        state = state_BKC if documents is None else state_BKC[:1]
        padded = torch.cat([state.expand(x_BTC.shape[0], -1, -1).to(x_BTC.dtype), x_BTC], 1)
        position = None if documents is None else documents.position_BT[..., None]
        y, last = w[0] * x_BTC, len(w) - 1
        for j in range(1, len(w)):
            shifted = padded[:, last - j : last - j + T]
            if position is not None:
                shifted = torch.where(position >= j, shifted, 0)
            y = torch.addcmul(y, w[j], shifted)
        after = None
        if documents is not None and documents.part and last:
            y, after = _continued(y, x_BTC, w, state_BKC, documents.cu_seqlens)
        elif position is not None:
            for t in range(last):  # masks: the gradient of an index into the state would be accumulated
                before_C = (w[t + 1 :] * state_BKC[0, t:].flip(0)).sum(0)
                y = y + torch.where(position == t, before_C, 0)
        y = y if self.pointwise is None else self.pointwise(y)
        # a copy: a view would keep every input alive for as long as the state
        return y, padded[:, T:].clone() if after is None else after

    def zero_state(self, batch: int) -> Tensor:
        """Return the state before the first token: zeros [B, K - 1, C]."""
        kernel, channels = self.weight_KC.shape
        return self.weight_KC.new_zeros(batch, kernel - 1, channels)


def _continued(y: Tensor, x: Tensor, w: Tensor, state: Tensor, borders: Tensor) -> tuple[Tensor, Tensor]:
    """Add what ``state`` [N or 1, K - 1, C] brings to N parts in one row; with the state after each."""
    first, end, last = borders[:-1, None].long(), borders[1:, None].long(), len(w) - 1
    state, step = state.expand(len(first), -1, -1).to(x.dtype), torch.arange(last, device=x.device)
    before = torch.stack([(w[t + 1 :] * state[:, t:].flip(1)).sum(1) for t in range(last)], 1)
    before = torch.where((first + step < end)[..., None], before, 0)
    at = (first + step).clamp(max=x.shape[1] - 1).flatten()
    y = y.index_add(1, at, before.flatten(0, 1)[None].to(y.dtype))
    back = end - last + step
    held = state.gather(1, (back - first + last).clamp(0, last - 1)[..., None].expand_as(state))
    return y, torch.where((back >= first)[..., None], x[0, back.clamp(min=0)], held)


class SwiGLU(nn.Module):
    """The feed-forward layer of Llama: x + (silu(z W_1) * z W_2) W_3, z = norm x."""

    def __init__(self, d_model: int, expansion: float):
        super().__init__()
        # a multiple of 16 that tensor cores like, at every scale
        hidden = max(16, 16 * round(expansion * d_model / 16))
        self.gate = nn.Linear(d_model, hidden, bias=False)
        self.up = nn.Linear(d_model, hidden, bias=False)
        self.down = nn.Linear(hidden, d_model, bias=False)

    def forward(self, x_BTD: Tensor, norm: nn.Module) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        z = norm(x_BTD)
        return x_BTD + self.down(F.silu(self.gate(z)) * self.up(z))


Gating = Literal["sum", "sigmoid", "silu", "product"]
"""The ways in which attention's output gates the memory in MAC and MAG: see `Gate`."""


class Gate(nn.Module):
    """Gate of MAC and MAG: adds the memory's output m to a stream that holds the attention's output y.

    The paper (eqs. 25, 28) normalises with learned vectors, follows with a non-linearity and multiplies; it
    leaves open which side the non-linearity is on.

    | gating | adds |
    |---|---|
    | sum | m |
    | sigmoid | 2 sigmoid(norm(y)) * m |
    | silu | silu(norm(y)) * m |
    | product | norm(y) * silu(norm(m)) |
    """

    def __init__(self, d_model: int, gating: Gating):
        super().__init__()
        self.gating = gating
        self.norm = RMSNorm(d_model) if gating != "sum" else None
        self.memory_norm = RMSNorm(d_model) if gating == "product" else None

    def forward(self, y_BTD: Tensor, memory_BTD: Tensor) -> Tensor:
        """[B, T, D] and [B, T, D] to [B, T, D]."""
        if self.norm is None:
            return memory_BTD
        y_BTD = self.norm(y_BTD)
        if self.memory_norm is not None:
            return y_BTD * F.silu(self.memory_norm(memory_BTD))
        return (2 * y_BTD.sigmoid() if self.gating == "sigmoid" else F.silu(y_BTD)) * memory_BTD


class RotaryEmbedding(NamedTuple):
    """Cosine and sine of each pair's angle at some positions, [B or 1, 1, T, E / 2]."""

    cos: Tensor
    sin: Tensor

    @staticmethod
    def at(position_BT: Tensor, width: int, base: float, dtype: torch.dtype) -> RotaryEmbedding:
        """Angles in float64: in float32 those two million tokens in would be a hundredth off."""
        make = _rotary if torch.compiler.is_compiling() else cosine_and_sine
        return RotaryEmbedding(*make(position_BT, width, base, dtype))


def cosine_and_sine(
    position_BT: Tensor, width: int, base: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Fields of `RotaryEmbedding` in ``dtype``, computed in float64."""
    half = width // 2
    exponent = torch.arange(half, device=position_BT.device, dtype=torch.float64) / half
    angle = position_BT[:, None, :, None].double() * base**-exponent
    return angle.cos().to(dtype), angle.sin().to(dtype)


# opaque to torch.compile, which would compute them again for every head in each kernel that rotates: a
# quarter of a Transformer's step on an H100
_rotary = torch.library.custom_op(
    "titans::rotary",
    cosine_and_sine,
    mutates_args=(),
    schema="(Tensor position, int width, float base, ScalarType dtype) -> (Tensor, Tensor)",
)
_rotary.register_fake(cosine_and_sine)


def rotate(x_BHTE: Tensor, rotary: RotaryEmbedding | None) -> Tensor:
    """Rotate queries or keys [B, H, T, E] by the angles of their positions; None rotates nothing."""
    if rotary is None:
        return x_BHTE
    left, right = x_BHTE.chunk(2, -1)
    cos, sin = (part.to(x_BHTE.dtype) for part in rotary)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)
