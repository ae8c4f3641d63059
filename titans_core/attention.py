"""The short-term memory: softmax attention over a window, or within MAC's segments.

Shapes: B batch, T tokens, D model width, H heads, E head width, P persistent tokens, S keys, w window,
K convolution width.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from titans_core.config import AttentionConfig
from titans_core.documents import Documents, reset_rows
from titans_core.layers import Linear, RotaryEmbedding, rotate
from titans_core.projections import ConvState, Projections, expand_rows
from titans_kernels import document_borders
from titans_kernels.attention import WindowOptions, attend_window, serves_window


class KeyCache(NamedTuple):
    """KV cache: rotated keys and values, [B, H, S, E] each."""

    k: Tensor
    v: Tensor

    def extended(self, new: KeyCache) -> KeyCache:
        """Append the keys and values of later tokens."""
        return KeyCache(*(torch.cat(pair, 2) for pair in zip(self, new, strict=True)))


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
        """The state after the persistent tokens, for ``batch`` sequences; reads have no queries."""
        tokens = expand_rows(prefix.conv_state, batch)
        reads = {name: inputs for name, inputs in tokens.items() if name != "q"}
        return SegmentState(AttentionState(None, reads), AttentionState(None, tokens))

    def closed(self) -> SegmentState:
        """The state at the end of a segment: convolution inputs are kept, keys are dropped."""
        return SegmentState(*(AttentionState(None, part.conv_state) for part in self))


class Attention(Projections):
    """Causal attention with rotary positions; memory is linear in T at a fixed window.

    Queries, keys and values as in Section 4.4, with the parts that `AttentionConfig` switches on.
    Scores of normalised queries and keys are ``scale_H * sqrt(E)`` times their cosine; the scale is learned.
    """

    def __init__(self, d_model: int, config: AttentionConfig):
        kernel, unit = config.conv_kernel if config.conv else None, "qk" if config.qk_norm else ""
        super().__init__(d_model, config.heads, d_model // config.heads, kernel, unit, config.silu)
        self.config = config
        # switches of `titans_core.interventions`; the cache keeps the keys of config.window
        self.window, self.muted, self.cut = config.window, False, False
        self.w_o = Linear(d_model, d_model, bias=False)
        self.scale_H = nn.Parameter(torch.ones(config.heads)) if config.qk_norm else None

    def start(self, prefix_PD: Tensor | None = None) -> tuple[KeyCache | None, AttentionState]:
        """Keys and values of the persistent tokens, and the state after them, for a batch of one.

        Persistent tokens stand before the sequence, in its convolution too, and have no position.
        """
        conv_state = self.zero_conv_state()
        if prefix_PD is None or not len(prefix_PD):
            return None, AttentionState(None, conv_state)
        (_, k, v), conv_state = self._heads(prefix_PD[None], "qkv", conv_state)
        return KeyCache(k, v), AttentionState(None, conv_state)

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
        state, window = state or first, self.window
        found, conv_state = self.project(x_BTD, "qkv", state.conv_state, documents)
        if compiled := self._compiled(found, position_BT, state, prefix, documents):
            y_BTHE, keys, held = compiled
            after = None if documents is not None else AttentionState(keys, conv_state, held)
            return self._output(y_BTHE.transpose(1, 2)), after
        q, k, v = self._arranged("qkv", found)
        rotary = self.rotary(position_BT)
        plain_q, q, k = None if rotary is None else q, rotate(q, rotary), rotate(k, rotary)
        if documents is not None:
            seen = _with_unrotated_prefix(plain_q, q, KeyCache(k, v), prefix)
            return self._output(_packed(*seen, window, documents, self.cut)[..., : self.head_dim]), None
        keys = KeyCache(k, v) if state.keys is None else state.keys.extended(KeyCache(k, v))
        S, T = keys.k.shape[2], k.shape[2]
        seen = _with_unrotated_prefix(plain_q, q, keys, prefix)
        hidden_BS = _hidden_keys(state.held_B, S - T, T)
        cut_from = position_BT[:, :1] - (S - T) if self.cut else None
        y = _windowed(*seen, window, S - T, hidden_BS, cut_from)[..., : self.head_dim]
        keep, held = self._kept(state, S, T)
        return self._output(y), AttentionState(KeyCache(*(_last(x, keep) for x in keys)), conv_state, held)

    def _compiled(
        self, found: list[Tensor], position_BT: Tensor, state: AttentionState, prefix: KeyCache | None,
        documents: Documents | None,
    ) -> tuple[Tensor, KeyCache, Tensor | None] | None:  # fmt: skip
        """Attention of q, k and v [B, T, H, E] in C++, or None if that does not support the call.

        Returns y [B, T, H, E], the keys after it, and how many of them each row sees.
        """
        (q, k, v), keys, T = found, state.keys, found[0].shape[1]
        before = 0 if keys is None else keys.k.shape[2]
        alone = documents is None
        if (
            self.cut
            or (alone and len(position_BT) != 1)
            or (keys is not None and len(keys.k) != len(q))
            or not serves_window(q, [k, v, *(prefix or ()), *(keys or ())], self.window, before)
        ):
            return None
        keep, held = self._kept(state, before + T, T) if alone else (0, None)
        rotary = self.rotary(position_BT if alone else torch.arange(T)[None])
        rotary = None if rotary is None else (rotary.cos[0, 0], rotary.sin[0, 0])
        scale = q.new_ones(self.heads) if self.scale_H is None else self.head_dim * self.scale_H
        borders = None if documents is None else documents.cu_seqlens
        options = WindowOptions(self.window, keep, rotary, state.held_B, borders)
        y, after = attend_window(q, k, v, self.head_dim**-0.5 * scale, options, prefix, keys)
        return y, KeyCache(*after), held

    def _kept(self, state: AttentionState, S: int, T: int) -> tuple[int, Tensor | None]:
        """How many of S keys are kept after a call for the last T of them, and how many each row sees."""
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
    ) -> tuple[Tensor, SegmentState]:
        """Attention over ``[p] || r || Z`` of one segment, or the next part of one (eqs. 22-23).

        Token i sees p, the reads r_j and the tokens Z_j with j <= i: r_j is a function of token j, so a
        plain causal mask over the concatenation would show it the future. For the same reason r and Z have a
        convolution each. ``position_BT`` counts from the start of the segment: in a text of any length
        positions are then those of training. ``state`` is that of the segment's earlier part, `closed` at its
        start. Returns [B, T, D] and the state after the tokens.
        """
        rotary = self.rotary(position_BT)
        (q, k, v), conv_state = self._heads(x_BTD, "qkv", state.tokens.conv_state)
        tokens = KeyCache(rotate(k, rotary), v)
        (k, v), read_conv_state = self._heads(read_BTD, "kv", state.reads.conv_state)
        reads = KeyCache(rotate(k, rotary), v)
        if state.tokens.keys is not None and state.reads.keys is not None:
            tokens, reads = state.tokens.keys.extended(tokens), state.reads.keys.extended(reads)
        T, S = q.shape[2], tokens.k.shape[2]
        causal = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
        mask, seen = torch.cat([causal, causal], 1), reads.extended(tokens)
        if prefix is not None:
            prefix = KeyCache(*(x.expand(q.shape[0], -1, -1, -1) for x in prefix))
            mask, seen = F.pad(mask, (prefix.k.shape[2], 0), value=True), prefix.extended(seen)
        y = F.scaled_dot_product_attention(rotate(q, rotary), *seen, attn_mask=mask)
        after = SegmentState(AttentionState(reads, read_conv_state), AttentionState(tokens, conv_state))
        return self._output(y), after

    def state_bytes(self, length: int) -> int:
        """Bytes of keys and values one sequence carries after ``length`` tokens, and of the convolution."""
        window = self.config.window
        kept = length if window is None else min(length, window - 1)
        keys = 2 * kept * self.w_k.weight.shape[0] * self.w_k.weight.element_size()
        return keys + self.conv_bytes()

    def _heads(
        self, x_BTD: Tensor, names: str, conv_state: ConvState, documents: Documents | None = None
    ) -> tuple[list[Tensor], ConvState]:
        """Each of ``names``, [B, H, T, E] and not yet rotated, and the next state of the convolution."""
        found, conv_state = self.project(x_BTD, names, conv_state, documents)
        return self._arranged(names, found), conv_state

    def _arranged(self, names: str, found: list[Tensor]) -> list[Tensor]:
        """What `project` returns as `_heads` does."""
        parts = {name: y.transpose(1, 2) for name, y in zip(names, found, strict=True)}
        # a copy: a view would keep q and k in memory as long as the cache
        parts["v"] = v = parts["v"].clone(memory_format=torch.contiguous_format)
        if self.scale_H is not None and "q" in parts:  # scores are divided by sqrt(E)
            parts["q"] = parts["q"] * (self.head_dim * self.scale_H)[:, None, None]
        return [y.to(v.dtype) for y in parts.values()]

    def _output(self, y_BHTE: Tensor) -> Tensor:
        """Heads merged and projected, [B, T, D]."""
        if self.muted:
            B, _, T, _ = y_BHTE.shape
            return y_BHTE.new_zeros(B, T, self.w_o.out_features)
        return self.w_o(y_BHTE.transpose(1, 2).flatten(2))

    def rotary(self, position_BT: Tensor) -> RotaryEmbedding | None:
        """The rotary embedding of some positions; None without."""
        if self.config.positions == "none":
            return None
        weight = self.w_q.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return RotaryEmbedding.at(
            position_BT, weight.shape[0] // self.config.heads, self.config.rope_base, dtype
        )


def _with_unrotated_prefix(
    plain_q: Tensor | None, q: Tensor, keys: KeyCache, prefix: KeyCache | None
) -> tuple[Tensor, Tensor, Tensor, KeyCache | None]:
    """Queries, keys, values and prefix in twice the width, so that only tokens see rotated queries.

    Persistent tokens have no position. A rotated query would score them by its distance from the start of the
    text, beyond the training length out of distribution. So a query is its rotated and its plain version
    concatenated; keys of tokens are zero-padded in the second half, those of the prefix in the first.
    ``plain_q`` None: no query is rotated.
    """
    if prefix is None or plain_q is None:
        return q, keys.k, keys.v, prefix
    E = q.shape[-1]
    left, right = (lambda x: F.pad(x, (0, E))), (lambda x: F.pad(x, (E, 0)))
    # compensates for the attention scale, whose width has doubled
    q = 2**0.5 * torch.cat([q, plain_q], -1)
    return q, left(keys.k), left(keys.v), KeyCache(right(prefix.k), left(prefix.v))


def _last(x: Tensor, keep: int) -> Tensor:
    """The last ``keep`` tokens of [B, H, S, E], copied: a view would keep the others in memory."""
    S = x.shape[2]
    return x if keep == S else x[:, :, S - keep :].clone()


def _hidden_keys(held_B: Tensor | None, before: int, T: int) -> Tensor | None:
    """[B, before + T] bool mask of the cached keys from before a row's reset."""
    if held_B is None:
        return None
    key = torch.arange(before + T, device=held_B.device)
    return key < before - held_B[:, None]


def _windowed(
    q: Tensor, k: Tensor, v: Tensor, prefix: KeyCache | None, window: int | None, before: int,
    hidden_BS: Tensor | None = None, cut_from: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Sliding-window attention of the last T of ``before + T`` tokens; [B, H, T, E].

    ``cut_from`` [B or 1, 1] is the position of the first key if attention is cut at multiples of the window.
    """
    T = q.shape[2]
    if cut_from is not None and window is not None:
        key = torch.arange(before + T, device=q.device)
        index_BS = (cut_from + key) // window
        if hidden_BS is not None:
            index_BS = index_BS.masked_fill(hidden_BS, -1)
        return _blocked(F.pad(q, (0, 0, before, 0)), k, v, window, prefix, index_BS)[:, :, before:]
    if window is None or window >= before + T:
        return _dense(q, k, v, prefix, hidden_BS)
    if T == 1:  # a decode step attends to the whole window
        hidden_BS = None if hidden_BS is None else hidden_BS[:, -window:]
        return _dense(q, k[:, :, -window:], v[:, :, -window:], prefix, hidden_BS)
    # padding queries for the cached tokens, at most a window of them, keeps the blocks aligned
    q = F.pad(q, (0, 0, before, 0))
    # masked keys are treated as another document
    return _blocked(q, k, v, window, prefix, None if hidden_BS is None else hidden_BS.long())[:, :, before:]


def _dense(
    q: Tensor, k: Tensor, v: Tensor, prefix: KeyCache | None, hidden_BS: Tensor | None = None
) -> Tensor:
    B, _, T, _ = q.shape
    S = k.shape[2]
    if hidden_BS is not None:
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T) & ~hidden_BS[:, None, None]
        if prefix is not None:
            k, v = (torch.cat([p.expand(B, -1, -1, -1), x], 2) for p, x in zip(prefix, (k, v), strict=True))
            mask = F.pad(mask, (prefix.k.shape[2], 0), value=True)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    if prefix is None:
        if S == T or T == 1:
            return F.scaled_dot_product_attention(q, k, v, is_causal=S == T and T > 1)
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    P = prefix.k.shape[2]
    k, v = (torch.cat([p.expand(B, -1, -1, -1), x], 2) for p, x in zip(prefix, (k, v), strict=True))
    mask = torch.ones(T, P + S, dtype=torch.bool, device=q.device).tril(P + S - T)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _blocked(
    q: Tensor, k: Tensor, v: Tensor, w: int, prefix: KeyCache | None, index_BT: Tensor | None
) -> Tensor:
    """Sliding window in blocks of w queries and 2 w keys: linear in T, without a T x T mask.

    ``index_BT`` is each token's document; attention does not cross documents.
    """
    B, T = q.shape[0], q.shape[2]
    blocks = -(-T // w)
    pad = blocks * w - T
    q, k, v = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (blocks, w)).transpose(1, 2) for x in (q, k, v))
    k, v = (torch.cat([F.pad(x, (0,) * 6 + (1, -1)), x], 3) for x in (k, v))  # [B, blocks, H, 2w, E]
    query, key = torch.arange(w, device=q.device)[:, None], torch.arange(-w, w, device=q.device)
    mask = ((key <= query) & (key > query - w)).expand(1, blocks, w, 2 * w).clone()
    mask[:, 0, :, :w] = False  # there are no keys before the first block
    if index_BT is not None:
        own = F.pad(index_BT, (0, pad), value=-1).unflatten(1, (blocks, w))
        both = torch.cat([F.pad(own, (0, 0, 1, -1), value=-2), own], 2)
        mask = mask & (own[..., :, None] == both[..., None, :])
    if prefix is not None:
        P = prefix.k.shape[2]
        k, v = (
            torch.cat([p[:, None].expand(B, blocks, -1, -1, -1), x], 3)
            for p, x in zip(prefix, (k, v), strict=True)
        )
        mask = F.pad(mask, (P, 0), value=True)
    mask = mask.expand(B, *mask.shape[1:]).flatten(0, 1)[:, None]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return y.unflatten(0, (B, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :T]


def _packed(
    q: Tensor, k: Tensor, v: Tensor, prefix: KeyCache | None, window: int | None, documents: Documents,
    cut: bool = False,
) -> Tensor:  # fmt: skip
    """Attention within each document of a packed batch."""
    if cut and window is not None:
        within_BT = documents.position_BT // window
        return _blocked(q, k, v, window, prefix, documents.index_BT * q.shape[2] + within_BT)
    if window is not None and window < q.shape[2]:
        return _blocked(q, k, v, window, prefix, documents.index_BT)
    B, T = documents.index_BT.shape
    if prefix is None and documents.cu_seqlens.numel() - 1 == B:  # each row is one document
        return _dense(q, k, v, prefix)
    if prefix is None and _flash_supports(q):
        return _varlen(q, k, v, documents.cu_seqlens)
    if torch.compiler.is_compiling():  # lengths are data-dependent
        return _masked(q, k, v, prefix, documents.index_BT)
    lengths = [end - start for start, end in pairwise(document_borders(documents.cu_seqlens, B * T))]
    # split and cat: the gradient of each slice would be a tensor of the whole batch's size
    parts = (x.transpose(0, 1).flatten(1, 2)[None].split(lengths, 2) for x in (q, k, v))
    y = torch.cat([_dense(q, k, v, prefix) for q, k, v in zip(*parts, strict=True)], 2)
    return y[0].unflatten(1, (B, T)).transpose(0, 1)


def _flash_supports(q: Tensor) -> bool:
    """Whether varlen flash attention supports q: half precision on a GPU."""
    low = q.dtype in (torch.bfloat16, torch.float16)
    return q.is_cuda and low and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def _varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Varlen flash attention over all documents, none longer than a row; [B, H, T, E]."""
    from torch.nn.attention.varlen import varlen_attn  # imports the compiler, which takes seconds

    B, _, T, _ = q.shape
    flat_q, flat_k, flat_v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    y = varlen_attn(flat_q, flat_k, flat_v, cu_seqlens, cu_seqlens, T, T, window_size=(-1, 0))
    assert isinstance(y, Tensor)
    return y.unflatten(0, (B, T)).transpose(1, 2)


def _masked(q: Tensor, k: Tensor, v: Tensor, prefix: KeyCache | None, index_BT: Tensor) -> Tensor:
    """Dense attention with a T x T mask, whose shape does not depend on the documents."""
    mask = (index_BT[:, None, :, None] == index_BT[:, None, None]).tril()
    if prefix is not None:
        B, P = index_BT.shape[0], prefix.k.shape[2]
        k, v = (torch.cat([p.expand(B, -1, -1, -1), x], 2) for p, x in zip(prefix, (k, v), strict=True))
        mask = F.pad(mask, (P, 0), value=True)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
