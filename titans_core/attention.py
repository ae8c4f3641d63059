"""The short-term memory: softmax attention over a window, or within MAC's segments.

Shapes: B batch, T tokens, D model width, H heads, E head width, P persistent tokens, S keys, w window,
K convolution width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from titans_core.config import AttentionConfig
from titans_core.documents import Documents, reset_rows
from titans_core.layers import RotaryEmbedding, rotate
from titans_core.projections import ConvState, Projections, expand_rows
from titans_core.window import (
    KeyCache,
    flash_attention,
    flash_supports,
    last_keys,
    packed_attention,
    segment_attention,
    window_attention,
)
from titans_kernels.memory.options import on_gpu, operand_dtype


class AttentionState(NamedTuple):
    """Attention's state: the KV cache and the last inputs of the convolution."""

    keys: KeyCache | None
    conv_state: ConvState
    held_B: Tensor | None = None
    """[B] number of most recent keys that each row may attend to, after rows were reset; None for all."""


class SegmentState(NamedTuple):
    """State of MAC's attention: the KV cache of the open segment, and the inputs of both convolutions."""

    reads: AttentionState
    tokens: AttentionState

    @staticmethod
    def after(prefix: AttentionState, batch: int) -> SegmentState:
        """Return the state after the persistent tokens, for ``batch`` sequences; reads have no queries."""
        tokens = expand_rows(prefix.conv_state, batch)
        reads = {name: inputs for name, inputs in tokens.items() if name != "q"}
        return SegmentState(AttentionState(None, reads), AttentionState(None, tokens))

    def closed(self) -> SegmentState:
        """Return the state at the end of a segment: convolution inputs are kept, keys are dropped."""
        return SegmentState(*(AttentionState(None, part.conv_state) for part in self))


class Attention(Projections):
    """Causal attention with rotary positions; memory is linear in T at a fixed window.

    Queries, keys and values as in Section 4.4, with the parts that `AttentionConfig` switches on.
    Scores of normalised queries and keys are ``scale_H * sqrt(E)`` times their cosine; the scale is learned.
    """

    def __init__(self, d_model: int, config: AttentionConfig, pointwise: bool = False):
        kernel, unit = config.conv_kernel if config.conv else None, "qk" if config.qk_norm else ""
        super().__init__(d_model, config.heads, d_model // config.heads, kernel, unit, config.silu, pointwise)
        self.config = config
        # switches of `titans_core.interventions`; the cache keeps the keys of config.window
        self.window, self.muted, self.cut = config.window, False, False
        self.add_output(d_model, config.output)
        self.scale_H = nn.Parameter(torch.ones(config.heads)) if config.qk_norm else None

    def project(
        self, x_BTD: Tensor, names: str, conv_state: ConvState, documents: Documents | None = None
    ) -> tuple[list[Tensor], ConvState]:
        """Project as `Projections` does; on a GPU values have the precision of products, for flash
        attention.
        """
        heads, after = super().project(x_BTD, names, conv_state, documents)
        if on_gpu(x_BTD):  # the convolution's weights are float32 under autocast
            heads[-1] = heads[-1].to(operand_dtype(heads[-1]))
        return heads, after

    def start(self, prefix_PD: Tensor | None = None) -> tuple[KeyCache | None, AttentionState]:
        """Keys and values of the persistent tokens, and the state after them, for a batch of one.

        Persistent tokens stand before the sequence, in its convolution too, and have no position.
        """
        conv_state = self.zero_conv_state()
        if prefix_PD is None or not len(prefix_PD):
            return None, AttentionState(None, conv_state)
        (_, k, v), conv_state = self.project(prefix_PD[None], "qkv", conv_state)
        return self._keys(k, v, None), AttentionState(None, conv_state)

    def forward(
        self,
        x_BTD: Tensor,
        position_BT: Tensor,
        state: AttentionState | None = None,
        prefix_PD: Tensor | None = None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, AttentionState | None]:
        """Attend to the last ``window`` tokens (all if None) and to the persistent prefix (eq. 27).

        ``position_BT`` is [B, T] or [1, T]. Returns [B, T, D] and the state after it, None when packed.
        """
        prefix, first = self.start(prefix_PD)
        state = state or first
        (q, k, v), conv_state = self.project(x_BTD, "qkv", state.conv_state, documents)
        y, keys, held_B = self.attend(q, k, v, position_BT, state, prefix, documents)
        after = None if keys is None else AttentionState(KeyCache(*keys), conv_state, held_B)
        return self._output(y, x_BTD), after

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, position_BT: Tensor, state: AttentionState,
        prefix: KeyCache | None, documents: Documents | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None, Tensor | None]:  # fmt: skip
        """Attention of queries, keys and values [B, T, H, E] that are not rotated yet.

        Returns y [B, T, H, E], keys and values to cache, None when packed, and `AttentionState.held_B`.
        """
        rotary, window = self.rotary(position_BT), self.window
        plain_q, new, T = self._queries(q, v), self._keys(k, v, rotary), q.shape[1]
        q = rotate(plain_q, rotary)
        masked = documents is not None or prefix is not None or (window is not None and window < T)
        if masked and state.keys is None and not self.cut and flash_supports(q):
            y = flash_attention(q, [new], prefix, plain_q, window, documents).transpose(1, 2)
            return y, None if documents is not None else last_keys(new, self.kept(state, T, T)[0]), None
        if documents is not None:
            seen = _unrotated_prefix(plain_q, q, new, prefix) if rotary else (q, new, prefix)
            y = packed_attention(*seen, window, documents, self.cut)
            return y[..., : self.head_dim].transpose(1, 2), None, None
        keys = new if state.keys is None else state.keys.extended(new)
        S = keys.k.shape[2]
        seen = _unrotated_prefix(plain_q, q, keys, prefix) if rotary else (q, keys, prefix)
        hidden_BS = None
        if state.held_B is not None:  # cached keys from before a row's reset
            hidden_BS = torch.arange(S, device=q.device) < S - T - state.held_B[:, None]
        cut_from = position_BT[:, :1] - (S - T) if self.cut else None
        y = window_attention(*seen, window, hidden_BS, cut_from)
        keep, held_B = self.kept(state, S, T)
        return y[..., : self.head_dim].transpose(1, 2), last_keys(keys, keep), held_B

    def kept(self, state: AttentionState, S: int, T: int) -> tuple[int, Tensor | None]:
        """Return the number of keys to keep of S after a call for the last T, and `AttentionState.held_B`."""
        keep = S if self.config.window is None else min(S, self.config.window - 1)
        # a row that has filled the window since its reset attends to all of it
        return keep, None if state.held_B is None or keep <= T else (state.held_B + T).clamp(max=keep)

    def reset(
        self, state: AttentionState, reset_B: Tensor, prefix_PD: Tensor | None = None
    ) -> AttentionState:
        """``state`` with rows ``reset_B`` [B] as after the persistent prefix; masks their cached keys."""
        conv_state = reset_rows(state.conv_state, reset_B, self.start(prefix_PD)[1].conv_state)
        if state.keys is None:
            return state._replace(conv_state=conv_state)
        held = state.held_B
        if held is None:
            held = torch.full_like(reset_B, state.keys.k.shape[2], dtype=torch.long)
        return AttentionState(state.keys, conv_state, held.masked_fill(reset_B, 0))

    def segment(
        self,
        x_BTD: Tensor,
        read_BTD: Tensor,
        position_BT: Tensor,
        state: SegmentState,
        prefix: KeyCache | None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, SegmentState]:
        """Attend over ``[p] || r || Z`` of one segment, or the next part of one (eqs. 22-23).

        Token i sees p, the reads r_j and the tokens Z_j with j <= i: r_j is a function of token j, so a
        plain causal mask over the concatenation would show it the future. For the same reason r and Z have a
        convolution each. ``position_BT`` counts from the start of the segment: in a text of any length
        positions are then as in training. ``state`` is of the segment's earlier part, `closed` at its start.
        ``documents`` are whole segments in one row, with a state each. Returns [B, T, D] and the state after
        the tokens.
        """
        rotary = self.rotary(position_BT)
        (q, k, v), conv_state = self.project(x_BTD, "qkv", state.tokens.conv_state, documents)
        (read_k, read_v), read_conv_state = self.project(read_BTD, "kv", state.reads.conv_state, documents)
        q, tokens, reads = self._queries(q, v), self._keys(k, v, rotary), self._keys(read_k, read_v, rotary)
        q = rotate(q, rotary)
        if state.tokens.keys is None and flash_supports(q):
            y = flash_attention(q, [tokens, reads], prefix, q, None, documents)
        else:
            if state.tokens.keys is not None and state.reads.keys is not None:
                tokens, reads = state.tokens.keys.extended(tokens), state.reads.keys.extended(reads)
            y = segment_attention(q, tokens, reads, prefix, documents)
        after = SegmentState(AttentionState(reads, read_conv_state), AttentionState(tokens, conv_state))
        return self._output(y.transpose(1, 2), x_BTD), after

    def state_bytes(self, length: int) -> int:
        """Bytes of keys and values one sequence carries after ``length`` tokens, and of the convolution."""
        window = self.config.window
        kept = length if window is None else min(length, window - 1)
        keys = 2 * kept * self.w_k.weight.shape[0] * self.w_k.weight.element_size()
        return keys + self.conv_bytes()

    def rotary(self, position_BT: Tensor) -> RotaryEmbedding | None:
        """Return the rotary embedding of some positions; None without."""
        if self.config.positions == "none":
            return None
        dtype = torch.promote_types(self.w_q.weight.dtype, torch.float32)
        return RotaryEmbedding.at(position_BT, self.head_dim, self.config.rope_base, dtype)

    def _queries(self, q_BTHE: Tensor, v: Tensor) -> Tensor:
        """[B, H, T, E] queries times the learned scale, in the precision of the values."""
        q = q_BTHE.transpose(1, 2)
        if self.scale_H is not None:  # scores are divided by sqrt(E)
            q = q * (self.head_dim * self.scale_H)[:, None, None]
        return q.to(v.dtype)

    def _keys(self, k_BTHE: Tensor, v_BTHE: Tensor, rotary: RotaryEmbedding | None) -> KeyCache:
        return KeyCache(rotate(k_BTHE.transpose(1, 2).to(v_BTHE.dtype), rotary), v_BTHE.transpose(1, 2))

    def _output(self, y_BTHE: Tensor, x_BTD: Tensor) -> Tensor:
        """Return the heads merged and projected, [B, T, D]; normalised and gated by x first if configured."""
        if self.muted:
            return y_BTHE.new_zeros(*y_BTHE.shape[:2], self.w_o.out_features)
        return self.merge(y_BTHE, x_BTD) if self.config.output else self.w_o(y_BTHE.flatten(2))


def _unrotated_prefix(
    plain_q: Tensor, q: Tensor, keys: KeyCache, prefix: KeyCache | None
) -> tuple[Tensor, KeyCache, KeyCache | None]:
    """Return queries, keys and prefix in twice the width, so that only tokens see rotated queries.

    Persistent tokens have no position. A rotated query would score them by its distance from the start of the
    text, beyond the training length out of distribution. So a query is its rotated and its plain version
    concatenated; keys of tokens are zero-padded in the second half, the prefix's in the first.
    """
    if prefix is None:
        return q, keys, None
    E = q.shape[-1]
    left, right = (lambda x: F.pad(x, (0, E))), (lambda x: F.pad(x, (E, 0)))
    # compensates for the attention scale, whose width has doubled
    q = 2**0.5 * torch.cat([q, plain_q], -1)
    return q, KeyCache(*map(left, keys)), KeyCache(right(prefix.k), left(prefix.v))
