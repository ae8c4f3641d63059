"""Based, linear attention beside a small window (Arora et al. 2024, arXiv 2402.18668, Section 4).

Shapes: B batch, T tokens, D model width, H heads, E key width, F value width, K convolution width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from titans_core.blocks.base import Block, Positions
from titans_core.blocks.baselines.hybrids import Hybrid
from titans_core.blocks.baselines.linear import HeadOptions, LinearAttention
from titans_core.blocks.transformer import Transformer
from titans_core.config import ModelConfig
from titans_core.layers import CausalConv
from titans_kernels import state_dtype


class BasedOptions(HeadOptions):
    """Options of Based."""

    feature: PositiveInt = 16
    """E, the width of a head's queries and keys; the state of a head has 1 + E + E (E + 1) / 2 rows."""
    window: PositiveInt = 64
    """Tokens that a query of the layer of attention sees, itself included."""


class ConvInputs(NamedTuple):
    """The last inputs of a convolution."""

    conv_BKC: Tensor


class ShortConv(Block):
    """A gated convolution over three tokens, BaseConv: ``W_o (silu(conv(z W_1)) * z W_2)``, twice as wide."""

    uses_persistent = False
    EXPANSION, KERNEL = 2, 3

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        channels = self.EXPANSION * config.d_model
        self.w_in = nn.Linear(config.d_model, 2 * channels, bias=False)
        self.conv = CausalConv(channels, self.KERNEL)
        self.w_o = nn.Linear(channels, config.d_model, bias=False)

    def mix(
        self, x_BTD: Tensor, state: ConvInputs | None, positions: Positions
    ) -> tuple[Tensor, ConvInputs | None]:
        documents = positions.documents
        before = self.conv.zero_state(1 if documents else x_BTD.shape[0]) if state is None else state.conv_BKC
        u, gate = self.w_in(self.norm(x_BTD)).chunk(2, -1)
        u, after = self.conv(u, before, documents)
        return x_BTD + self.w_o(F.silu(u) * gate), None if documents else ConvInputs(after)

    def state_bytes(self, length: int) -> int:
        return self.conv.zero_state(1).nbytes


class TaylorAttention(LinearAttention):
    """Linear attention whose weights are the Taylor series of exp to its second order.

    ``y_t = sum_{s <= t} p(q_t k_s) v_s / sum_{s <= t} p(q_t k_s)`` with ``p(x) = 1 + x + x^2 / 2``, which is
    a product of features of q and of k, and always above 0.
    """

    Options = BasedOptions

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        D, self.keys = config.d_model, self.heads * self.options.feature
        self.w_q, self.w_k = (nn.Linear(D, self.keys, bias=False) for _ in range(2))
        self.w_v, self.w_o = (nn.Linear(D, D, bias=False) for _ in range(2))

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        if config.d_model % (heads := cls.read_options(config).heads):
            raise ValueError(f"options.heads: {heads} does not divide {config.d_model} values")

    def tokens(
        self, projected: list[Tensor], z_BTD: Tensor, positions: Positions
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dtype = state_dtype(z_BTD)
        q, k, v = (self.split(x).to(dtype) for x in projected)
        # a last value of 1 sums up the weights
        v = F.pad(v, (0, 1), value=1.0)
        return taylor_features(q), taylor_features(k), v, v.new_zeros(*v.shape[:3], 1)

    def output(self, y_BTHF: Tensor, z_BTD: Tensor) -> Tensor:
        y = y_BTHF[..., :-1] / y_BTHF[..., -1:]
        return self.w_o(y.flatten(2).to(z_BTD.dtype))

    def start(self, batch: int) -> Tensor:
        """Return the state before the first token: zeros [B, H, features, F + 1]."""
        E, weight = self.options.feature, self.norm.weight
        zeros = weight.new_zeros(batch, self.heads, 1 + E + E * (E + 1) // 2, self.values // self.heads + 1)
        return zeros.to(state_dtype(weight))


def taylor_features(x: Tensor) -> Tensor:
    """Features f of [..., E] with ``f(q) f(k) = 1 + s + s^2 / 2`` for ``s = q k / sqrt(E)``."""
    E = x.shape[-1]
    x = x * E**-0.25
    # each pair once: pairs of two different numbers count twice in the square
    pairs = torch.cat([x[..., i : i + 1] * x[..., i:] for i in range(E)], -1)
    row, column = torch.triu_indices(E, E, device=x.device)
    scale = (1 - 0.5 * (row == column).to(x.dtype)).sqrt()
    return torch.cat([torch.ones_like(x[..., :1]), x, pairs * scale], -1)


class Based(Hybrid):
    """Three layers: a short gated convolution, linear attention by Taylor features, attention over a window.

    The published 360M model has 17 layers of the first kind, 5 of the second and 5 of the third.
    """

    Options = BasedOptions
    kinds = (ShortConv, TaylorAttention, Transformer)
    layers = 3
    preset_window = False

    @classmethod
    def _parts(cls, config: ModelConfig) -> list[tuple[type[Block], ModelConfig]]:
        options: Any = cls.read_options(config)
        attention = config.attention.model_copy(update={"window": options.window})
        changes = [{"options": {}}, {}, {"options": {}, "attention": attention}]
        return [(kind, config.model_copy(update=c)) for kind, c in zip(cls.kinds, changes, strict=True)]
