"""Queries, keys and values of the memory and of attention, and their output (Section 4.4).

Shapes: B batch, T tokens, D model width, H heads, E head width, C = H * E channels, K convolution width.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from titans_core.documents import Documents
from titans_core.layers import CausalConv, RMSNorm
from titans_kernels import state_dtype
from titans_kernels.memory.options import operand_dtype

ConvState = dict[str, Tensor]
"""For q, k and v the last inputs of the convolution, [B, K - 1, C] each; empty without a convolution."""


class Projections(nn.Module):
    """Linear projections of q, k and v, SiLU, a causal convolution, L2-normalised heads, and their output.

    Args:
        d_model: width D of the input.
        heads: number of heads H.
        head_dim: their width E.
        conv_kernel: K; None for no convolution.
        normalized: names of the projections to L2-normalise, such as ``"qk"``.
        silu: whether SiLU follows the projections.
        pointwise: whether the convolution is depthwise-separable, and not depthwise alone.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        head_dim: int,
        conv_kernel: int | None,
        normalized: str,
        silu: bool = True,
        pointwise: bool = False,
    ):
        super().__init__()
        self.heads, self.head_dim, self.normalized, self.silu = heads, head_dim, normalized, silu
        channels = heads * head_dim
        self.w_q = nn.Linear(d_model, channels, bias=False)
        self.w_k = nn.Linear(d_model, channels, bias=False)
        self.w_v = nn.Linear(d_model, channels, bias=False)
        self.has_conv = conv_kernel is not None
        if conv_kernel is not None:
            self.conv_q = CausalConv(channels, conv_kernel, pointwise)
            self.conv_k = CausalConv(channels, conv_kernel, pointwise)
            self.conv_v = CausalConv(channels, conv_kernel, pointwise)

    def add_output(self, d_model: int, parts: tuple[str, ...]) -> None:
        """Add the output projection and the ``parts`` before it; last, as initialisation is in order."""
        channels = self.heads * self.head_dim
        self.output_norm = RMSNorm(self.head_dim) if "norm" in parts else None
        self.output_gate = nn.Linear(d_model, channels, bias=False) if "gate" in parts else None
        self.w_o = nn.Linear(channels, d_model, bias=False)

    def merge(self, y_BTHE: Tensor, x_BTD: Tensor) -> Tensor:
        """Return heads [B, T, H, E] normalised, gated by x and projected, [B, T, D]."""
        y, gate = y_BTHE, None
        if self.output_gate is not None:
            gate = self.output_gate(x_BTD).unflatten(-1, y.shape[-2:])
        if self.output_norm is not None:
            y = self.output_norm(y, gate)
        elif gate is not None:
            y = y.to(gate.dtype) * F.silu(gate)
        return self.w_o(y.flatten(-2).to(x_BTD.dtype))

    def project(
        self, x_BTD: Tensor, names: str, conv_state: ConvState, documents: Documents | None = None
    ) -> tuple[list[Tensor], ConvState]:
        """Project to each of ``names`` [B, T, H, E], normalised ones in the precision of the state.

        ``conv_state`` is the state after the previous tokens of every row, or, when packed, a batch of one at
        the start of every document. Returns also the state after the last token, meaningless when packed.
        """
        heads, after = [], dict(conv_state)
        for name in names:
            y = getattr(self, f"w_{name}")(x_BTD)
            y = F.silu(y) if self.silu else y
            if self.has_conv:
                y, after[name] = getattr(self, f"conv_{name}")(y, conv_state[name], documents)
            head = y.unflatten(-1, (self.heads, self.head_dim))
            heads.append(_l2_normalized(head) if name in self.normalized else head)
        return heads, after

    def zero_conv_state(self, names: str = "qkv") -> ConvState:
        """Return the convolution state before the first token, for a batch of one."""
        if not self.has_conv:
            return {}
        dtype = operand_dtype(self.w_q.weight)  # later ones are inputs of the convolution
        zeros = {name: getattr(self, f"conv_{name}").zero_state(1) for name in names}
        return {name: inputs.to(dtype) for name, inputs in zeros.items()}

    def conv_bytes(self, names: str = "qkv") -> int:
        """Bytes of the convolution state of ``names`` per sequence."""
        return sum(inputs.nbytes for inputs in self.zero_conv_state(names).values())


def expand_rows(conv_state: ConvState, batch: int) -> ConvState:
    """Repeat the state of a batch of one for ``batch`` rows."""
    return {name: inputs.expand(batch, -1, -1) for name, inputs in conv_state.items()}


def _l2_normalized(x: Tensor) -> Tensor:
    """x with L2 norm 1 over the last dimension, in the precision of the state.

    Below a norm of 1e-6 it is x / 1e-6, which also is its gradient at 0.
    """
    return F.normalize(x.to(state_dtype(x)), dim=-1, eps=1e-6)
