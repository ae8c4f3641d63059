"""Softmax attention to the keys of a sliding window and to a prefix that every query sees.

Shapes: B batch, H heads, T queries, S keys, E head width, P keys of the prefix, w window.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from titans_core.documents import Documents
from titans_kernels import document_borders


class KeyCache(NamedTuple):
    """KV cache: rotated keys and values, [B, H, S, E] each."""

    k: Tensor
    v: Tensor

    def extended(self, new: KeyCache) -> KeyCache:
        """Append the keys and values of later tokens."""
        return KeyCache(*(torch.cat(pair, 2) for pair in zip(self, new, strict=True)))


def last_keys(keys: KeyCache, keep: int) -> KeyCache:
    """Copy the last ``keep`` tokens of a cache: a view would keep the others in memory."""
    S = keys.k.shape[2]
    return keys if keep == S else KeyCache(*(x[:, :, S - keep :].clone() for x in keys))


def softmax_attention(q: Tensor, keys: KeyCache, mask: Tensor | None, prefix: KeyCache | None) -> Tensor:
    """Attention to the keys under ``mask`` (to all of them if None) and to the prefix [1, H, P, E].

    ``mask`` is [T, S] or [B, 1, T, S] bool, True where a query sees a key.
    """
    if prefix is not None:
        keys = KeyCache(*(p.expand(len(q), -1, -1, -1) for p in prefix)).extended(keys)
        mask = None if mask is None else F.pad(mask, (prefix.k.shape[2], 0), value=True)
    return F.scaled_dot_product_attention(q, *keys, attn_mask=mask)


def window_attention(
    q: Tensor, keys: KeyCache, prefix: KeyCache | None, window: int | None,
    hidden_BS: Tensor | None = None, cut_from: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Sliding-window attention of the last T of S tokens; [B, H, T, E].

    Args:
        q: rotated queries of the last tokens, [B, H, T, E].
        keys: keys and values of all tokens.
        prefix: keys and values that every token sees.
        window: number of keys that a token sees, its own among them; None for all.
        hidden_BS: [B, S] bool, keys that no query sees.
        cut_from: [B or 1, 1] position of the first key if attention is cut at multiples of the window.
    """
    T, S = q.shape[2], keys.k.shape[2]
    before = S - T
    if cut_from is not None and window is not None:
        index_BS = (cut_from + torch.arange(S, device=q.device)) // window
        if hidden_BS is not None:
            index_BS = index_BS.masked_fill(hidden_BS, -1)
        return _blocked(F.pad(q, (0, 0, before, 0)), keys, window, prefix, index_BS)[:, :, before:]
    if window is None or window >= S:
        return _dense(q, keys, prefix, hidden_BS)
    if T == 1:  # a decode step attends to the whole window
        hidden_BS = None if hidden_BS is None else hidden_BS[:, -window:]
        return _dense(q, KeyCache(*(x[:, :, -window:] for x in keys)), prefix, hidden_BS)
    # padding queries for the cached tokens, at most a window of them, keeps the blocks aligned
    q = F.pad(q, (0, 0, before, 0))
    # hidden keys are treated as another document
    index_BS = None if hidden_BS is None else hidden_BS.long()
    return _blocked(q, keys, window, prefix, index_BS)[:, :, before:]


def packed_attention(
    q: Tensor, keys: KeyCache, prefix: KeyCache | None, window: int | None, documents: Documents,
    cut: bool = False,
) -> Tensor:  # fmt: skip
    """Attention within each document of a packed batch, cut at multiples of the window if ``cut``."""
    if cut and window is not None:
        within_BT = documents.position_BT // window
        return _blocked(q, keys, window, prefix, documents.index_BT * q.shape[2] + within_BT)
    if window is not None and window < q.shape[2]:
        return _blocked(q, keys, window, prefix, documents.index_BT)
    B, T = documents.index_BT.shape
    if prefix is None and documents.one_per_row:
        return _dense(q, keys, prefix)
    if prefix is None and _flash_supports(q):
        return _varlen(q, keys, documents.cu_seqlens)
    if torch.compiler.is_compiling():  # lengths are data-dependent
        index = documents.index_BT
        mask = (index[:, None, :, None] == index[:, None, None]).tril()
        return softmax_attention(q, keys, mask, prefix)
    lengths = [end - start for start, end in pairwise(document_borders(documents.cu_seqlens, B * T))]
    # split and cat: the gradient of each slice would be a tensor of the whole batch's size
    parts = (x.transpose(0, 1).flatten(1, 2)[None].split(lengths, 2) for x in (q, *keys))
    y = torch.cat([_dense(q, KeyCache(k, v), prefix) for q, k, v in zip(*parts, strict=True)], 2)
    return y[0].unflatten(1, (B, T)).transpose(0, 1)


def _dense(q: Tensor, keys: KeyCache, prefix: KeyCache | None, hidden_BS: Tensor | None = None) -> Tensor:
    """Causal attention of the last T of S tokens to all before them."""
    T, S = q.shape[2], keys.k.shape[2]
    if hidden_BS is None and prefix is None and S == T:
        return F.scaled_dot_product_attention(q, *keys, is_causal=T > 1)
    if hidden_BS is None and T == 1:
        return softmax_attention(q, keys, None, prefix)
    mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    return softmax_attention(q, keys, mask if hidden_BS is None else mask & ~hidden_BS[:, None, None], prefix)


def _blocked(q: Tensor, keys: KeyCache, w: int, prefix: KeyCache | None, index_BT: Tensor | None) -> Tensor:
    """Sliding window in blocks of w queries and 2 w keys: linear in T, without a T x T mask.

    ``index_BT`` is each token's document; attention does not cross documents.
    """
    B, T = q.shape[0], q.shape[2]
    blocks = -(-T // w)
    pad = blocks * w - T
    q, k, v = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (blocks, w)).transpose(1, 2) for x in (q, *keys))
    k, v = (torch.cat([F.pad(x, (0,) * 6 + (1, -1)), x], 3) for x in (k, v))  # [B, blocks, H, 2w, E]
    query, key = torch.arange(w, device=q.device)[:, None], torch.arange(-w, w, device=q.device)
    mask = ((key <= query) & (key > query - w)).expand(1, blocks, w, 2 * w).clone()
    mask[:, 0, :, :w] = False  # there are no keys before the first block
    if index_BT is not None:
        own = F.pad(index_BT, (0, pad), value=-1).unflatten(1, (blocks, w))
        both = torch.cat([F.pad(own, (0, 0, 1, -1), value=-2), own], 2)
        mask = mask & (own[..., :, None] == both[..., None, :])
    mask = mask.expand(B, *mask.shape[1:]).flatten(0, 1)[:, None]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    y = softmax_attention(q, KeyCache(k, v), mask, prefix)
    return y.unflatten(0, (B, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :T]


def _flash_supports(q: Tensor) -> bool:
    """Return True if varlen flash attention supports q: half precision on a GPU."""
    low = q.dtype in (torch.bfloat16, torch.float16)
    return q.is_cuda and low and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def _varlen(q: Tensor, keys: KeyCache, cu_seqlens: Tensor) -> Tensor:
    """Varlen flash attention over all documents, none longer than a row; [B, H, T, E]."""
    from torch.nn.attention.varlen import varlen_attn  # imports the compiler, which takes seconds

    B, _, T, _ = q.shape
    flat_q, flat_k, flat_v = (x.transpose(1, 2).flatten(0, 1) for x in (q, *keys))
    y = varlen_attn(flat_q, flat_k, flat_v, cu_seqlens, cu_seqlens, T, T, window_size=(-1, 0))
    assert isinstance(y, Tensor)
    return y.unflatten(0, (B, T)).transpose(1, 2)
