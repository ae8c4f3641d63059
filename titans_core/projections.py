"""Queries, keys and values of the memory and of attention (Section 4.4), and their polynomial features.

Shapes: B batch, T tokens, D model width, H heads, E head width, C = H * E channels, K convolution width,
P width of the features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from titans_core.documents import Documents
from titans_core.layers import CausalConv
from titans_kernels import state_dtype, without_autocast
from titans_kernels.memory.activations import ACTIVATIONS

ConvState = dict[str, Tensor]
"""For q, k and v the last inputs of the convolution, [B, K - 1, C] each; empty without a convolution."""


class Projections(nn.Module):
    """Linear projections of q, k and v, SiLU, a causal depthwise convolution, L2-normalised heads.

    Args:
        d_model: width D of the input.
        heads: number of heads H.
        head_dim: their width E.
        conv_kernel: K; None for no convolution.
        normalized: names of those that are L2-normalised, such as ``"qk"``.
        silu: whether SiLU follows the projections.
        query_correction: whether keys are subtracted from queries, before both are normalised
            (`MemoryConfig.query_correction`).
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        head_dim: int,
        conv_kernel: int | None,
        normalized: str,
        silu: bool = True,
        query_correction: bool = False,
    ):
        super().__init__()
        self.heads, self.head_dim, self.normalized, self.silu = heads, head_dim, normalized, silu
        channels = heads * head_dim
        self.w_q = nn.Linear(d_model, channels, bias=False)
        self.w_k = nn.Linear(d_model, channels, bias=False)
        self.w_v = nn.Linear(d_model, channels, bias=False)
        self.log_correction_H = nn.Parameter(torch.empty(heads)) if query_correction else None
        self.has_conv = conv_kernel is not None
        if conv_kernel is not None:
            self.conv_q = CausalConv(channels, conv_kernel)
            self.conv_k = CausalConv(channels, conv_kernel)
            self.conv_v = CausalConv(channels, conv_kernel)

    def project(
        self, x_BTD: Tensor, names: str, conv_state: ConvState, documents: Documents | None = None
    ) -> tuple[list[Tensor], ConvState]:
        """Each of ``names`` [B, T, H, E], normalised ones in the precision of the state.

        ``conv_state`` is the state after the previous tokens of every row, or, when packed, a batch of one at
        the start of every document. Returns also the state after the last token, meaningless when packed.
        """
        if self.log_correction_H is None or "q" not in names:
            return self.heads_of(x_BTD, names, self.normalized, conv_state, documents)
        # both are normalised after the correction
        normalized = self.normalized.strip("qk")
        (q, k, *rest), conv_state = self.heads_of(x_BTD, names, normalized, conv_state, documents)
        with without_autocast(q):
            q, k = (x.to(state_dtype(x)) for x in (q, k))
            pair = {"q": q - self.log_correction_H.to(q.dtype).exp()[:, None] * k, "k": k}
            normed = [l2_normalized(x) if name in self.normalized else x for name, x in pair.items()]
        return [*normed, *rest], conv_state

    @property
    def read_names(self) -> str:
        """The projections that queries depend on."""
        return "q" if self.log_correction_H is None else "qk"

    def heads_of(
        self, x_BTD: Tensor, names: str, normalized: str, conv_state: ConvState, documents: Documents | None
    ) -> tuple[list[Tensor], ConvState]:
        """Linear layer, SiLU, convolution and norm of each of ``names``, split into heads [B, T, H, E]."""
        heads, after = [], dict(conv_state)
        for name in names:
            y = getattr(self, f"w_{name}")(x_BTD)
            y = F.silu(y) if self.silu else y
            if self.has_conv:
                y, after[name] = getattr(self, f"conv_{name}")(y, conv_state[name], documents)
            head = y.unflatten(-1, (self.heads, self.head_dim))
            heads.append(l2_normalized(head) if name in normalized else head)
        return heads, after

    def zero_conv_state(self, names: str = "qkv") -> ConvState:
        """The state before the first token, for a batch of one."""
        return {name: getattr(self, f"conv_{name}").zero_state(1) for name in names if self.has_conv}

    def conv_bytes(self, names: str = "qkv") -> int:
        """Bytes of the convolution state of ``names`` per sequence."""
        return sum(inputs.nbytes for inputs in self.zero_conv_state(names).values())


def expand_rows(conv_state: ConvState, batch: int) -> ConvState:
    """Repeat the state of a batch of one for ``batch`` rows."""
    return {name: inputs.expand(batch, -1, -1) for name, inputs in conv_state.items()}


def l2_normalized(x: Tensor) -> Tensor:
    """x with L2 norm 1 over the last dimension, in the precision of the state."""
    return F.normalize(x.to(state_dtype(x)), dim=-1, eps=1e-6)


def layer_features(x_BTHE: Tensor, layers: Sequence[Tensor], activation: str, normalized: bool) -> Tensor:
    """f(x) of each layer [H, E, F] after the other, in the precision of the state, L2-normalised if asked."""
    f, dtype = ACTIVATIONS[activation], state_dtype(x_BTHE)
    with without_autocast(x_BTHE):
        x = x_BTHE.to(dtype)
        for W in layers:
            x = f.value(torch.einsum("bthd,hde->bthe", x, W.to(dtype)))
        return l2_normalized(x) if normalized else x


class PolynomialFeatures(nn.Module):
    """``phi(x) = [a_0, a_1 x, a_2 x (x) x]`` with coefficients a_i of each head, which start at 1 / i!.

    Of ``x (x) x`` each product is taken once, with a factor sqrt(2) where it occurs twice: the inner products
    are those of all E^2, ``phi(q) . phi(k) = a_0^2 + a_1^2 q . k + a_2^2 (q . k)^2``, at a width
    ``P = 1 + E + E (E + 1) / 2``, the paper's binom(E + 2, 2) (ATLAS, arXiv 2505.23735, Section 3.1, eq. 5).
    """

    def __init__(self, heads: int, head_dim: int):
        super().__init__()
        self.coefficients_HI = nn.Parameter(torch.empty(heads, 3))
        self.width = 1 + head_dim + head_dim * (head_dim + 1) // 2

    def forward(self, x_BTHE: Tensor) -> Tensor:
        """[B, T, H, E] to [B, T, H, P], in the precision of the state."""
        dtype = state_dtype(x_BTHE)
        with without_autocast(x_BTHE):
            x, (a_0, a_1, a_2) = x_BTHE.to(dtype), self.coefficients_HI.to(dtype)[..., None].unbind(1)
            rows, columns = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device).unbind()
            occurs = 1 + (rows != columns).to(dtype)
            products = x.index_select(-1, rows) * x.index_select(-1, columns) * occurs.sqrt()
            return torch.cat([a_0.expand(*x.shape[:-1], 1), a_1 * x, a_2 * products], -1)
