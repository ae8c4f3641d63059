"""Queries, keys and values of the memory and of attention (Section 4.4).

Shapes: B batch, T tokens, D model width, H heads, E head width, C = H * E channels, K convolution width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from titans_core.documents import Documents
from titans_core.layers import CausalConv, Linear, is_plain
from titans_kernels import linear, short_convolution, state_dtype, without_autocast

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
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        head_dim: int,
        conv_kernel: int | None,
        normalized: str,
        silu: bool = True,
    ):
        super().__init__()
        self.heads, self.head_dim, self.normalized, self.silu = heads, head_dim, normalized, silu
        channels = heads * head_dim
        self.w_q = Linear(d_model, channels, bias=False)
        self.w_k = Linear(d_model, channels, bias=False)
        self.w_v = Linear(d_model, channels, bias=False)
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
        # one product and one convolution for all names, with concatenated weights
        layers, normalized = self.layers(names), self.normalized
        plain = is_plain(*layers)
        y = linear(x_BTD, self.weights(names)) if plain else torch.cat([f(x_BTD) for f in layers], -1)
        if self.silu and (fused := self._fused(y, names, normalized, conv_state, documents)):
            return fused
        parts = list((F.silu(y) if self.silu else y).unflatten(-1, (len(names), -1)).unbind(-2))
        for i, name in enumerate(names if self.has_conv else ""):
            parts[i], after = getattr(self, f"conv_{name}")(parts[i], conv_state[name], documents)
            conv_state = {**conv_state, name: after}
        heads = [part.unflatten(-1, (self.heads, self.head_dim)) for part in parts]
        return [
            _l2_normalized(h) if n in normalized else h for n, h in zip(names, heads, strict=True)
        ], conv_state

    def unit_bits(self, names: str) -> int:
        """Which of ``names`` are normalised: bit i for the i-th."""
        return sum(1 << i for i, name in enumerate(names) if name in self.normalized)

    def layers(self, names: str) -> list[nn.Linear]:
        """The linear layers of ``names``."""
        return [getattr(self, f"w_{name}") for name in names]

    def weights(self, names: str) -> Tensor:
        """Their weights, concatenated."""
        return torch.cat([layer.weight for layer in self.layers(names)])

    def conv_weights(self, names: str) -> Tensor:
        """[K, names * C]; ones of width 1 without a convolution."""
        if not self.has_conv:
            return self.w_q.weight.new_ones(1, len(names) * self.w_q.weight.shape[0])
        return torch.cat([getattr(self, f"conv_{name}").weight_KC for name in names], 1)

    def conv_inputs(self, names: str, conv_state: ConvState) -> Tensor:
        """``conv_state`` as one tensor, [B, K - 1, names * C]."""
        if not self.has_conv:
            return self.w_q.weight.new_empty(1, 0, len(names) * self.w_q.weight.shape[0])
        return torch.cat([conv_state[name] for name in names], -1)

    def conv_state(self, names: str, inputs: Tensor) -> ConvState:
        """Inverse of `conv_inputs`."""
        return dict(zip(names if self.has_conv else "", inputs.chunk(len(names), -1), strict=False))

    def zero_conv_state(self, names: str = "qkv") -> ConvState:
        """The state before the first token, for a batch of one."""
        return {name: getattr(self, f"conv_{name}").zero_state(1) for name in names if self.has_conv}

    def conv_bytes(self, names: str = "qkv") -> int:
        """Bytes of the convolution state of ``names`` per sequence."""
        return sum(inputs.nbytes for inputs in self.zero_conv_state(names).values())

    def _fused(
        self, y: Tensor, names: str, normalized: str, conv_state: ConvState, documents: Documents | None
    ) -> tuple[list[Tensor], ConvState] | None:
        """All that follows the projections y [B, T, names * C] as one fused operator; None if unsupported."""
        weight, state = self.conv_weights(names), self.conv_inputs(names, conv_state)
        borders = documents and documents.cu_seqlens
        scaled = [name in normalized for name in names]
        heads = short_convolution(y, weight, state, scaled, self.heads, borders)
        if heads is None:
            return None
        if not self.has_conv or documents is not None:
            return heads, conv_state
        return heads, conv_state | self.conv_state(names, _last_inputs(y, state))


def _last_inputs(y: Tensor, state_BKC: Tensor) -> Tensor:
    """The convolution's last K - 1 inputs, including earlier ones if the call is shorter than that."""
    keep = state_BKC.shape[1]
    last = F.silu(y[:, max(0, y.shape[1] - keep) :])
    if last.shape[1] == keep:
        return last
    return torch.cat([state_BKC[:, last.shape[1] :].expand(len(y), -1, -1), last], 1)


def expand_rows(conv_state: ConvState, batch: int) -> ConvState:
    """Repeat the state of a batch of one for ``batch`` rows."""
    return {name: inputs.expand(batch, -1, -1) for name, inputs in conv_state.items()}


def _l2_normalized(x: Tensor) -> Tensor:
    """x with L2 norm 1 over the last dimension, in the precision of the state."""
    return F.normalize(x.to(state_dtype(x)), dim=-1, eps=1e-6)


def project_gates(linears: list[nn.Linear], x: Tensor) -> Sequence[Tensor]:
    """Gates in [0, 1], in the state's precision: in bfloat16, 1 - alpha would round to 1."""
    with without_autocast(x):
        if not is_plain(*linears):
            # quantised weights are integers, and take activations as they are
            dtypes = [[p.dtype for p in f.parameters() if p.is_floating_point()] for f in linears]
            found = [f(x.to(kinds[0]) if kinds else x) for f, kinds in zip(linears, dtypes, strict=True)]
            return [torch.sigmoid(y.to(state_dtype(y))) for y in found]
        dtype, sizes = state_dtype(linears[0].weight), [n.out_features for n in linears]
        weight, bias = (
            torch.cat([getattr(n, kind) for n in linears]).to(dtype) for kind in ("weight", "bias")
        )
        return torch.sigmoid(linear(x.to(dtype), weight, bias)).split(sizes, -1)
