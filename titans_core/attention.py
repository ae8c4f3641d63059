"""The short-term memory: softmax attention over a window, or within MAC's segments.

Shapes: B batch, T tokens, D model width, H heads, E head width, P persistent tokens, S keys, w window.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from titans_core.config import AttentionConfig
from titans_core.documents import Documents
from titans_core.layers import RotaryEmbedding, rotate
from titans_kernels import document_borders


class KeyCache(NamedTuple):
    """Keys (rotated) and values a later query may still see, [B, H, S, E] each."""

    k: Tensor
    v: Tensor


class Attention(nn.Module):
    """Causal attention with rotary positions; memory is linear in T at a fixed window."""

    def __init__(self, d_model: int, config: AttentionConfig):
        super().__init__()
        self.config = config
        self.w_q = nn.Linear(d_model, d_model, bias=False)
        self.w_k = nn.Linear(d_model, d_model, bias=False)
        self.w_v = nn.Linear(d_model, d_model, bias=False)
        self.w_o = nn.Linear(d_model, d_model, bias=False)

    def forward(
        self,
        x_BTD: Tensor,
        position_BT: Tensor,
        cache: KeyCache | None = None,
        prefix_PD: Tensor | None = None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, KeyCache | None]:
        """Attend to the last ``window`` tokens (all if None) and to the persistent prefix (eq. 27).

        ``position_BT`` is [B, T] or [1, T]. Returns [B, T, D] and the cache after it, None when packed.
        """
        q, k, v = self.project(x_BTD, self._rotary(position_BT))
        prefix = None if prefix_PD is None or not len(prefix_PD) else self.prefix_keys(prefix_PD)
        window = self.config.window
        if documents is not None:
            y = _packed(q, k, v, window, prefix, documents)
            return self.output(y), None
        before = 0
        if cache is not None:
            before = cache.k.shape[2]
            k, v = torch.cat([cache.k, k], 2), torch.cat([cache.v, v], 2)
        y = _windowed(q, k, v, window, prefix, before)
        keep = k.shape[2] if window is None else min(k.shape[2], window - 1)
        return self.output(y), KeyCache(_last(k, keep), _last(v, keep))

    def segment(
        self,
        x_BTD: Tensor,
        read_BTD: Tensor,
        position_BT: Tensor,
        open_keys: tuple[KeyCache, KeyCache] | None,
        prefix_PD: Tensor | None,
    ) -> tuple[Tensor, tuple[KeyCache, KeyCache]]:
        """Attention over ``[p] || r || Z`` of one segment, or the next part of one (eqs. 22-23).

        Token i sees p, the reads r_j and the tokens Z_j with j <= i: r_j is a function of token j, so a
        plain causal mask over the concatenation would show it the future. ``open_keys`` are those of the
        segment's earlier part. Returns [B, T, D] and the keys of r and Z so far.
        """
        rotary = self._rotary(position_BT)
        q, k, v = self.project(x_BTD, rotary)
        k_read, v_read = rotate(self._heads(self.w_k(read_BTD)), rotary), self._heads(self.w_v(read_BTD))
        reads, tokens = KeyCache(k_read, v_read), KeyCache(k, v)
        if open_keys is not None:
            reads, tokens = (_extend(old, new) for old, new in zip(open_keys, (reads, tokens), strict=True))
        T, S = q.shape[2], tokens.k.shape[2]
        causal = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
        mask, keys, values = [causal, causal], [reads.k, tokens.k], [reads.v, tokens.v]
        if prefix_PD is not None and len(prefix_PD):
            prefix = self.prefix_keys(prefix_PD)
            mask.insert(0, causal.new_ones(T, len(prefix_PD)))
            keys.insert(0, prefix.k.expand(q.shape[0], -1, -1, -1))
            values.insert(0, prefix.v.expand(q.shape[0], -1, -1, -1))
        y = F.scaled_dot_product_attention(
            q, torch.cat(keys, 2), torch.cat(values, 2), attn_mask=torch.cat(mask, 1)
        )
        return self.output(y), (reads, tokens)

    def state_bytes(self, length: int) -> int:
        """Bytes of keys and values one sequence carries after ``length`` tokens."""
        window = self.config.window
        kept = length if window is None else min(length, window - 1)
        return 2 * kept * self.w_k.weight.shape[0] * self.w_k.weight.element_size()

    def project(self, x_BTD: Tensor, rotary: RotaryEmbedding) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, [B, H, T, E] each."""
        q, k, v = (self._heads(w(x_BTD)) for w in (self.w_q, self.w_k, self.w_v))
        return rotate(q, rotary), rotate(k, rotary), v

    def prefix_keys(self, prefix_PD: Tensor) -> KeyCache:
        """Keys and values of the persistent tokens, which have no position; [1, H, P, E]."""
        return KeyCache(*(self._heads(w(prefix_PD[None])) for w in (self.w_k, self.w_v)))

    def output(self, y_BHTE: Tensor) -> Tensor:
        """Heads merged and projected, [B, T, D]."""
        return self.w_o(y_BHTE.transpose(1, 2).flatten(2))

    def _rotary(self, position_BT: Tensor) -> RotaryEmbedding:
        weight = self.w_q.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return RotaryEmbedding.at(
            position_BT, weight.shape[0] // self.config.heads, self.config.rope_base, dtype
        )

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.config.heads, -1)).transpose(1, 2)


def _extend(old: KeyCache, new: KeyCache) -> KeyCache:
    return KeyCache(torch.cat([old.k, new.k], 2), torch.cat([old.v, new.v], 2))


def _last(x: Tensor, keep: int) -> Tensor:
    """The last ``keep`` tokens of [B, H, S, E], copied: a view would keep the others alive."""
    S = x.shape[2]
    return x if keep == S else x[:, :, S - keep :].clone()


def _windowed(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, prefix: KeyCache | None, before: int
) -> Tensor:
    """Queries are the last T of ``before + T`` keys; [B, H, T, E]."""
    T = q.shape[2]
    if window is None or window >= before + T:
        return _dense(q, k, v, prefix)
    if T == 1:  # a decode step sees every key that is left in the window
        return _dense(q, k[:, :, -window:], v[:, :, -window:], prefix)
    # dummy queries for the cached tokens keep the blocks aligned; at most a window of them
    return _blocked(F.pad(q, (0, 0, before, 0)), k, v, window, prefix, None)[:, :, before:]


def _dense(q: Tensor, k: Tensor, v: Tensor, prefix: KeyCache | None) -> Tensor:
    B, _, T, _ = q.shape
    S = k.shape[2]
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
    """Sliding window in blocks of w queries against 2 w keys: linear in T, no T x T mask.

    ``index_BT``: the document of each token; a query sees its own document only.
    """
    B, T = q.shape[0], q.shape[2]
    blocks = -(-T // w)
    pad = blocks * w - T
    q, k, v = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (blocks, w)).transpose(1, 2) for x in (q, k, v))
    k, v = (torch.cat([F.pad(x, (0,) * 6 + (1, -1)), x], 3) for x in (k, v))  # [B, blocks, H, 2w, E]
    query, key = torch.arange(w, device=q.device)[:, None], torch.arange(-w, w, device=q.device)
    mask = ((key <= query) & (key > query - w)).expand(1, blocks, w, 2 * w).clone()
    mask[:, 0, :, :w] = False  # nothing stands before the first block
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
    q: Tensor, k: Tensor, v: Tensor, window: int | None, prefix: KeyCache | None, documents: Documents
) -> Tensor:
    """Attention within each document of a packed batch."""
    if window is not None and window < q.shape[2]:
        return _blocked(q, k, v, window, prefix, documents.index_BT)
    B, T = documents.index_BT.shape
    if prefix is None and documents.cu_seqlens.numel() - 1 == B:  # each row is one document
        return _dense(q, k, v, prefix)
    if prefix is None and _flash_takes(q):
        return _varlen(q, k, v, documents.cu_seqlens)
    if torch.compiler.is_compiling():  # which knows no lengths
        return _masked(q, k, v, prefix, documents.index_BT)
    lengths = [end - start for start, end in pairwise(document_borders(documents.cu_seqlens, B * T))]
    # split and cat: the gradient of a slice, or of a write to one, would be as large as the whole batch
    parts = (x.transpose(0, 1).flatten(1, 2)[None].split(lengths, 2) for x in (q, k, v))
    y = torch.cat([_dense(q, k, v, prefix) for q, k, v in zip(*parts, strict=True)], 2)
    return y[0].unflatten(1, (B, T)).transpose(0, 1)


def _flash_takes(q: Tensor) -> bool:
    """Whether the kernel for documents of any lengths does: it knows half precision on a GPU alone."""
    low = q.dtype in (torch.bfloat16, torch.float16)
    return q.is_cuda and low and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def _varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    """All documents in one kernel, [B, H, T, E]; none of them is longer than a row."""
    from torch.nn.attention.varlen import varlen_attn  # which imports the compiler, seconds of it

    B, _, T, _ = q.shape
    flat_q, flat_k, flat_v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    y = varlen_attn(flat_q, flat_k, flat_v, cu_seqlens, cu_seqlens, T, T, window_size=(-1, 0))
    assert isinstance(y, Tensor)
    return y.unflatten(0, (B, T)).transpose(1, 2)


def _masked(q: Tensor, k: Tensor, v: Tensor, prefix: KeyCache | None, index_BT: Tensor) -> Tensor:
    """Row by row with a mask of T x T: the same for any documents."""
    mask = (index_BT[:, None, :, None] == index_BT[:, None, None]).tril()
    if prefix is not None:
        B, P = index_BT.shape[0], prefix.k.shape[2]
        k, v = (torch.cat([p.expand(B, -1, -1, -1), x], 2) for p, x in zip(prefix, (k, v), strict=True))
        mask = F.pad(mask, (P, 0), value=True)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
